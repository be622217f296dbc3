"""tools/builder/planned.py: what a plan comes to, in buckets, bytes, layouts and arguments."""

from __future__ import annotations

from safetensors.torch import load_file
from support import tiny

from npucompile.graphs.types import Bucket
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.plan import Options


def test_bytes_are_those_of_the_real_tensors(tiny_checkpoint):
    plan = tiny.planned(tiny_checkpoint)
    file = tiny_checkpoint / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert plan.params_bytes == file.stat().st_size - header
    # Of the one attention layer, and of the draft head.
    keys_and_values = 2 * 2 * plan.limits.num_pages * plan.limits.page_size * 16 * 4
    recurrent = plan.limits.num_slots * 2 * 8 * 8 * 4
    convolved = plan.limits.num_slots * 3 * (2 * 8 + 2 * 8) * 4
    request_slots = plan.limits.num_request_slots * (2 + 4) * 4
    assert plan.state_bytes == keys_and_values + recurrent + convolved + request_slots
    head = sum(tensor.nbytes for name, tensor in load_file(file).items() if name.startswith("mtp."))
    assert tiny.planned(tiny_checkpoint, num_speculative_tokens=0).params_bytes == plan.params_bytes - head


def test_rules_are_of_the_bucket(tmp_path):
    plan = tiny.planned_device(tiny.write_checkpoint(tmp_path / "model", **tiny.NPU_SIZES), mesh="tp=2")
    split, whole = plan.rules(Bucket("decode", 1, 2)), plan.rules(Bucket("decode", 1, 1))
    assert dict(split.table)["tokens"] == ("tp",)
    assert "tokens" not in dict(whole.table)


def test_arguments_name_a_preset_by_its_name_and_a_directory_of_that_name_by_its_path(tmp_path):
    bundled, other = "qwen3.5-tiny", tiny.write_checkpoint(tmp_path / "qwen3.5-tiny")
    assert planning.plan(Options(bundled)).arguments[0] == bundled
    assert tiny.planned(other).arguments[0] == str(other.resolve())
    assert planning.plan(Options("qwen3.5-27b", backend="null")).arguments[0] == "qwen3.5-27b"

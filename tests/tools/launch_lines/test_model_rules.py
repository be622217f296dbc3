"""tools/launch_lines/model_rules.py: checkpoints and types of numbers."""

from __future__ import annotations

import pytest
from support.launch_lines import finding

from npucompile.tools.launch_lines.imported import import_text


@pytest.mark.parametrize(
    ("engine", "flags", "status", "why"),
    [
        ("sglang", "--dtype bfloat16", "carried", "--dtype bfloat16"),
        ("sglang", "--dtype auto", "unnecessary", "bfloat16 is what ascend-a3 computes in"),
        ("vllm", "--dtype float16", "refused", "ascend-a3 computes in bfloat16"),
        ("sglang", "--quantization modelslim", "mapped", "--quantization w8a8, which the checkpoint's name says (w8a8)"),
        ("vllm", "--quantization ascend", "mapped", "--quantization w8a8"),
        ("vllm", "--quantization awq", "refused", "awq is not built"),
        ("sglang", "--quantization fp8", "refused", "read as floats, which --quantization rounds"),
        ("sglang", "--quantization unquant", "unnecessary", "weights stay as the checkpoint has them"),
        ("sglang", "--kv-cache-dtype bf16", "mapped", "--kv-cache-dtype bfloat16"),
        ("vllm", "--kv-cache-dtype int8", "carried", "--kv-cache-dtype int8"),
        ("vllm", "--kv-cache-dtype fp8", "refused", "legal are auto, bfloat16, int8"),
        ("sglang", "--tokenizer-path /models/Qwen3.5-397B-A17B-w8a8", "unnecessary", "it is the checkpoint's own"),
        ("vllm", "--tokenizer other", "refused", "the tokenizer is the checkpoint's tokenizer.json"),
        ("sglang", "--mamba-ssm-dtype bfloat16", "carried", "recurrent states are bfloat16"),
        ("vllm", "--mamba-ssm-cache-dtype float32", "refused", "--operator-packages vllm-ascend of build makes them float32"),
        ("vllm", "--mamba-ssm-cache-dtype auto", "unnecessary", "recurrent states are bfloat16"),
        ("sglang", "--model-checksum", "unnecessary", "an artifact has a digest"),
    ],
)
def test_what_becomes_of_a_flag(engine, flags, status, why):
    found = finding(engine, flags)
    assert found.status == status, found
    assert why in found.why


def test_a_checkpoint_elsewhere_is_read_by_serve():
    (role,) = import_text("vllm serve /models/Qwen3-32B --tensor-parallel-size 16").roles
    assert "--checkpoint /models/Qwen3-32B" in role.serve
    assert role.findings[0].status == "mapped"
    (role,) = import_text("vllm serve qwen3-32b --tensor-parallel-size 16").roles
    assert (role.findings[0].status, "--checkpoint" in role.serve) == ("carried", False)


def test_a_scheme_that_nothing_names_is_refused():
    (role,) = import_text("vllm serve Qwen3-32B --tensor-parallel-size 16 --quantization ascend").roles
    found = next(each for each in role.findings if each.name == "--quantization")
    assert (found.status, "neither the flag nor the checkpoint's name says w8a8, w4a8 or w4a16" in found.why) == ("refused", True)

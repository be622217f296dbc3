"""tools/build/sizes.py: sizes that are asked for, and those of a deployment; test_plan.py has their notes and refusals."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket
from npucompile.models import registry
from npucompile.tools.build.instance import Instance, resolve
from npucompile.tools.build.plan import Options
from npucompile.tools.build.sizes import decode_sizes, prefill_sizes

ROW = "qwen3-32b-a3x4-mix-6k-1.5k-18ms"


def instance(**changes: str | None) -> Instance:
    options: dict[str, str | None] = dict.fromkeys(("backend", "deployment", "phase", "target_name", "mesh", "quantization"))
    return resolve("qwen3-32b", **{**options, **changes}, drafts=None, has_draft_head=False)  # type: ignore[arg-type]


def test_a_deployment_decides_what_is_not_asked_for() -> None:
    source, row = registry.find("qwen3-32b"), instance(deployment=ROW)
    batches, limits, published = decode_sizes(Options("qwen3-32b"), source, row)
    assert (batches, limits, published) == ([8, 16, 24, 32], row.limits, True)
    assert prefill_sizes(Options("qwen3-32b"), row, limits.max_model_len) == ((Bucket("prefill", 1, 6016),), [])
    batches, limits, published = decode_sizes(Options("qwen3-32b", buckets=(64,)), source, row)
    assert (batches, limits.num_request_slots, published) == ([64], 65, True)
    batches, limits, published = decode_sizes(Options("qwen3-32b", max_model_len=1024), source, row)
    assert (limits.max_model_len, limits.num_pages, published) == (1024, 1 + 32 * 8, False)


def test_chunks_beyond_the_context_are_left_out() -> None:
    where = instance(target_name="ascend-a3", mesh="tp=8")
    assert prefill_sizes(Options("qwen3-32b", prefill=(128, 4096)), where, 1024) == ((Bucket("prefill", 1, 128),), [4096])
    with pytest.raises(SpecError, match=r"no prefill chunk of \(4096,\) fits max_model_len 1024"):
        prefill_sizes(Options("qwen3-32b", prefill=(4096,)), where, 1024)

"""lowering/cuda/lowerings.py: steps with experts and an int8 cache are lowered, too; test_ops.py compares results of every lowering."""

from __future__ import annotations

from support import ranks, tiny

from npucompile.lowering.backend import backend
from npucompile.lowering.cuda import check
from npucompile.lowering.cuda.lowerings import KIND
from npucompile.tools.build import stages


def test_they_are_of_the_backend_that_asks_for_them() -> None:
    assert backend(KIND).name == KIND


def test_no_graph_depends_on_values(tmp_path) -> None:
    checkpoint = tiny.write_checkpoint(tmp_path / "experts", seed=7, **ranks.NPU_SIZES)
    sizes = {"target": "cuda", "backend": None, "buckets": (2,), "prefill": (16,), "checkpoint_slots": None, "dtype": "bfloat16"}
    plan = tiny.planned(checkpoint, **sizes, kv_cache_dtype="int8")
    assert plan.model.config.num_experts
    for bucket in plan.buckets:
        check.check(stages.stage(plan, bucket).lowered.graph)

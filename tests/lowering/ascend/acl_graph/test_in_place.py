"""lowering/ascend/acl_graph/in_place.py: forms that write in place are used where nothing reads the old pool afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import acl_graphs as ag

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.artifact.graph_io import find_target
from npucompile.lowering.ascend.acl_graph.inspect_acl import check
from npucompile.lowering.ascend.operators.table import FORMS

POOL, ROWS, SLOTS = ((4, 8, 1, 16), ag.BF16), ((2, 1, 16), ag.BF16), ((2,), ag.I32)


def written(k_pool: Any, v_pool: Any, rows: Any, slots: Any) -> tuple[Any, Any]:
    new: tuple[Any, Any] = torch.ops.npu.npu_scatter_pa_kv_cache_functional(rows, rows, k_pool, v_pool, slots, cache_mode="Norm")
    return new


def in_place(k_pool: Any, v_pool: Any, rows: Any, slots: Any) -> tuple[Any, ...]:
    k, v = written(k_pool, v_pool, rows, slots)
    out = k.sum() + v.sum()
    k_pool.copy_(k)
    v_pool.copy_(v)
    return (out,)


def old_read(k_pool: Any, v_pool: Any, rows: Any, slots: Any) -> tuple[Any, ...]:
    k, v = written(k_pool, v_pool, rows, slots)
    out = k.sum() - k_pool.view(-1).sum()
    k_pool.copy_(k)
    v_pool.copy_(v)
    return (out,)


def one_kept(k_pool: Any, v_pool: Any, rows: Any, slots: Any) -> tuple[Any, ...]:
    k, v = written(k_pool, v_pool, rows, slots)
    k_pool.copy_(k)
    return (v.sum(),)


def test_readers_of_the_new_pool_read_the_pool() -> None:
    made, signature = ag.of_body(in_place, state_k=POOL, state_v=POOL, inputs_rows=ROWS, inputs_slots=SLOTS)
    assert ag.names(made) == ["npu.npu_scatter_pa_kv_cache.default", *["aten.sum.default"] * 2, "aten.add.Tensor"]
    check(made, signature)


@pytest.mark.parametrize("body", [old_read, one_kept])
def test_a_pool_that_is_read_afterwards_or_not_replaced_is_copied_and_refused(body: Any) -> None:
    made, signature = ag.of_body(body, state_k=POOL, state_v=POOL, inputs_rows=ROWS, inputs_slots=SLOTS)
    assert "npu.npu_scatter_pa_kv_cache_functional.default" in ag.names(made)
    with pytest.raises(LoweringError, match="copies a pool to change a part of it; legal is its form that writes in place"):
        check(made, signature)


def test_both_forms_take_the_same_arguments() -> None:
    for form in (form for form in FORMS.values() if form.in_place):
        functional, variant = (find_target(name)._schema for name in (form.name, form.in_place))
        assert [argument.name for argument in functional.arguments] == [argument.name for argument in variant.arguments]
        written_arguments = [i for i, argument in enumerate(variant.arguments) if argument.alias_info is not None]
        assert written_arguments == list(form.pools.values())
        assert len(variant.returns) == len(functional.returns) - len(form.pools)
        assert form.one_result == (len(variant.returns) == 1)

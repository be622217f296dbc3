"""graphs/native_ops.py: native operators are found by name, and call the function that is bound to them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs import native_ops, ops
from npucompile.graphs.errors import PrimitiveError
from npucompile.graphs.native_ops import Native
from npucompile.graphs.primitive import Primitive

F32 = torch.float32


@pytest.fixture(scope="module")
def doubled() -> Iterator[Native]:
    yield Native("test_doubled", "(Tensor x) -> Tensor", torch.empty_like)
    native_ops.TABLE.pop("test_doubled")


def test_an_operator_calls_what_is_bound_last_and_nothing_when_nothing_is(doubled: Native) -> None:
    x = torch.ones(3)
    with pytest.raises(PrimitiveError, match=r"npuc_native\.test_doubled has no kernel in this process"):
        doubled.op(x)
    for factor in (2, 3):
        doubled.bind(lambda x, factor=factor: factor * x)
        assert torch.equal(doubled.op(x), factor * x)
    doubled.bind(None)
    with pytest.raises(PrimitiveError, match="no kernel"):
        doubled.op(x)


def test_shapes_are_known_without_a_kernel(doubled: Native) -> None:
    with FakeTensorMode():
        assert doubled.op(torch.empty(2, 5)).shape == (2, 5)


def test_names_are_unique(doubled: Native) -> None:
    with pytest.raises(PrimitiveError, match="'test_doubled' is defined twice"):
        Native(doubled.name, "(Tensor x) -> Tensor", torch.empty_like)


def called(primitive: Primitive[Any], *operands: Any) -> set[str]:
    """The native operators that a lowering calls."""
    graph = make_fx(primitive.lower_for("inductor"), tracing_mode="fake")(*operands)
    targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {target._opname for target in targets if target.namespace == native_ops.NAMESPACE}


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_what_depends_on_values_is_always_a_kernel() -> None:
    cache, row = torch.zeros(2, 4, 2, 3), torch.zeros(1)
    assert called(ops.paged_attention, torch.zeros(1, 1, 2, 3), cache, cache, ints(1, 2), ints(1), ints(1), 1.0) == {"npuc_attention"}
    assert called(ops.sample, torch.zeros(1, 1, 5), row, ints(1), row, row, row[None]) == {"npuc_sample"}
    assert called(ops.token_logprobs, torch.zeros(1, 1, 5), ints(1, 1), ints(1), 2) == {"npuc_logprobs"}


@pytest.mark.parametrize(("dtype", "kind"), [(F32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, None)])
@pytest.mark.parametrize("rows", [1, 200])
def test_products_and_experts_go_through_kernels_whatever_the_number_of_rows(rows: int, dtype: torch.dtype, kind: str | None) -> None:
    product = {f"npuc_linear_{kind}"} if kind else set()
    x, zeros = torch.zeros(rows, 6, dtype=dtype), partial(torch.zeros, dtype=dtype)
    assert called(ops.linear, x, zeros(5, 6)) == product
    assert called(ops.swiglu_linear, x, zeros(2, 5, 6)) == product
    experts = torch.zeros(rows, 2), ints(rows, 2), zeros(4, 2, 5, 6), zeros(4, 6, 5)
    named = {F32: {"npuc_experts"}, torch.bfloat16: {"npuc_experts_bf16"}}
    assert called(ops.moe_experts, x, *experts) == named.get(dtype, set())


@pytest.mark.parametrize(("groups", "taken"), [(1, True), (2, True), (4, False)])
def test_int4_goes_through_kernels_where_a_scale_is_of_whole_tiles(groups: int, taken: bool) -> None:
    """64 weights of a channel: of groups of 16 each weight is multiplied by its scale, as in the reference."""
    x, scale = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(groups, 16)
    assert called(ops.weight_quant_linear, x, ints(64, 2), scale) == ({"npuc_linear_int4"} if taken else set())
    experts = ints(5, 64, 16), torch.zeros(5, groups, 128), ints(5, 64, 8), torch.zeros(5, groups, 64)
    counts = torch.zeros(5, dtype=torch.int64)
    assert called(ops.grouped_experts_w4a16, x, counts, *experts) == ({"npuc_grouped_int4"} if taken else set())


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_int8_experts_go_through_kernels(dtype: torch.dtype) -> None:
    rows, counts = torch.zeros(3, 6, dtype=torch.int8), torch.zeros(5, dtype=torch.int64)
    gate_up, down = (torch.zeros(5, *shape, dtype=torch.int8) for shape in ((6, 8), (4, 6)))
    operands = rows, torch.zeros(3), counts, gate_up, torch.zeros(5, 8), down, torch.zeros(5, 6)
    assert called(ops.grouped_experts_w8a8, *operands, dtype) == {"npuc_grouped_int8"}


@pytest.mark.parametrize(("whole", "dtype"), [(False, F32), (True, F32), (False, torch.bfloat16)])
def test_states_after_every_token_are_written_by_kernels(whole: bool, dtype: torch.dtype) -> None:
    """`whole` is a prefill, which stores one state per row. The states of the delta rule are float32."""
    kernel, (B, Q, H, D), zeros = not whole, (2, 4, 2, 3), partial(torch.zeros, dtype=dtype)
    slots = ints(B), ints(B, 1 if whole else Q), ints(B), ints(B)
    assert called(ops.causal_conv, zeros(B, Q, 6), zeros(6, 3), zeros(9, 2, 6), *slots, dtype) == {
        "npuc_conv" if kernel else "npuc_conv_rows"
    }
    if whole:
        tokens = zeros(B, Q, H, 3 * D), zeros(B, Q, H, 2), torch.zeros(H), torch.zeros(H)
        assert not called(ops.chunk_gated_delta, *tokens, zeros(9, H, D, D), *slots, 1e-6, 4) - {"npuc_delta_rows"}
        assert called(ops.chunk_gated_delta, *tokens, torch.zeros(9, H, D, D), *slots, 1e-6, 4) == {"npuc_delta_rows"}
    else:
        rows = zeros(B, Q, H, D), zeros(B, Q, H, D), zeros(B, Q, H, D), zeros(B, Q, H), zeros(B, Q, H)
        assert called(ops.gated_delta, *rows, zeros(9, H, D, D), *slots) == ({"npuc_delta"} if kernel and dtype == F32 else set())


def test_operators_that_write_a_pool_say_so() -> None:
    """Schemas declare the pool as written and nothing else, which tracing relies on."""
    writes = {
        (name, argument.name)
        for name, native in native_ops.TABLE.items()
        for argument in native.op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert writes == {(name, "state") for name in ("npuc_conv", "npuc_conv_rows", "npuc_delta", "npuc_delta_rows")}

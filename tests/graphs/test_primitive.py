"""graphs/primitive.py: errors of a primitive name it and say what is missing, what was given and what is legal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from npucompile.graphs import ops
from npucompile.graphs.errors import PrimitiveError
from npucompile.graphs.primitive import NAMESPACE, TABLE, Primitive, of_inplace, of_target

Define = Callable[..., Primitive[Any]]


class X1(NamedTuple):
    x: torch.Tensor


class Bump(NamedTuple):
    x: torch.Tensor
    pool: torch.Tensor
    n: int


@pytest.fixture
def define() -> Iterator[Define]:
    """Defines primitives for one test; torch keeps operators until the process ends, so each name is used once."""
    defined: list[str] = []

    def define(name: str, operands: type[Any], factors: str, **options: Any) -> Primitive[Any]:
        defined.append(name)
        return Primitive(name, operands, factors=factors, **options)

    yield define
    for name in defined:
        TABLE.pop(name, None)


# --- definition ---


def test_a_name_is_used_once() -> None:
    before = TABLE["linear"]
    with pytest.raises(PrimitiveError, match="'linear' is defined twice"):
        Primitive("linear", X1, factors="t -> t")
    assert TABLE["linear"] is before


def test_factors_count_the_record_s_tensors(define: Define) -> None:
    with pytest.raises(PrimitiveError, match=r"'test_counts': its factors 't -> t' have 1 operands, Bump has 2 tensors"):
        define("test_counts", Bump, "t -> t")
    assert "test_counts" not in TABLE


def test_the_schema_is_the_record_and_as_many_results_as_the_factors_have(define: Define) -> None:
    fields = [("x", torch.Tensor), ("n", int), ("eps", float), ("flag", bool), ("group", str), ("dtype", torch.dtype)]
    arguments = "(Tensor x, int n, float eps, bool flag, str group, ScalarType dtype)"
    assert define("test_kinds", NamedTuple("Kinds", fields), "t -> t").schema == f"{arguments} -> Tensor"
    assert define("test_kinds2", NamedTuple("Kinds", fields), "t -> t, t").schema == f"{arguments} -> (Tensor, Tensor)"
    with pytest.raises(PrimitiveError, match=r"'test_strange': Strange has fields {'x': <class 'list'>}; legal types are Tensor, int, "):
        define("test_strange", NamedTuple("Strange", [("x", list)]), "t -> t")


def test_rules_take_the_record_and_callers_the_operands(define: Define) -> None:
    bump = define("test_record", Bump, "_, _ -> _")
    bump.reference(lambda args: args.x + args.n * args.pool)
    x = torch.ones(2)
    assert bump.rule("reference")(x, x, 3).tolist() == bump(x, x, 3).tolist() == [4, 4]
    assert bump.rule("reference")(x, n=2, pool=x).tolist() == [3, 3]
    bump.group_reference(lambda calls: [args.x + args.n for args in calls])
    assert [y.tolist() for y in bump.rule("group_reference")([(x, x, 1), (x, x, 2)])] == [[2, 2], [3, 3]]


def test_a_missing_rule_fails_by_name(define: Define) -> None:
    bare = define("test_bare", X1, "t -> t")
    bare.abstract(lambda args: torch.empty_like(args.x))
    for facet in ("reference", "cost", "inplace"):
        assert not bare.has(facet)
        with pytest.raises(PrimitiveError, match=rf"'test_bare' has no rule '{facet}'; it has \['abstract'\]"):
            bare.rule(facet)
    for lacking in (lambda: bare.lower_for("inductor"), lambda: bare.inplace_op):
        with pytest.raises(PrimitiveError, match="'test_bare' has no rule"):
            lacking()


def test_every_primitive_has_what_every_graph_needs() -> None:
    for primitive in TABLE.values():
        for facet in ("abstract", "reference", "cost"):
            primitive.rule(facet)


def test_a_backend_takes_its_own_lowering_or_the_reference(define: Define) -> None:
    twice = define("test_twice", X1, "t -> t")
    twice.reference(lambda args: 2 * args.x)
    twice.lowering("inductor")(lambda args: args.x + 1)
    assert twice.lower_for("inductor")(5) == 6
    assert twice.lower_for("eager")(5) == 10


def test_the_variant_that_needs_most_of_what_a_platform_has_is_taken(define: Define) -> None:
    twice = define("test_variants", X1, "t -> t")
    for result, needs in ((1, ()), (2, ("cann>=9.0",)), (3, ("cann>=9.0", "aclgraph"))):
        twice.lowering("npu", needs=needs)(lambda args, result=result: result)
    for features, result in (((), 1), (("aclgraph",), 1), (("cann>=9.0", "ge"), 2), (("aclgraph", "cann>=9.0", "ge"), 3)):
        assert twice.lower_for("npu", frozenset(features))(5) == result
    twice.lowering("npu", needs=("vllm-ascend",))(lambda args: 4)
    assert twice.lower_for("npu", frozenset({"cann>=9.0", "vllm-ascend"}))(5) == 4


# --- donation ---


def test_the_in_place_variant_writes_and_returns_the_rest(define: Define) -> None:
    bump = define("test_bump", Bump, "_, _ -> _, _", donates=((1, 0),))
    bump.abstract(lambda args: (torch.empty_like(args.pool), torch.empty_like(args.x)))
    bump.reference(lambda args: (args.pool + args.n, args.x + args.pool))
    bump.inplace(lambda args: (args.x + args.pool, args.pool.add_(args.n))[::-1])
    x, pool = torch.ones(2), torch.ones(2)
    assert bump.inplace_op(x, pool, 3).tolist() == [2, 2]
    assert (x.tolist(), pool.tolist()) == ([1, 1], [4, 4])
    assert str(bump.inplace_op._schema) == "npuc::test_bump_(Tensor x, Tensor(a!) pool, int n) -> Tensor"
    assert bump.kept_results == [1]
    meta = torch.empty(2, device="meta")
    assert bump.inplace_op(meta, meta, 3).device.type == "meta"


def test_an_in_place_variant_with_nothing_else_to_return() -> None:
    schema = "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots) -> ()"
    assert str(ops.cache_write.inplace_op._schema) == f"npuc::cache_write_{schema}"
    assert ops.cache_write.kept_results == []


# --- calls ---

X, W = torch.ones(3, 4), torch.ones(5, 4)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((X,), "1 arguments"),
        ((X, W, W), "3 arguments"),
        ((X, 3), "an operand is not a tensor"),
        ((X, None), "an operand is not a tensor"),
        ((X, W[0]), r"operands of ranks \[2, 1\] do not fit"),
        ((X, torch.ones(5, 7)), "'k' has sizes 4 and 7"),
    ],
)
def test_a_wrong_call_names_primitive_schema_and_operands(args: tuple[Any, ...], why: str) -> None:
    with pytest.raises(PrimitiveError, match=why) as caught:
        ops.linear(*args)
    message = str(caught.value)
    assert message.startswith("primitive 'linear' takes (Tensor x, Tensor weight) -> Tensor, it was called with (f32[3,4]")


def test_grouped_heads_may_differ_by_a_factor() -> None:
    q, cache = torch.ones(1, 1, 4, 2), torch.ones(2, 2, 2, 2)
    rest = (torch.ones(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1.0)
    ops.paged_attention(q, cache, cache, *rest)
    with pytest.raises(PrimitiveError, match="'h' has sizes 2 and 3"):
        ops.paged_attention(q[:, :, :3], cache, cache, *rest)


def test_a_call_differentiates_only_where_a_gradient_is_wanted() -> None:
    weight = W.clone().requires_grad_()
    assert ops.linear(X, weight).requires_grad
    assert not ops.linear(X, W).requires_grad
    with torch.no_grad():
        assert not ops.linear(X, weight).requires_grad


# --- small things ---


def test_of_target_finds_primitives_only() -> None:
    assert of_target(ops.linear.op) is ops.linear
    for other in (torch.ops.aten.add.Tensor, ops.cache_write.inplace_op, len, None):
        assert of_target(other) is None
    assert of_inplace(ops.cache_write.inplace_op) is ops.cache_write
    for other in (torch.ops.aten.add_.Tensor, ops.cache_write.op, len, None):
        assert of_inplace(other) is None
    assert ops.linear.op.namespace == NAMESPACE

"""lowering/ascend/legality/rules_experts.py: how experts divide, whom the exchange may meet, and sizes of grouped products."""

from __future__ import annotations

from typing import Any

import pytest

from npucompile.lowering.ascend.legality import rules_experts as rules
from npucompile.lowering.ascend.legality.node import Node
from npucompile.lowering.ascend.operators.tensor_type import TensorType


def node(*, inputs: dict[str, TensorType] | None = None, **attributes: Any) -> Node:
    return Node("n", "Op", inputs or {}, frozenset(), {}, attributes)


def test_experts_of_a_rank():
    assert rules.experts_of_a_rank(node(ep_world_size=16, moe_expert_num=512), {}, most=2048) is None
    assert rules.experts_of_a_rank(node(ep_world_size=17, moe_expert_num=512, shared_expert_rank_num=1), {}, most=2048) is None
    assert "divides 512 experts among 15 ranks" in str(rules.experts_of_a_rank(node(ep_world_size=15, moe_expert_num=512), {}, most=2048))
    assert "512 in all; legal are up to 256" in str(rules.experts_of_a_rank(node(ep_world_size=16, moe_expert_num=512), {}, most=256))


@pytest.mark.parametrize(
    ("group", "exchange", "message"),
    [
        ("dispatch", True, None),
        ("tp", False, None),
        ("world", True, "shares the communicator 'world'"),
        ("dispatch", False, "is for expert dispatch and combine alone"),
        ("group_name_7", False, "legal are the symbols tp, dp, world, dispatch"),
    ],
)
def test_communicators(group, exchange, message):
    told = rules.communicator(node(group=group), {}, attribute="group", exchange=exchange)
    assert (message in told) if message else told is None


def test_sizes_of_grouped_products():
    def product(rows: int, columns: int, dtype: str) -> Node:
        weights = {"weight0": TensorType(dtype, (4, rows, columns)), "scale0": TensorType("f32", (4, columns))}
        return node(inputs={"x": TensorType("i8", (64, rows)), **weights})

    limits = {"inner": 20000, "outer": 10240, "weights": ["weight"], "dtypes": ["i4"]}
    assert rules.groups_of_weights(product(4096, 2048, "i4"), {}, **limits) is None
    assert rules.groups_of_weights(product(32768, 2048, "i8"), {}, **limits) is None
    assert "takes x of 20000 columns" in str(rules.groups_of_weights(product(20000, 2048, "i4"), {}, **limits))
    assert "with 10241 columns; legal are up to 10240" in str(rules.groups_of_weights(product(4096, 10241, "i4"), {}, **limits))


def test_int4_beside_floats():
    def product(scale: tuple[int, ...] | None, offset: tuple[int, ...] | None, x: str = "bf16", columns: int = 48) -> Node:
        given = {"antiquant_scale0": scale, "antiquant_offset0": offset}
        absent = {name: TensorType("f16", (0,)) if shape is None else TensorType("bf16", shape) for name, shape in given.items()}
        return node(inputs={"x0": TensorType(x, (9, 64)), "weight0": TensorType("i4", (4, 64, columns)), **absent})

    for shape in ((4, 48), (4, 1, 48), (4, 2, 48), (4, 64, 48)):
        assert rules.int4_beside_floats(product(shape, shape), {}) is None
    assert rules.int4_beside_floats(product(None, None, "i8"), {}) is None
    assert "antiquant_scale is bf16[4,3,48]" in str(rules.int4_beside_floats(product((4, 3, 48), (4, 3, 48)), {}))
    assert "antiquant_offset is f16[0] beside weights" in str(rules.int4_beside_floats(product((4, 2, 48), None), {}))
    assert "legal is one shape" in str(rules.int4_beside_floats(product((4, 2, 48), (4, 48)), {}))
    assert "of 47 columns; legal is an even" in str(rules.int4_beside_floats(product((4, 47), (4, 47), columns=47), {}))

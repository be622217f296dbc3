"""lowering/ascend/operators/product_rules.py: sizes of grouped products, and what int4 weights need beside them."""

from __future__ import annotations

from typing import Any

import pytest

from npucompile.lowering.ascend.operators import product_rules as rules
from npucompile.lowering.ascend.operators.node import Node
from npucompile.lowering.ascend.operators.tensor_type import TensorType


def node(*, inputs: dict[str, TensorType] | None = None, **attributes: Any) -> Node:
    return Node("n", "Op", inputs or {}, frozenset(), {}, attributes)


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


@pytest.mark.parametrize(("size", "legal"), [(0, True), (32, True), (96, True), (16, False), (40, False), (128, False), (256, False)])
def test_groups_of_int4(size: int, legal: bool) -> None:
    node = Node("n", "WeightQuantBatchMatmulV2", {"x": TensorType("bf16", (4, 128))}, frozenset(), {}, {"antiquant_group_size": size})
    told = rules.int4_groups(node, {}, least=32, multiple=32)
    assert (told is None) == legal, told

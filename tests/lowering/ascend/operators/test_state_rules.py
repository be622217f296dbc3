"""lowering/ascend/operators/state_rules.py: sizes of the delta rule, at their limits and beyond."""

from __future__ import annotations

from npucompile.lowering.ascend.operators import state_rules as rules
from npucompile.lowering.ascend.operators.node import Node
from npucompile.lowering.ascend.operators.tensor_type import TensorType


def delta(tokens: int = 8, heads: tuple[int, int] = (2, 4), width: int = 128, sequences: int = 2, state: tuple[int, ...] = ()) -> Node:
    shapes = {
        "query": (tokens, heads[0], width), "key": (tokens, heads[0], width), "value": (tokens, heads[1], width),
        "state": state or (9, heads[1], width, width), "actual_seq_lengths": (sequences,),
    }  # fmt: skip
    return Node("n", "RecurrentGatedDeltaRule", {name: TensorType("bf16", shape) for name, shape in shapes.items()}, frozenset(), {}, {})


def test_sizes_of_the_delta_rule():
    limits = {"heads": 256, "width": 512, "tokens": 8}
    assert rules.delta_rule_sizes(delta(tokens=16), {}, **limits) is None
    for wrong, message in [
        (delta(tokens=17), "takes 17 tokens of 2 sequences; legal are up to 8 tokens a sequence"),
        (delta(heads=(3, 4)), "has 3 key and 4 value heads"),
        (delta(width=513), "widths up to 512"),
        (delta(state=(9, 128, 4, 128)), "legal is [slots,4,128,128]"),
        (delta(state=(9, 128)), "a state of four"),
    ]:
        assert message in str(rules.delta_rule_sizes(wrong, {}, **limits))

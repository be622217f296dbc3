"""lowering/ascend/operators/value_rules.py: what a graph computes of any floats at all lies within the range that is claimed for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter, Node

from npucompile.graphs.ir.record import record
from npucompile.graphs.ops.sample import sample
from npucompile.graphs.ops.token_logprobs import token_logprobs
from npucompile.lowering.ascend.index_bounds import check, result
from npucompile.lowering.ascend.operators.value_rules import ANYTHING, GIVEN, Range

ANY_FLOAT = st.sampled_from([0.0, -0.0, 1.0, -3.5, math.nan, math.inf, -math.inf, 1e-40, 1e-45, 3e38, -3e38])
KNOB = st.sampled_from([0.0, 1.0, 0.5, 1e-40, math.nan])


class Watched(Interpreter):
    """Compares each integer that is computed with its range."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.ranges: dict[Node, Range] = {}

    def run_node(self, n: Node) -> object:
        value = super().run_node(n)
        if n.op == "placeholder":
            self.ranges[n] = ANYTHING if value.is_floating_point() else GIVEN
        elif n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
            self.ranges[n] = result(n, self.ranges)
            if isinstance(value, Tensor) and not value.is_floating_point() and not self.ranges[n].given and value.numel():
                assert self.ranges[n].low <= int(value.min()) <= int(value.max()) <= self.ranges[n].high, n.format_node()
        elif n.op == "call_function":
            self.ranges[n] = self.ranges[n.args[0]][n.args[1]]
        return value


def recorded(function: Callable[..., Sequence[Tensor]], operands: Sequence[Tensor]) -> torch.fx.GraphModule:
    graph = record(function, [operand.to("meta") for operand in operands], FakeTensorMode(), "cpu")
    check(graph, "a lowering")
    return graph


def sampled(logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> list[Tensor]:
    knobs = torch.tensor([temperature]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p])
    return [torch.tensor(logits).view(1, 1, -1), *knobs, torch.full((1, 1), uniform)]


def asked(logits: Sequence[float], token: int) -> list[Tensor]:
    return [torch.tensor(logits).view(1, 1, -1), torch.tensor([[token]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)]


SAMPLING = recorded(lambda *each: [sample.lower_for("npu")(*each)], sampled([0.0] * 24, 0, 0, 0, 0, 0))
LOGPROBS = recorded(lambda *each: token_logprobs.lower_for("npu")(*each, 3), asked([0.0] * 8, 0))


@settings(max_examples=30)
@given(st.lists(ANY_FLOAT, min_size=24, max_size=24), KNOB, st.sampled_from([0, 3, -1]), KNOB, KNOB, st.sampled_from([0.0, 1.0, math.nan]))
def test_a_sampled_token_is_in_the_vocabulary_or_none(logits, temperature, top_k, top_p, min_p, uniform):
    (token,) = Watched(SAMPLING).run(*sampled(logits, temperature, top_k, top_p, min_p, uniform))
    assert -2 <= int(token) < 24


@settings(max_examples=30)
@given(st.lists(ANY_FLOAT, min_size=8, max_size=8), st.integers(-2, 7))
def test_log_probabilities_name_tokens_of_the_vocabulary(logits, token):
    _, ids, _ = Watched(LOGPROBS).run(*asked(logits, token))
    assert 0 <= int(ids.min()) <= int(ids.max()) < 8

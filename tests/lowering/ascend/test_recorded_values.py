"""lowering/ascend/recorded_values.py: a recorded body that runs again gives what it gives without its recorded values, and runs less."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter
from torch.utils._python_dispatch import TorchDispatchMode

from npucompile.graphs.ir.record import record
from npucompile.lowering.ascend.recorded_values import RecordedValues


class Ran(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def body(x, pool):
    view = x.view(-1)
    first, second = view.split([4, 8])
    pool.index_add_(0, torch.arange(2), x[:2])
    joined = torch.cat([first * 2, second.t() if second.dim() > 1 else second])
    return view, first, pool, joined.view(3, 4).t(), (joined + 1, joined + True, joined + 1.0)[1].to(torch.float64)


def described(value):
    return value.shape, value.stride(), value.dtype


def run(*extra):
    """Results of the recorded body and what ran, inside the given modes."""
    mode, operands = FakeTensorMode(), [torch.empty(3, 4, device="meta"), torch.empty(8, 4, device="meta")]
    gm = record(body, operands, mode)
    vals = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    ran = Ran()
    with mode, ran, torch._C._AutoDispatchBelowADInplaceOrView():
        if not extra:
            return vals, Interpreter(gm).run(*vals), ran.names
        with extra[0](gm):
            return vals, Interpreter(gm).run(*vals), ran.names


def test_recorded_values_are_what_running_gives():
    plain_operands, plain, everything = run()
    operands, given, ran = run(RecordedValues)
    assert list(map(described, given)) == list(map(described, plain))
    for values, results in ((plain_operands, plain), (operands, given)):
        shared = [[torch._C._is_alias_of(operand, result) for operand in values] for result in results]
        assert shared == [[True, False], [True, False], [False, True], [False, False], [False, False]]
    # Views of operands and the write into one run; what is computed of them does not.
    assert len(everything) > len(ran)
    assert sorted(set(ran)) == ["aten.index_add_.default", "aten.slice.Tensor", "aten.split_with_sizes.default", "aten.view.default"]


def test_an_operator_on_other_values_or_with_other_arguments_runs():
    mode = FakeTensorMode()
    gm = record(lambda x: (x + 1,), [torch.empty(2, 3, device="meta")], mode)
    (operand,) = (node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder")
    recorded = next(node.meta["val"] for node in gm.graph.nodes if node.op == "call_function")
    with mode, RecordedValues(gm), torch._C._AutoDispatchBelowADInplaceOrView():
        other = torch.empty(5, 3, device="meta")
        assert operand + 1 is recorded
        assert operand + True is not recorded
        assert (operand + 1.5) is not recorded
        assert (other + 1).shape == (5, 3)

"""graphs/ir/record.py: a recorded graph equals the graph that make_fx records of the same function over fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs import ops
from npucompile.graphs.errors import GraphError
from npucompile.graphs.ir.record import record
from npucompile.graphs.primitive import TABLE
from npucompile.graphs.text import as_text

F32, I32 = torch.float32, torch.int32


def empty(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def split_and_joined(x, y):
    a, b = x.split([2, 3], -1)
    return [torch.cat([b, a], -1), torch.topk(y, 2)[1]]


def written_in_place(x, y):
    x.index_put_((torch.arange(2, device=x.device),), y[:2])
    x[1].copy_(y[0])
    return [x.sum(0), x]


def of_primitives(x, y):
    return [ops.rms_norm(ops.linear(x, y), y[:, 0], 1e-6, 1.0), ops.last_rows(x, torch.ones(2, dtype=I32, device=x.device))]


def out_of_nothing(x, y):
    at = torch.arange(5, dtype=F32, device=x.device)
    return [x + 10.0 ** (at / 5) + torch.zeros((), device=x.device), torch.where(y > 0, 1.0, at)]


def read_by_nobody(x, y):
    torch.exp(x)
    return [y * 2, y]


FUNCTIONS = [split_and_joined, written_in_place, of_primitives, out_of_nothing, read_by_nobody]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_graph_is_that_of_make_fx(fn: Callable[..., list[torch.Tensor]]) -> None:
    operands = [empty(4, 5), empty(4, 5)]
    got = record(fn, operands, FakeTensorMode())
    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in operands]
        wanted = make_fx(lambda *args: fn(*args))(*fakes)
    wanted.graph.eliminate_dead_code()
    (output,) = (node for node in wanted.graph.nodes if node.op == "output")
    output.args = (tuple(output.args[0]),)
    assert as_text(got, "") == as_text(wanted, "")


def test_every_value_is_a_fake_of_one_mode_with_the_strides_torch_gives() -> None:
    mode = FakeTensorMode()
    turned = empty(5, 4).t()
    graph = record(lambda x: [x + 1, x.contiguous()], [turned], mode)
    vals = [node.meta["val"] for node in graph.graph.nodes if node.op != "output"]
    assert all(isinstance(val, FakeTensor) and val.fake_mode is mode and val.device.type == "meta" for val in vals)
    assert [val.stride() for val in vals] == [(1, 4), (1, 4), (5, 1)]


def test_what_is_no_operand_is_refused() -> None:
    other = empty(5)
    with pytest.raises(GraphError, match="neither an operand nor computed from one"):
        record(lambda x: [x + other], [empty(4, 5)], FakeTensorMode())
    with pytest.raises(GraphError, match="neither an operand nor computed from one"):
        record(lambda x: [other], [empty(4, 5)], FakeTensorMode())


def test_a_function_that_fails_says_why_and_leaves_no_mode_open() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        record(lambda x: [x.view(3, 7)], [empty(4, 5)], FakeTensorMode())
    assert not isinstance(torch.ones(1), FakeTensor)
    assert TABLE["linear"].op(torch.ones(1, 2), torch.ones(3, 2)).tolist() == [[2.0, 2.0, 2.0]]

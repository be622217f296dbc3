"""graphs/fakes.py: fake tensors are what torch would make them, and a traced graph is what make_fx gives."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs.errors import GraphError
from npucompile.graphs.fakes import fake, graph_of

F32 = torch.float32


@pytest.mark.parametrize("shape", [(), (3,), (4, 1, 5), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_what_torch_gives(shape, dtype, device):
    with FakeTensorMode() as mode:
        wanted, found = torch.empty(shape, dtype=dtype, device=device), fake(shape, dtype, device=device)
    assert isinstance(found, FakeTensor)
    assert found.fake_mode is mode
    assert (found.shape, found.stride(), found.dtype, found.device) == (wanted.shape, wanted.stride(), dtype, wanted.device)
    assert (found.storage_offset(), found.requires_grad, found.is_contiguous()) == (0, False, True)


def test_strides_are_kept():
    with FakeTensorMode():
        found = fake((2, 3), F32, (1, 2))
    assert (found.stride(), found.is_contiguous()) == ((1, 2), False)


def test_each_has_memory_of_its_own():
    with FakeTensorMode():
        one, other = fake((2, 3), F32), fake((2, 3), F32)
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
        assert one.view(6).untyped_storage()._cdata == one.untyped_storage()._cdata


def test_outside_of_a_mode_there_is_none():
    with pytest.raises(GraphError, match="a fake tensor outside of a FakeTensorMode"):
        fake((2,), F32)


def test_a_graph_is_that_of_make_fx():
    def fn(x, y):
        return torch.relu(x @ y).sum(-1), x.view(-1)[: y.shape[0]]

    with FakeTensorMode():
        operands = [fake((4, 3), F32), fake((3, 2), F32)]
        found, wanted = graph_of(fn, operands), make_fx(fn, tracing_mode="real")(*operands)
    assert found.code == wanted.code
    for ours, theirs in zip(found.graph.nodes, wanted.graph.nodes, strict=True):
        if ours.op != "output":
            assert (ours.meta["val"].shape, ours.meta["val"].dtype) == (theirs.meta["val"].shape, theirs.meta["val"].dtype)

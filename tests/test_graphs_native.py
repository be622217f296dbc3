"""graphs/native.py: an operator by name, and the code that is bound to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs import native, ops
from npucompile.graphs.errors import PrimitiveError
from npucompile.graphs.native import Native


@pytest.fixture(scope="module")
def doubled() -> Iterator[Native]:
    yield Native("test_doubled", "(Tensor x) -> Tensor", torch.empty_like)
    native.TABLE.pop("test_doubled")


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


def test_a_compiled_graph_calls_the_native_twin_of_paged_attention() -> None:
    assert ops.paged_attention.kept("inductor") is native.TABLE["paged_attention"].op
    assert ops.sample.kept("inductor") is ops.sample.op
    assert ops.linear.kept("inductor") is None

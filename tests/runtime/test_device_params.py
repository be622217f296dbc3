"""runtime/device_params.py: what executables read is on the device once, in a format that all of them take, and nothing else is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from npucompile.graphs.errors import ArtifactTampered
from npucompile.graphs.types import Aval, Bucket, Leaf
from npucompile.lowering.device import DerivedValue
from npucompile.runtime.device_params import DeviceParams

SMALL, LARGE = Bucket("decode", 1, 1), Bucket("decode", 4, 1)
NAMES = "abcd"
LEAVES = tuple(Leaf(f"params.{name}", Aval((2, 3), torch.float32)) for name in NAMES)
VALUES = {leaf.name: torch.arange(6.0).reshape(2, 3) + 10 * i for i, leaf in enumerate(LEAVES)}
OTHERS = {SMALL: 1, LARGE: 2}
"""Operands behind the parameters, so that equal derived values have other positions in each bucket."""


class Memory:
    """A device on the CPU that knows which of its tensors are in NZ."""

    def __init__(self) -> None:
        self.tiled: list[torch.Tensor] = []
        self.allocated = 0

    def empty(self, shape, dtype):
        memory = torch.full(shape, float("nan"), dtype=dtype)
        self.allocated += memory.nbytes
        return memory

    def to_nz(self, weight):
        self.tiled.append(weight.clone())
        return self.tiled[-1]

    def is_nz(self, tensor):
        return any(tensor is tiled for tiled in self.tiled)


@dataclass
class Graph:
    """An executable that reads `reads` and computes `values`: (expression, sources, function) each."""

    reads: frozenset[int] = frozenset()
    nz_operands: frozenset[int] = frozenset()
    values: tuple[tuple[str, tuple[int, ...], Callable[..., torch.Tensor]], ...] = ()
    computed: list[str] = field(default_factory=list)

    def derived(self, params):
        assert params == LEAVES
        return tuple(DerivedValue(expression, sources) for expression, sources, _ in self.values)

    def derive(self, number, params):
        expression, sources, function = self.values[number]
        self.computed.append(expression)
        return function(*(params[source] for source in sources))


def loaded(graphs, names=None):
    """The parameters of graphs by bucket after loading, the device, and the names that were asked for in the order of arrival."""
    device, asked = Memory(), []
    params = DeviceParams(device, LEAVES, graphs, {bucket: len(LEAVES) + OTHERS[bucket] for bucket in graphs})

    def load(wanted):
        asked.extend(wanted)
        for name in names or wanted:
            yield name, VALUES[name].clone()

    params.load(load)
    return params, device, asked


def operands_of(params, bucket):
    return params.operands(bucket, [torch.tensor(7)] * OTHERS[bucket])


def test_only_what_a_graph_reads_is_placed_and_only_what_is_needed_is_read():
    graph = Graph(frozenset({0, 4, 5}), values=(("-c", (2,), torch.neg),))
    params, device, asked = loaded({SMALL: graph})
    assert asked == ["params.a", "params.c"]
    first, *absent, other, derived = operands_of(params, SMALL)
    assert torch.equal(first, VALUES["params.a"])
    assert absent == [None, None, None]
    assert int(other) == 7
    assert torch.equal(derived, -VALUES["params.c"])
    assert params.nbytes == device.allocated == 2 * VALUES["params.a"].nbytes


def test_equal_operands_of_several_graphs_share_memory():
    double = ("c+c", (2,), lambda c: c + c)
    small = Graph(frozenset({0, 1, 5}), values=(double,))
    large = Graph(frozenset({1, 3, 6, 7}), values=(("-a", (0,), torch.neg), double))
    params, device, _ = loaded({SMALL: small, LARGE: large})
    mine, theirs = operands_of(params, SMALL), operands_of(params, LARGE)
    assert mine[1] is theirs[1]
    assert mine[5] is theirs[7]
    assert torch.equal(mine[5], 2 * VALUES["params.c"])
    assert torch.equal(theirs[6], -VALUES["params.a"])
    assert [operand is None for operand in mine[:4]] == [False, False, True, True]
    assert [operand is None for operand in theirs[:4]] == [True, False, True, False]
    # a, b and d, and both derived values.
    assert params.nbytes == device.allocated == 5 * VALUES["params.a"].nbytes


def test_an_operand_is_in_nz_only_if_all_its_readers_want_that():
    double = ("c+c", (2,), lambda c: c + c)
    # The derived value is operand 5 of one graph and operand 6 of the other.
    small = Graph(frozenset({0, 1, 3, 5}), frozenset({0, 1, 3, 5}), (double,))
    large = Graph(frozenset({0, 1, 6}), frozenset({0, 6}), (double,))
    params, device, _ = loaded({SMALL: small, LARGE: large})
    mine, theirs = operands_of(params, SMALL), operands_of(params, LARGE)
    assert {i: device.is_nz(mine[i]) for i in (0, 1, 3, 5)} == {0: True, 1: False, 3: True, 5: True}
    assert mine[0] is theirs[0]
    assert mine[5] is theirs[6]
    only_one = Graph(frozenset({0, 1, 6}), frozenset({5}), (double,))
    params, device, _ = loaded({SMALL: small, LARGE: only_one})
    assert not device.is_nz(operands_of(params, SMALL)[5])


def test_values_are_derived_once_when_their_sources_are_there_and_host_memory_is_freed():
    """Parameters come in the order d, c, b, a; -c is ready at once, a+d waits for the last."""
    negative, total = ("-c", (2,), torch.neg), ("a+d", (0, 3), torch.add)
    small, large = Graph(frozenset({1}), values=(negative,)), Graph(frozenset({1}), values=(total, negative, total))
    references, progress = {}, []
    params = DeviceParams(Memory(), LEAVES, {SMALL: small, LARGE: large}, {b: len(LEAVES) + OTHERS[b] for b in OTHERS})

    def load(wanted):
        for name in sorted(wanted, reverse=True):
            tensor = VALUES[name].clone()
            references[name] = weakref.ref(tensor)
            yield name, tensor
            del tensor
            progress.append((name, [n for n, r in references.items() if r() is not None], [*small.computed, *large.computed]))

    params.load(load)
    assert progress == [
        ("params.d", ["params.d"], []),
        ("params.c", ["params.d"], ["-c"]),
        ("params.b", ["params.d"], ["-c"]),
        ("params.a", [], ["-c", "a+d"]),
    ]
    first, negated, second = operands_of(params, LARGE)[6:]
    assert first is second
    assert torch.equal(first, VALUES["params.a"] + VALUES["params.d"])
    assert negated is operands_of(params, SMALL)[5]


def test_a_parameter_that_is_not_read_is_named():
    with pytest.raises(ArtifactTampered, match=r"1 parameters were not read, params\.d among them"):
        loaded({SMALL: Graph(frozenset({0, 3}))}, names=["params.a"])


@pytest.mark.parametrize("wrong", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.bfloat16)])
def test_a_parameter_of_another_shape_or_dtype_is_named(monkeypatch, wrong):
    monkeypatch.setitem(VALUES, "params.b", wrong)
    with pytest.raises(ArtifactTampered) as caught:
        loaded({SMALL: Graph(frozenset({1}))})
    assert str(caught.value) == f"params.b was read as {tuple(wrong.shape)} {wrong.dtype}; this rank needs f32[2,3]"

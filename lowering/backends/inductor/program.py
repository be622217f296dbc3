"""The program of a stitched package: which bodies a step calls, in which order, and where each reads and puts its values.

A lowered graph of calls becomes numbers that lowering/cpp/stitched/stitched.cpp reads. Values are numbered: operands first, then the
results of calls. A value that is read for the last time is given to its reader, which frees it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule, Node

from ....graphs.invariants import results_of

MARK, VERSION = 0x4E505543, 1
UNREAD = -1
"""Place of a result that nothing reads."""


@dataclass(frozen=True)
class BodyCall:
    """One call of a body.

    Attributes:
        body: its number.
        reads: value and whether this is the last time that it is read, one an operand.
        results: value that each result becomes, or `UNREAD`.
    """

    body: int
    reads: tuple[tuple[int, bool], ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class BodyProgram:
    """The calls of one step.

    Attributes:
        inputs: number of operands.
        values: number of values, operands included.
        calls: in order.
        results: as `BodyCall.reads`.
    """

    inputs: int
    values: int
    calls: tuple[BodyCall, ...]
    results: tuple[tuple[int, bool], ...]

    def encode(self) -> bytes:
        """Little-endian 32-bit integers, in the order in which stitched.cpp reads them."""
        sizes = {call.body: (len(call.reads), len(call.results)) for call in self.calls}
        numbers = [MARK, VERSION, self.inputs, len(self.results), self.values, len(sizes)]
        for body in sorted(sizes):
            numbers += sizes[body]
        numbers.append(len(self.calls))
        for call in self.calls:
            numbers += [call.body, *(int(number) for read in call.reads for number in read), *call.results]
        numbers += [int(number) for read in self.results for number in read]
        return np.array(numbers, "<i4").tobytes()


def program_of(graph: GraphModule, numbers: Mapping[str, int]) -> BodyProgram:
    """The program of a graph of operands, calls, unpackings and an output.

    Args:
        numbers: the number of each body by its name in the graph, from 0 without gaps; equal bodies may share one.
    """
    values = dict[Node, int]()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = len(values)
    inputs = count = len(values)
    calls: list[tuple[Node, list[int], list[int]]] = []
    for node in graph.graph.nodes:
        if node.op != "call_module":
            continue
        results = [UNREAD] * len(node.meta["val"])
        for user in node.users:
            assert user.target is operator.getitem, "a call's results are unpacked"
            place = int(str(user.args[1]))
            if user.users and results[place] == UNREAD:
                results[place] = count
                count += 1
            values[user] = results[place]
        calls.append((node, [values[argument] for argument in node.args], results))
    returned = [values[node] for node in results_of(graph)]
    last = _last_reads([*(reads for _, reads, _ in calls), returned])
    marked = tuple(
        BodyCall(numbers[str(node.target)], tuple(zip(reads, next(last), strict=True)), tuple(results)) for node, reads, results in calls
    )
    return BodyProgram(inputs, count, marked, tuple(zip(returned, next(last), strict=True)))


def one_call(operands: int, results: int) -> BodyProgram:
    """The program that calls a single body with all operands, and returns its results."""
    reads, values = tuple((i, True) for i in range(operands)), range(operands, operands + results)
    return BodyProgram(operands, operands + results, (BodyCall(0, reads, tuple(values)),), tuple((value, True) for value in values))


def encoded_sizes(bodies: Sequence[bytes]) -> bytes:
    """What follows an encoded program in a package: the bytes of each body."""
    return np.array([len(body) for body in bodies], "<i4").tobytes()


def _last_reads(readers: list[list[int]]) -> Iterator[list[bool]]:
    """For each reader, which of its reads are the last of their values."""
    seen, flags = set[int](), list[list[bool]]()
    for reads in reversed(readers):
        row = []
        for value in reversed(reads):
            row.append(value not in seen)
            seen.add(value)
        flags.append(row[::-1])
    return iter(flags[::-1])

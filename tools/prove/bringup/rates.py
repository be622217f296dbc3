"""What a device and its links reach, beside the nameplate and what the cost model takes: copies, memory, a matrix product, launches."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Store
from torch.fx import Graph, GraphModule

from ....lowering.artifact import graph_io
from ....lowering.ascend.acl_graph.file import AclFile
from ....lowering.ascend.cost.parameters import Parameters, parameters
from ....lowering.device import NPU
from .device_graph import DeviceGraph, Host
from .results import Judgement

REPEATS = 3
"""The fastest of which counts."""
SLOW = 0.5
"""Of what the cost model takes: less is named."""
SLOW_DIE = 0.8
"""Of the median of all dies: less is named."""


class RateSizes(NamedTuple):
    """What is run.

    Attributes:
        copied_bytes: by a copy, and by each operand of an addition.
        width: of a square matrix.
        launches: additions behind each other, of a few numbers.
    """

    copied_bytes: int
    width: int
    launches: int


ON_NPUS, ELSEWHERE = RateSizes(256 << 20, 4096, 1000), RateSizes(1 << 16, 32, 8)


@dataclass(frozen=True)
class Rate:
    """One measurement.

    Attributes:
        unit: "B/s", "op/s" or "s".
        nameplate, model: None where there is none.
    """

    measured: float
    unit: str
    nameplate: float | None = None
    model: float | None = None

    @property
    def slow(self) -> bool:
        """Whether it is far from what the cost model takes."""
        if not self.model:
            return False
        return (self.model / self.measured if self.unit == "s" else self.measured / self.model) < SLOW


@dataclass(frozen=True)
class RatesCase:
    """The rates of one device.

    Attributes:
        chip: whose parameters they stand beside.
    """

    chip: str
    name, assumption = "rates", "measurements"

    def judge(self, host: Host) -> Judgement:
        """Measures them, which is never a failure; what captures leave behind ends with the process."""
        rates = measured(host, parameters(self.chip), ON_NPUS if host.device.kind == NPU else ELSEWHERE)
        facts: dict[str, Any] = {"rates": {name: asdict(rate) for name, rate in rates.items()}}
        if host.device.kind == NPU:
            facts["slow"] = [name for name, rate in rates.items() if rate.slow]
        return Judgement(facts=facts, spent=True)


def measured(host: Host, speeds: Parameters, sizes: RateSizes) -> Mapping[str, Rate]:
    """Measures all.

    Raises:
        LoweringError: the device refuses something of it, or fails.
    """
    few = torch.ones(8)
    return {
        **_of_die(host, speeds, sizes),
        "launch, eager": Rate(_seconds_of(host, chain("aten.add.Tensor", few, sizes.launches), few) / sizes.launches, "s"),
        "launch, replayed": Rate(
            _seconds_of(host, chain("aten.add.Tensor", few, sizes.launches, captured=True), few) / sizes.launches,
            "s",
            model=speeds.vector_launch_s,
        ),
    }


def of_rank(host: Host, chip: str, rank: int, ranks: int, store: Store) -> Mapping[str, Any]:
    """Facts of the dies of all ranks, which call it at once: rates by name and rank, and which dies are slow. Rank 0 has them."""
    own = _of_die(host, parameters(chip), ON_NPUS if host.device.kind == NPU else ELSEWHERE)
    store.set(f"rates of {rank}", json.dumps({name: rate.measured for name, rate in own.items()}))
    if rank:
        return {}
    each = [json.loads(store.get(f"rates of {other}")) for other in range(ranks)]
    rates = {name: [of[name] for of in each] for name in own}
    return {"rates of ranks": rates} | ({"slow dies": slow_dies(rates)} if host.device.kind == NPU else {})


def slow_dies(rates: Mapping[str, Sequence[float]]) -> list[str]:
    """Ranks that are far from the others in a rate, and both figures."""
    found = []
    for name, values in rates.items():
        usual = statistics.median(values)
        found += [f"rank {r}: {name} {value:.3g}, the median is {usual:.3g}" for r, value in enumerate(values) if value < SLOW_DIE * usual]
    return found


def _of_die(host: Host, speeds: Parameters, sizes: RateSizes) -> dict[str, Rate]:
    nbytes, width = sizes.copied_bytes, sizes.width
    memory, page_locked = host.device.zeros((nbytes,), torch.uint8), host.device.pinned(nbytes)
    large, square = torch.ones(nbytes // 2, dtype=torch.bfloat16), torch.ones(width, width, dtype=torch.bfloat16)
    to, back = ((lambda: memory.copy_(page_locked, non_blocking=True)), (lambda: page_locked.copy_(memory, non_blocking=True)))
    added, product = _seconds_of(host, chain("aten.add.Tensor", large), large), _seconds_of(host, chain("aten.mm.default", square), square)
    hbm, matrix, ops = speeds.hbm_bytes_per_s, speeds.bf16_ops_per_s, 2 * width**3
    return {
        "copy to the device": Rate(nbytes / _fastest(host, to), "B/s"),
        "copy from the device": Rate(nbytes / _fastest(host, back), "B/s"),
        # Both operands are one tensor.
        "memory": Rate(2 * nbytes / added, "B/s", hbm, hbm * speeds.memory_fraction),
        "bf16 product": Rate(ops / product, "op/s", matrix, matrix * speeds.bf16_fraction),
    }


def chain(name: str, value: torch.Tensor, count: int = 1, *, captured: bool = False) -> AclFile:
    """A graph of an operator with two operands of one size, `count` times behind each other: its result and the first operand."""
    graph, val = Graph(), torch.empty(value.shape, dtype=value.dtype, device="meta")
    first = node = graph.placeholder("operand_0")
    first.meta = {"val": val, "leaf": "inputs.0"}
    for _ in range(count):
        node = graph.call_function(graph_io.find_target(name), (node, first))
        node.meta["val"] = val
    graph.output((node,))
    data = graph_io.encode(GraphModule(torch.nn.Module(), graph))
    return AclFile(data, 1, 1, (), (), captured, (("", count),))


def _seconds_of(host: Host, file: AclFile, value: torch.Tensor) -> float:
    graph = DeviceGraph(host, file, [value])
    return min(graph.run()[1] for _ in range(REPEATS))


def _fastest(host: Host, queue: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        host.wait()
        began = time.perf_counter()
        queue()
        host.wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds)

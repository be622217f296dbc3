"""Estimates the time of a step from what it computes, reads and sends, at a target's nameplate speeds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import DTYPES, Mesh
from ...lowering.collectives_check import Collective
from ...lowering.machines import Npu
from ..builder.targets import Target


@dataclass(frozen=True)
class Roofline:
    """Estimated seconds of one step on one rank; nothing here was measured.

    Attributes:
        target: name of the target.
        arithmetic_s: all matrix products, at the int8 rate if they are quantized.
        memory_s: every operator's operands and results, read and written once.
        links_s: bytes of the collectives over the slowest link of their group, without latencies.
    """

    target: str
    arithmetic_s: float
    memory_s: float
    links_s: float

    @property
    def step_s(self) -> float:
        """The sum of links and the larger of arithmetic and memory: collectives wait for data, so they do not overlap."""
        return max(self.arithmetic_s, self.memory_s) + self.links_s

    def as_dict(self) -> dict[str, Any]:
        """Plain values, marked as an estimate."""
        return asdict(self) | {"step_s": self.step_s, "estimate": True}


def moved_bytes(collectives: Sequence[Collective], mesh: Mesh, choices: int = 0) -> dict[str, int]:
    """Bytes that one rank receives in one step, by group.

    Ring algorithms on equal shards: an all-gather of R bytes receives R (n-1)/n, a reduce-scatter to R bytes R (n-1), an all-reduce of R
    bytes 2 R (n-1)/n. Expert dispatch and combine carry a row per token and chosen expert, with evenly chosen experts.

    Args:
        collectives: of a bucket.
        choices: X, experts per token; used for expert dispatch.

    Raises:
        SpecError: a collective is unknown.
    """
    sizes = {name: len(ranks[0]) for name, ranks in mesh.groups().items()}
    moved: dict[str, int] = {}
    for position, (name, group, kind) in enumerate(collectives):
        n = sizes[group]
        if name in ("moe_dispatch", "moe_combine"):
            tokens = next((shape_of(t)[0][0] for other, _, t in collectives[position:] if other == "moe_combine"), 0)
            shape, itemsize = shape_of(kind)
            received = tokens * choices * math.prod(shape[1:]) * itemsize * (n - 1) // n
        elif name == "fused_experts_w4a8":
            # Rows come in int8, and their results go back in the dtype of the tokens.
            shape, itemsize = shape_of(kind)
            received = choices * math.prod(shape) * (1 + itemsize) * (n - 1) // n
        else:
            received = _ring(name, nbytes(kind), n)
        moved[group] = moved.get(group, 0) + received
    return moved


def estimate(
    cost: Mapping[str, int], collectives: Sequence[Collective], mesh: Mesh, target: Target, *, choices: int = 0, quantised: bool = False
) -> Roofline | None:
    """The roofline of one step; None if the target's speeds are unknown.

    Args:
        cost: flops, read_bytes, write_bytes of one rank.
        quantised: whether products are int8.
    """
    npu = target.npu
    if npu is None:
        return None
    rate = npu.int8_ops_per_s if quantised else npu.bf16_ops_per_s
    links = sum(received / _link(group, mesh, npu) for group, received in moved_bytes(collectives, mesh, choices).items())
    return Roofline(target.name, cost["flops"] / rate, (cost["read_bytes"] + cost["write_bytes"]) / npu.hbm_bytes_per_s, links)


def shape_of(kind: str) -> tuple[tuple[int, ...], int]:
    """Shape and element size of a type written as `bf16[8,4096]`.

    Raises:
        SpecError: it is not such a type.
    """
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", kind)
    if not match or match[1] not in DTYPES:
        raise SpecError(f"{kind!r} is no type of a value; legal are {', '.join(sorted(DTYPES))} with sizes, as in bf16[8,4096]")
    return tuple(int(size) for size in match[2].split(",") if size), DTYPES[match[1]].itemsize


def nbytes(kind: str) -> int:
    """Bytes of a value of that type."""
    shape, itemsize = shape_of(kind)
    return math.prod(shape) * itemsize


def _ring(name: str, result: int, n: int) -> int:
    if name == "reduce_scatter_tensor":
        return result * (n - 1)
    if name not in ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "broadcast"):
        raise SpecError(f"{name} is no collective whose bytes are known")
    return (2 if name == "all_reduce" else 1) * result * (n - 1) // n


def _link(group: str, mesh: Mesh, npu: Npu) -> float:
    """Speed of the slowest link in the largest group of that name."""
    across = any(len({rank // npu.npus_per_node for rank in ranks}) > 1 for ranks in mesh.groups()[group])
    return npu.node_link_bytes_per_s if across else npu.link_bytes_per_s

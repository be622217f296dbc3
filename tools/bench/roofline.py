"""Turns what a step computes, reads and sends into the time that a target's nameplate figures allow: an estimate."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import DTYPES, Mesh
from ...lowering.collectives_check import Collective
from ..build.targets import Target


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one rank, at nameplate speed; nothing here was measured.

    Attributes:
        target: whose figures.
        arithmetic_s: all products at the rate of the narrowest type they are held in.
        memory_s: every operator's operands and results, read and written once.
        links_s: bytes of the collectives over the slowest link of their group; what each costs to start is left out.
    """

    target: str
    arithmetic_s: float
    memory_s: float
    links_s: float

    @property
    def step_s(self) -> float:
        """Arithmetic and memory overlap; collectives wait for data, so they do not."""
        return max(self.arithmetic_s, self.memory_s) + self.links_s

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the note that they are an estimate."""
        return asdict(self) | {"step_s": self.step_s, "estimate": True}


def moved_bytes(collectives: Sequence[Collective], mesh: Mesh, choices: int = 0) -> dict[str, int]:
    """Bytes that one rank receives in one step, by group.

    A ring's share where all ranks hold as much: a gather of R bytes receives R (n-1)/n, a reduce-scatter to R bytes R (n-1), an
    all-reduce both. Expert dispatch and combine carry a row for each token and choice, as if experts were chosen evenly.

    Args:
        collectives: certificate of a bucket.
        choices: X, experts a token goes to; read where a collective is an expert dispatch.

    Raises:
        SpecError: a collective of unknown form.
    """
    sizes = {name: len(ranks[0]) for name, ranks in mesh.groups().items()}
    moved: dict[str, int] = {}
    for position, (name, group, kind) in enumerate(collectives):
        n = sizes[group]
        if name in ("moe_dispatch", "moe_combine"):
            tokens = next((shape_of(t)[0][0] for other, _, t in collectives[position:] if other == "moe_combine"), 0)
            shape, itemsize = shape_of(kind)
            received = tokens * choices * math.prod(shape[1:]) * itemsize * (n - 1) // n
        else:
            received = _ring(name, nbytes(kind), n)
        moved[group] = moved.get(group, 0) + received
    return moved


def estimate(
    cost: Mapping[str, int], collectives: Sequence[Collective], mesh: Mesh, target: Target, *, choices: int = 0, quantised: bool = False
) -> Roofline | None:
    """The roofline of one step; None for a target whose figures are not known.

    Args:
        cost: flops, read_bytes, write_bytes of one rank.
        quantised: products are int8.
    """
    rate = target.int8_ops_per_s if quantised else target.bf16_flops_per_s
    if rate is None or target.hbm_bytes_per_s is None or target.link_bytes_per_s is None:
        return None
    links = 0.0
    for group, received in moved_bytes(collectives, mesh, choices).items():
        links += received / _link(group, mesh, target)
    return Roofline(target.name, cost["flops"] / rate, (cost["read_bytes"] + cost["write_bytes"]) / target.hbm_bytes_per_s, links)


def shape_of(kind: str) -> tuple[tuple[int, ...], int]:
    """Sizes and bytes an element of a type in text, as `bf16[8,4096]`.

    Raises:
        SpecError: it is none.
    """
    found = re.fullmatch(r"(\w+)\[([\d,]*)\]", kind)
    if not found or found[1] not in DTYPES:
        raise SpecError(f"{kind!r} is no type of a value; legal are {', '.join(sorted(DTYPES))} with sizes, as in bf16[8,4096]")
    return tuple(int(size) for size in found[2].split(",") if size), DTYPES[found[1]].itemsize


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


def _link(group: str, mesh: Mesh, target: Target) -> float:
    """Speed of the slowest link in the largest group of that name."""
    across = any(len({rank // target.npus_per_node for rank in ranks}) > 1 for ranks in mesh.groups()[group])
    speed = target.node_link_bytes_per_s if across else target.link_bytes_per_s
    assert speed is not None
    return speed

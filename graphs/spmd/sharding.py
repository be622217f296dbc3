"""DTensor's sharding strategies of primitives, from their factor strings."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..primitive import TABLE, Primitive


def placement(group: tuple[str, ...], letter: str, sums: frozenset[str], *, result: bool) -> Placement:
    """Placement of one operand or result when `letter` is sharded."""
    if letter in group:
        return Shard(group.index(letter))
    return Partial() if result and letter in sums else Replicate()


def strategies(primitive: Primitive[Any], ranks: list[int]) -> list[tuple[list[Placement], list[Placement]]]:
    """(results, operands) placements on one mesh axis for operands of these ranks: all whole, then one strategy per letter."""
    factors = primitive.factors.ranked(ranks)
    legal: list[tuple[list[Placement], list[Placement]]] = [
        ([Replicate() for _ in factors.results], [Replicate() for _ in factors.operands])
    ]
    for letter in factors.letters:
        results = [placement(g, letter, factors.sums, result=True) for g in factors.results]
        legal.append((results, [placement(g, letter, factors.sums, result=False) for g in factors.operands]))
    return legal


def register(primitive: Primitive[Any]) -> None:
    """Tells DTensor how a primitive's node may be sharded."""
    is_tensor = primitive.tensor_arguments

    def rule(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        ranks = [len(arg.shape) for arg, tensor in zip(args, is_tensor, strict=False) if tensor]
        legal = []
        for results, operands in strategies(primitive, ranks):
            rest = iter(operands)
            legal.append((results, [next(rest) if tensor else None for tensor in is_tensor]))
        return legal

    register_sharding(primitive.op)(rule)


_REGISTERED: set[str] = set()


def register_all() -> None:
    """Registers every primitive of the table once."""
    for name, primitive in TABLE.items():
        if name not in _REGISTERED:
            register(primitive)
            _REGISTERED.add(name)

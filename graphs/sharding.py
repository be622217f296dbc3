"""Turns a primitive's factor string into the DTensor strategies its node may be sharded by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .errors import PrimitiveError
from .primitive import TABLE, Primitive

WHOLE = "_"
REST = "..."


@dataclass(frozen=True)
class Factors:
    """A parsed factor string: letters of each tensor operand and result, and the letters that may become partial sums."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    sums: frozenset[str]

    @staticmethod
    def parse(text: str) -> Factors:
        """Reads `"t k, n k -> t n; sum k"`; a group may begin with `...`, the leading dimensions of a value of any rank.

        Raises:
            PrimitiveError: when the arrow is missing, or a letter lacks in a result without being declared `sum`: such a
                dimension stays whole and is written `_`.
        """
        body, _, tail = text.partition(";")
        left, arrow, right = body.partition("->")
        words = tail.split()
        if not arrow or (words and words[0] != "sum"):
            raise PrimitiveError(f"factor string {text!r}: expected 'operands -> results' and optionally '; sum letters'")
        operands, results = (tuple(tuple(group.split()) for group in side.split(",")) for side in (left, right))
        sums = frozenset(words[1:])
        for letter in {x for group in operands for x in group} - {WHOLE} - sums:
            if not all(letter in group for group in results):
                raise PrimitiveError(f"factor string {text!r}: {letter!r} lacks in a result; declare it sum or write '_'")
        return Factors(operands, results, sums)

    def ranked(self, ranks: list[int]) -> Factors:
        """The same factors with `...` spelled out for operands of these ranks: leading dimensions, shared by all that write it.

        Raises:
            PrimitiveError: when a rank does not fit its group.
        """
        extra = {rank - len(g) + 1 for g, rank in zip(self.operands, ranks, strict=True) if REST in g}
        fits = all(REST in g or len(g) == rank for g, rank in zip(self.operands, ranks, strict=True))
        if not fits or len(extra) > 1 or min(extra, default=0) < 0:
            raise PrimitiveError(f"operands of ranks {ranks} do not fit the factors {self.operands}")
        lead = tuple(f"{REST}{i}" for i in range(extra.pop() if extra else 0))

        def spell(group: tuple[str, ...]) -> tuple[str, ...]:
            return (*lead, *group[1:]) if group and group[0] == REST else group

        return Factors(tuple(map(spell, self.operands)), tuple(map(spell, self.results)), self.sums)

    @property
    def letters(self) -> list[str]:
        """Letters that may be sharded, in order of appearance."""
        found = dict.fromkeys(x for group in (*self.operands, *self.results) for x in group if x != WHOLE)
        return list(found)


def placement(group: tuple[str, ...], letter: str, sums: frozenset[str], *, result: bool) -> Placement:
    """Placement of one operand or result when `letter` is sharded."""
    if letter in group:
        return Shard(group.index(letter))
    return Partial() if result and letter in sums else Replicate()


def strategies(primitive: Primitive, ranks: list[int]) -> list[tuple[list[Placement], list[Placement]]]:
    """(results, operands) placements on one mesh axis for operands of these ranks: all whole, then one strategy per letter."""
    factors = Factors.parse(primitive.factors).ranked(ranks)
    found: list[tuple[list[Placement], list[Placement]]] = [
        ([Replicate() for _ in factors.results], [Replicate() for _ in factors.operands])
    ]
    for letter in factors.letters:
        results = [placement(g, letter, factors.sums, result=True) for g in factors.results]
        found.append((results, [placement(g, letter, factors.sums, result=False) for g in factors.operands]))
    return found


def register(primitive: Primitive) -> None:
    """Tells DTensor how a primitive's node may be sharded.

    Raises:
        PrimitiveError: when the factor string and the schema count tensors differently.
    """
    arguments = primitive.op._schema.arguments
    is_tensor = [isinstance(a.type, torch.TensorType) for a in arguments]
    factors = Factors.parse(primitive.factors)
    if sum(is_tensor) != len(factors.operands) or len(primitive.op._schema.returns) != len(factors.results):
        raise PrimitiveError(
            f"primitive {primitive.name!r}: factor string {primitive.factors!r} has {len(factors.operands)} operands and "
            f"{len(factors.results)} results; its schema {primitive.schema} has {sum(is_tensor)} and {len(primitive.op._schema.returns)}"
        )

    def rule(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        ranks = [len(arg.shape) for arg, tensor in zip(args, is_tensor, strict=False) if tensor]
        found = []
        for results, operands in strategies(primitive, ranks):
            rest = iter(operands)
            found.append((results, [next(rest) if tensor else None for tensor in is_tensor]))
        return found

    register_sharding(primitive.op)(rule)


_REGISTERED: set[str] = set()


def register_all() -> None:
    """Registers every primitive of the table once."""
    for name, primitive in TABLE.items():
        if name not in _REGISTERED:
            register(primitive)
            _REGISTERED.add(name)

"""Factor strings: the sharding rule of a primitive as one letter per dimension of its operands and results."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PrimitiveError

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
            PrimitiveError: when the arrow is missing; when a letter is repeated in a group, or carried by no operand; or when
                a result lacks it and it is not declared `sum`: such a dimension stays whole and is written `_`.
        """
        body, _, tail = text.partition(";")
        left, arrow, right = body.partition("->")
        words = tail.split()
        if not arrow or (words and words[0] != "sum"):
            raise PrimitiveError(f"factor string {text!r}: expected 'operands -> results' and optionally '; sum letters'")
        operands, results = (tuple(tuple(group.split()) for group in side.split(",")) for side in (left, right))
        sums = frozenset(words[1:])
        for group in (*operands, *results):
            letters = [x for x in group if x != WHOLE]
            if len(set(letters)) != len(letters) or REST in group[1:]:
                raise PrimitiveError(f"factor string {text!r}: in {' '.join(group)!r} a letter is repeated or '...' is not first")
        carried = {x for group in operands for x in group} - {WHOLE}
        if stray := ({x for group in results for x in group} - {WHOLE} | sums) - carried:
            raise PrimitiveError(f"factor string {text!r}: no operand carries {sorted(stray)}; a shard of it would come from nowhere")
        for letter in sorted(carried - sums):
            if not all(letter in group for group in results):
                raise PrimitiveError(f"factor string {text!r}: {letter!r} lacks in a result; declare it sum or write '_'")
        return Factors(operands, results, sums)

    def ranked(self, ranks: list[int]) -> Factors:
        """The same factors with `...` spelled out for operands of these ranks: leading dimensions, the same in every group with `...`.

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
        return list(dict.fromkeys(x for group in (*self.operands, *self.results) for x in group if x != WHOLE))

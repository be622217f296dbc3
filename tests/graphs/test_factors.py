"""graphs/factors.py: factor strings are parsed as written, and strings that could shard wrongly are refused."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import PrimitiveError
from npucompile.graphs.factors import Factors


def test_reads_operands_results_and_sums() -> None:
    factors = Factors.parse("t k, n k -> t n; sum k")
    assert factors == Factors((("t", "k"), ("n", "k")), (("t", "n"),), frozenset({"k"}))
    assert factors.letters == ["t", "k", "n"]


def test_whole_dimensions_and_scalars_are_no_letters() -> None:
    factors = Factors.parse("_ _ h, , h -> h _, h")
    assert factors.operands == (("_", "_", "h"), (), ("h",))
    assert factors.letters == ["h"]


def test_a_sum_may_stay_in_one_result() -> None:
    assert Factors.parse("t k -> t k, t; sum k").sums == {"k"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t k, n k", "expected 'operands -> results'"),
        ("t k -> t; k", "optionally '; sum letters'"),
        ("t k -> t; total k", "optionally '; sum letters'"),
        ("t k, n k -> t n", "'k' lacks in a result; declare it sum or write '_'"),
        ("t h -> t h, t _", "'h' lacks in a result"),
        ("t k -> t; sum k z", r"no operand carries \['z'\]"),
        ("t -> t m", r"no operand carries \['m'\]"),
        ("t t -> t", "in 't t' a letter is repeated"),
        ("t -> t t", "in 't t' a letter is repeated"),
        ("t ... -> t ...", "'...' is not first"),
        ("... ... -> ...", "is repeated or"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(PrimitiveError, match=message) as caught:
        Factors.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("rank", "lead"), [(1, ()), (2, ("...0",)), (4, ("...0", "...1", "...2"))])
def test_the_rest_takes_any_rank(rank: int, lead: tuple[str, ...]) -> None:
    factors = Factors.parse("... _, _ -> ... _").ranked([rank, 1])
    assert factors.operands == ((*lead, "_"), ("_",))
    assert factors.results == ((*lead, "_"),)
    assert factors.letters == list(lead)


def test_the_rest_is_shared() -> None:
    factors = Factors.parse("... k, ... k -> ...; sum k").ranked([3, 3])
    assert factors.results == (("...0", "...1"),)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("t k, n k -> t n; sum k", [2, 1]),
        ("... _ _, _ -> ... _ _", [1, 1]),
        ("... k, ... k -> ...; sum k", [2, 3]),
    ],
)
def test_refuses_ranks_that_do_not_fit(text: str, ranks: list[int]) -> None:
    with pytest.raises(PrimitiveError, match=rf"operands of ranks \[{ranks[0]}, {ranks[1]}\] do not fit"):
        Factors.parse(text).ranked(ranks)

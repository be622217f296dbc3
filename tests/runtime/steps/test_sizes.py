"""runtime/steps/sizes.py: decode steps take the smallest bucket; a prompt takes the cheapest steps, and shares them where that saves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.steps.prefill import PREFILL
from npucompile.graphs.types import Bucket
from npucompile.runtime.steps.sizes import (
    CLEARLY,
    NEARLY,
    Alone,
    choose,
    choose_prefill,
    choose_sizes,
    default_fixed_tokens,
    price,
    tokens_for,
)

SMALL, LARGE, EIGHT = Bucket("prefill", 1, 32), Bucket("prefill", 1, 512), Bucket("prefill", 8, 32)
DECODE = Bucket("decode", 1, 1)

sizes_of_rows = st.dictionaries(st.integers(1, 12), st.integers(1, 60), min_size=1, max_size=4).map(lambda costs: sorted(costs.items()))


def q_len(left: int, fixed_tokens: float, between: float = 0.0) -> int:
    return choose_prefill((SMALL, LARGE), [[left]], lambda b: price(b, fixed_tokens), between).q_len


def cheapest(sizes: list[tuple[int, int]], left: int, between: int) -> float:
    """All sequences of steps that hold so many tokens are tried."""
    return min(cost + (between + cheapest(sizes, left - tokens, between) if tokens < left else 0) for tokens, cost in sizes)


@settings(max_examples=200, deadline=None)
@given(sizes_of_rows, st.integers(1, 16), st.integers(0, 9))
def test_a_prompt_by_itself_takes_the_cheapest_steps_if_clearly_cheaper(sizes: list[tuple[int, int]], left: int, between: int) -> None:
    longest = max(tokens for tokens, _ in sizes)
    chunk = Alone(sizes, between).chunk(left)
    if left > longest:
        assert chunk == longest
        return
    whole = min(cost for tokens, cost in sizes if tokens >= left)
    several = {t: cost + between + cheapest(sizes, left - t, between) for t, cost in sizes if t < left}
    least = min(several.values(), default=math.inf)
    # Of sequences that cost the same any may be taken.
    assert chunk in ({t for t, total in several.items() if total == least} if least <= CLEARLY * whole else {left})


@given(sizes_of_rows, st.integers(1, 40), st.integers(0, 9))
def test_a_prompt_by_itself_never_costs_more_than_in_whole_steps(sizes: list[tuple[int, int]], tokens: int, between: int) -> None:
    alone, longest = Alone(sizes, between), max(tokens for tokens, _ in sizes)
    left, spent, whole = tokens, -between, -between
    while left > 0:
        chunk = alone.chunk(left)
        assert 1 <= chunk <= left
        spent, left = spent + between + min(cost for t, cost in sizes if t >= chunk), left - chunk
    for rest in range(tokens, 0, -longest):
        whole += between + min(cost for t, cost in sizes if t >= min(rest, longest))
    assert spent <= whole
    steps, left = 0, tokens
    while left > 0:
        steps, left = steps + 1, left - alone.chunk(left)
    assert alone.cost(tokens) == spent - between * (steps - 1)


@settings(max_examples=200, deadline=None)
@given(
    sizes_of_rows,
    st.lists(st.tuples(st.integers(2, 4), st.integers(0, 3), st.integers(0, 200)), max_size=3),
    st.lists(st.integers(1, 30), min_size=1, max_size=7),
    st.integers(0, 9),
)
def test_prompts_never_cost_more_than_one_after_the_other(rows, shared, prompts, between) -> None:
    costs = {Bucket("prefill", 1, tokens): cost for tokens, cost in rows}
    # A step of several prompts takes no less than one of as long a row.
    for batch, which, more in shared:
        tokens, cost = rows[which % len(rows)]
        costs[Bucket("prefill", batch, tokens)] = cost + more
    alone = Alone(rows, between)
    expected, left, spent = sum(map(alone.cost, prompts)), list(prompts), 0
    while left:
        bucket = choose_prefill((*costs, DECODE), [left], costs.__getitem__, between)
        assert bucket.q_len >= alone.chunk(left[0])
        spent += costs[bucket]
        left = [n for n in (max(n - bucket.q_len, 0) if i < bucket.batch else n for i, n in enumerate(left)) if n]
    assert spent <= expected


@given(st.lists(st.lists(st.integers(1, 30), max_size=4), min_size=2, max_size=3).filter(any), sizes_of_rows, st.integers(0, 9))
def test_no_group_waits_for_another(remaining, rows, between) -> None:
    costs = {Bucket("prefill", batch, tokens): cost * batch for tokens, cost in rows for batch in (1, 2)}
    left = [list(own) for own in remaining]
    for _ in range(sum(map(sum, remaining))):
        first = [own[0] for own in left if own]
        if not first:
            break
        bucket = choose_prefill(costs, left, costs.__getitem__, between)
        # The longest of the oldest decides, and gets what it would alone.
        assert bucket.q_len >= Alone(rows, between).chunk(max(first))
        left = [[n for n in [*(max(n - bucket.q_len, 0) for n in own[: bucket.batch]), *own[bucket.batch :]] if n] for own in left]
    assert not any(left)


def test_a_short_prompt_takes_small_steps_where_tokens_cost_and_one_where_weights_do() -> None:
    # 0.75 B parameters in bfloat16 on two cores: 32 tokens take 90 ms, 512 take 450.
    assert price(LARGE, 99) / price(SMALL, 99) == pytest.approx(450 / 90, rel=0.01)
    assert [q_len(left, 99) for left in (1, 32, 33, 64, 96, 97, 512, 513)] == [32, 32, 32, 32, 32, 512, 512, 512]
    # Qwen3-8B on an NPU: 32 tokens take 13.3 ms, 512 take 30.1 (estimated); a mixture of experts reads more for a token.
    assert [q_len(left, 221) for left in (32, 33, 512)] == [32, 512, 512]
    assert [q_len(left, 1100) for left in (32, 33)] == [32, 512]


def test_large_steps_come_before_small_ones() -> None:
    buckets = (SMALL, LARGE, Bucket("prefill", 1, 128))
    costs = {SMALL: 30.0, LARGE: 900.0, buckets[2]: 100.0}
    left, chunks = 150, []
    while left > 0:
        chunks.append(choose_prefill(buckets, [[left]], costs.__getitem__).q_len)
        left -= chunks[-1]
    assert chunks == [128, 32]


def test_prompts_that_take_small_steps_share_them() -> None:
    buckets = (SMALL, LARGE, EIGHT)

    def chosen(*left: int) -> Bucket:
        return choose_prefill(buckets, [left], lambda b: price(b, 99))

    assert [chosen(*[60] * count) for count in (1, 2, 3)] == [SMALL, SMALL, EIGHT]
    assert chosen(28, 28, 28) == EIGHT
    # Two small steps are what each of these takes, and the first of them would be for nothing where one large step follows.
    assert [chosen(60, left, left) for left in (60, 400)] == [EIGHT, SMALL]


def test_what_is_known_of_nothing_is_twice_the_tokens_of_the_smallest() -> None:
    assert price(SMALL, default_fixed_tokens((EIGHT, DECODE, SMALL, LARGE))) == pytest.approx(64)
    assert choose_prefill((SMALL, LARGE), [[60]]) == choose_prefill((SMALL, LARGE), [[60]], lambda b: price(b, 32 * math.sqrt(3)))


@pytest.mark.parametrize("remaining", [[[0]], [[3, -1]], [[], []]])
def test_no_bucket_for_nothing(remaining: list[list[int]]) -> None:
    with pytest.raises(SpecError, match="at least 1"):
        choose_prefill((SMALL, DECODE), remaining)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=20), st.integers(1, 600), st.integers(1, 600), st.integers(0, 300))
def test_sizes_that_are_values_are_as_good_as_any_for_the_oldest_prompts(left, tokens, longest, fixed):
    sizes = choose_sizes(left, tokens, longest, fixed)
    first = min(left[0], tokens, longest)
    assert first <= sizes.q_len <= longest
    assert sizes.tokens <= tokens
    assert sizes.batch <= len(left)

    def rate(rows, length):
        return sum(min(of, length) for of in left[:rows]) / price(Bucket("prefill", rows, length), fixed)

    for length in {min(of, tokens, longest) for of in left}:
        for rows in range(1, min(tokens // length, len(left)) + 1) if length >= first else ():
            assert rate(sizes.batch, sizes.q_len) >= NEARLY * rate(rows, length) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ([64] * 16, (8, 64)),
        ([512, *[64] * 8], (1, 512)),
        # The others get as much as the oldest.
        ([64, 512, 512, 64, 512], (5, 64)),
        # Rather a few tokens of padding than prompts with as few left.
        ([60, *[64] * 7], (8, 64)),
        ([100, *[20] * 15], (1, 100)),
        ([2000, 5], (1, 512)),
        ([5], (1, 5)),
    ],
)
def test_prompts_of_any_lengths_share_steps_that_have_little_padding(left, expected):
    sizes = choose_sizes(left, 512, 512, 99.0)
    assert (sizes.batch, sizes.q_len) == expected


@pytest.mark.parametrize(("left", "tokens"), [([], 9), ([0], 9), ([3, 0], 9), ([1], 0)])
def test_a_step_of_no_tokens_is_refused(left, tokens):
    with pytest.raises(SpecError, match="legal is one or more of each, of at least 1"):
        choose_sizes(left, tokens, 9, 1.0)


@given(st.floats(0, 2000), st.floats(0, 300))
def test_tokens_that_a_price_buys_cost_no_more_and_one_more_would(units, fixed):
    tokens = tokens_for(units, fixed)
    assert tokens == 0 or price(Bucket("prefill", 1, tokens), fixed) <= units * (1 + 1e-9)
    assert price(Bucket("prefill", 1, tokens + 1), fixed) > units * (1 - 1e-9)


ONE_OF_EACH = (Bucket("decode", 1, 1), Bucket("prefill", 1, 8))

decode_lists = st.lists(st.builds(lambda b: Bucket("decode", b, 1), st.integers(1, 20)), min_size=1, max_size=5)
prefill_lists = st.lists(st.builds(lambda q: Bucket("prefill", 1, q), st.integers(1, 40)), min_size=1, max_size=5)


@given(decode_lists, prefill_lists, st.integers(1, 60))
def test_choice_is_the_smallest_that_holds_it_else_the_largest(decode, prefill, live):
    batches = sorted(b.batch for b in decode)
    chosen = choose([*prefill, *decode], live)
    assert (chosen.kind, chosen.batch) == ("decode", next((b for b in batches if b >= live), batches[-1]))


@pytest.mark.parametrize("count", [0, -1])
def test_no_decode_bucket_for_nothing(count):
    with pytest.raises(SpecError, match="at least 1"):
        choose(ONE_OF_EACH, count)


def test_a_missing_kind_is_named():
    with pytest.raises(SpecError, match=r"no prefill bucket among \['decode-b1-q1'\]"):
        PREFILL.needed(ONE_OF_EACH[:1])

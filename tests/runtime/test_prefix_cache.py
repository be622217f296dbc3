"""An engine that keeps prefixes: whatever is kept of earlier requests, each gets what it gets alone, and everything comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support import toy_device as toy

from npucompile.graphs.types import Bucket, Limits
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.replay import replay
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings

KEPT = PrefixCacheSettings()


pytestmark = pytest.mark.usefixtures("quiet")


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[toy.Visit, ...], dict[str, Any]]:
    """Requests whose prompts begin with the same text, on a device that is small enough for preemptions, and may fail."""
    drafts, page_size, per_request = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([12, 8, 5]))
    length, token = page_size * per_request, st.integers(0, toy.VOCAB - 1)
    text = tuple(draw(st.lists(token, min_size=length, max_size=length)))
    extra = draw(st.sampled_from([0, 2, 9]))
    limits = Limits(
        page_size,
        1 + per_request + draw(st.sampled_from([3, 0, 2 * per_request])),
        1 + (drafts + 1) * draw(st.sampled_from([4, 2, 1])) + extra,
        length,
        drafts + 1,
        drafts,
        checkpoint_slots=extra,
    )
    prompts = st.builds(
        lambda shared, own: (*text[:shared], *own)[: length - 1],
        st.integers(1, length - 1),
        st.lists(token, max_size=3),
    )
    requests = st.builds(
        Request,
        id=st.just(""),
        prompt=prompts,
        max_tokens=st.integers(1, length),
        sampling=st.builds(Sampling, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 9)),
        cache_salt=st.sampled_from(["", "", "", "b"]),
        skip_reading_prefix_cache=st.sampled_from([False, False, False, True]),
    )
    visits = []
    for i in range(draw(st.integers(2, 7))):
        arrives = draw(st.integers(0, 30))
        cancelled = draw(st.none() | st.none() | st.integers(arrives, arrives + 6))
        request = draw(requests)
        if visits and draw(st.booleans()):
            # It goes on with what another one was told, or with a part of that.
            earlier = draw(st.sampled_from(visits)).request
            known = (*earlier.prompt, *toy.reference_run(earlier, length).tokens)
            known = known[: max(1, len(known) - draw(st.sampled_from([0, 0, 0, 1, 2])))]
            prompt = (*known, *draw(st.lists(token, min_size=1, max_size=3)))[: length - 1]
            request = Request(**{**vars(request), "prompt": prompt, "cache_salt": earlier.cache_salt})
        named = Request(**{**vars(request), "id": f"r{i}"})
        visits.append(toy.Visit(named, arrives, cancelled, draw(st.sampled_from([False] * 5 + [True]))))
    device = {
        "limits": limits,
        "buckets": (
            *(Bucket("decode", b, drafts + 1) for b in draw(st.sets(st.integers(1, 4), min_size=1, max_size=2))),
            *(Bucket("prefill", *size) for size in draw(st.sets(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=2))),
        ),
        "groups": draw(st.sampled_from([1, 1, 2])),
        "recurrent": draw(st.booleans()),
        "prefix_cache": PrefixCacheSettings(draw(st.sampled_from([None, None, 0, 2 * page_size]))),
        "prefill_burst": draw(st.integers(1, 2)),
        "run_ahead": draw(st.integers(0, 1)),
        "lazy": draw(st.booleans()),
        "right": draw(st.sampled_from([0.5, 1.0])),
        "fail_at": draw(st.just(frozenset()) | st.frozensets(st.integers(1, 30), max_size=1)),
    }
    return tuple(visits), device


@settings(max_examples=200)
@given(worlds())
def test_whatever_is_kept_each_request_gets_what_it_gets_alone(world: tuple[tuple[toy.Visit, ...], dict[str, Any]]) -> None:
    visits, device = world
    served, sinks, entries = toy.played(visits, device)
    for visit, sink in zip(visits, sinks, strict=True):
        expected = toy.reference_run(visit.request, device["limits"].max_model_len)
        if sink.end.reason in ("cancelled", "error"):
            assert visit.cancelled is not None if sink.end.reason == "cancelled" else "was told to fail" in sink.end.message, sink.end
            assert sink.tokens == expected.tokens[: len(sink.tokens)]
        else:
            assert (sink.tokens, sink.end.reason) == (expected.tokens, expected.reason)
        cached = sink.end.record.cached_tokens
        assert device["recurrent"] or cached % device["limits"].page_size == 0
        assert cached <= longest_shared(visit, visits) * (not visit.request.skip_reading_prefix_cache)
    served.engine.flush_prefix_cache()
    served.drain()
    for manager in served.engine.stepper.cache_managers:
        for pool in (manager.pages, manager.state_slots, manager.request_slots):
            assert pool.free_count == pool.size - 1
    served.device.check_order(device["run_ahead"])
    again = toy.serving(**device)
    for visit in visits:
        again.device.register(visit.request)
    assert replay(again.engine, entries).divergence is None


def longest_shared(visit: toy.Visit, visits: tuple[toy.Visit, ...]) -> int:
    """The most tokens that anyone else with the same salt has in common with a prompt, but for the prompt's last one."""
    prompt, longest = visit.request.prompt, 0
    for other in visits:
        if other is not visit and other.request.cache_salt == visit.request.cache_salt and other.arrives <= visit.arrives + 35:
            known = (*other.request.prompt, *toy.reference_run(other.request, 99).tokens)
            same = next((i for i, (a, b) in enumerate(zip(prompt, known, strict=False)) if a != b), min(len(prompt), len(known)))
            longest = max(longest, min(same, len(prompt) - 1))
    return longest


# A hybrid model with a draft head, in float32.

TEXT = tuple((7 * i * i + 3 * i) % 250 for i in range(60))
TOKENS = 6
SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(0.6, 30, 0.95, 0.01, seed=5)}


@pytest.fixture(scope="module")
def executor(tiny_artifact: Path) -> CpuExecutor:
    return CpuExecutor(Artifact.open(tiny_artifact))


def prompt_of(shared: int) -> tuple[int, ...]:
    """The text up to there, and tokens that it does not go on with."""
    return (*TEXT[:shared], 251 + shared % 3, 17, 5)[:55]


@pytest.mark.parametrize(("kind", "run_ahead"), [("greedy", 0), ("seeded", 1)])
def test_tokens_are_those_of_a_cold_engine_wherever_prompts_part(executor: CpuExecutor, kind: str, run_ahead: int) -> None:
    """Every cut around two page boundaries, with drafts, on pages and slots that hold what others left there."""
    sampling, page_size = SAMPLINGS[kind], executor.limits.page_size
    assert page_size == 16
    cuts = [14, 15, 16, 17, 31, 32, 33, 51]
    requests = [Request(f"r{cut}", prompt_of(cut), TOKENS, sampling) for cut in cuts]
    tiny.poison(executor)
    cold = [toy.finished(Engine(executor, refresh_every_s=None), [request])[0] for request in requests]
    tiny.poison(executor)
    with tiny.Launching(executor) as launching:
        engine = Engine(launching, refresh_every_s=None, run_ahead=run_ahead, prefix_cache=KEPT)
        warm: list[toy.Collector] = []
        # There is no place for all that they leave.
        for part in (requests[:4], requests[4:]):
            engine.flush_prefix_cache()
            first = toy.finished(engine, [Request("first", TEXT[:52], 4, sampling)])[0]
            assert first.end.record.cached_tokens == 0
            warm += [toy.finished(engine, [request])[0] for request in part]
        again = toy.finished(engine, requests[-3:])
        unread = toy.finished(engine, [Request("u", prompt_of(33), TOKENS, sampling, skip_reading_prefix_cache=True)])[0]
        salted = toy.finished(engine, [Request("s", prompt_of(33), TOKENS, sampling, cache_salt="another")])[0]
        stats = engine.stats()
        engine.flush_prefix_cache()
        engine.step()
        (manager,) = engine.stepper.cache_managers
        assert [pool.owners() for pool in (manager.pages, manager.state_slots, manager.request_slots)] == [frozenset()] * 3
    for cut, old, new in zip(cuts, cold, warm, strict=True):
        assert new.tokens == old.tokens, cut
    assert [sink.tokens for sink in again] == [sink.tokens for sink in cold[-3:]]
    assert unread.tokens == salted.tokens == cold[cuts.index(33)].tokens
    assert unread.end.record.cached_tokens == salted.end.record.cached_tokens == 0
    # The text was kept at 16 and 32, where its chunks ended, and at 48; the draft head's last entry before each depends on the next token.
    assert [sink.end.record.cached_tokens for sink in warm] == [0, 0, 0, 16, 16, 16, 32, 48]
    assert stats["prefix_cache_hits_total"] == sum(sink.end.record.cached_tokens for sink in (*warm, *again))
    assert sum(sink.end.record.drafted_tokens for sink in warm) > 0
    accepted = [sink.end.record.accepted_per_position for sink in (*cold, *warm)]
    # The draft head finds what it would have written: it is right as often.
    assert accepted[: len(cuts)] == accepted[len(cuts) :]


@pytest.mark.parametrize(("kind", "run_ahead", "drafts"), [("greedy", 0, None), ("seeded", 0, None), ("seeded", 1, 0)])
def test_a_conversation_goes_on_behind_its_last_answer(executor: CpuExecutor, kind: str, run_ahead: int, drafts: int | None) -> None:
    """Answers end at every place of a page, and within steps that verified drafts; what follows is what follows a cold start."""
    found = []
    lengths = (1, 3, 6, 7, 8, 9, 16)
    for length in lengths:
        tiny.poison(executor)
        cold = Engine(executor, refresh_every_s=None)
        with tiny.Launching(executor) as launching:
            warm = Engine(launching, refresh_every_s=None, run_ahead=run_ahead, prefix_cache=KEPT)
            said: tuple[int, ...] = TEXT[:9]
            for turn in range(2):
                request = Request(f"{length} {turn}", said, length, SAMPLINGS[kind], speculative_tokens=drafts)
                (sink,) = toy.finished(warm, [request])
                found.append((len(said), sink.end.record.cached_tokens))
                if turn:
                    assert sink.tokens == toy.finished(cold, [request])[0].tokens, (length, turn)
                said = (*said, *sink.tokens, *TEXT[20 : 23 + length % 3])
    # All but the last token of an answer was computed, whatever page it ended in.
    expected = [(9 + length + 3 + length % 3, 9 + length - 1) for length in lengths]
    assert found[1::2] == expected
    assert {cached for _, cached in found[::2]} == {0}

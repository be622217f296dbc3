"""runtime/scheduler/computed.py: tokens of a request in the caches, of its prompt, its output and the step."""

from __future__ import annotations

from support.scheduling import all_decode, policy, request

from npucompile.runtime.scheduler.advance import computed, launch
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.step_outputs import SampledTokens

RULES = policy(decode=(4,), prefill=((4, 8),), pages=200, requests=5, page_size=2, length=60, drafts=2)


def test_known_tokens_are_prompt_output_and_what_the_step_sampled() -> None:
    state = all_decode(RULES, *(request(name, prompt=3 + i, max_tokens=40) for i, name in enumerate("abc")))
    step = schedule(state)
    assert step is not None
    state = launch(state, step, 0.0)
    (rows,) = computed(state, step, [[SampledTokens((7,), 2), SampledTokens((8, 9), 2), None]])
    assert [row.request.id for row in rows] == ["a", "b"]
    assert [row.num_computed_tokens for row in rows] == [4, 6]
    for row in rows:
        known = (*row.request.request.prompt, *row.request.output_token_ids, *row.output)
        assert row.num_tokens == len(known)
        assert [row.token_ids(start, 3) for start in range(row.num_tokens)] == [known[start : start + 3] for start in range(len(known))]

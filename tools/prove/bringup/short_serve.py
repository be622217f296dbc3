"""A short serve: a few concurrent requests through the engine, with drafts and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....graphs.errors import NpucompileError
from ....graphs.steps.table import kind_of
from ....runtime.executor import Executor
from ....runtime.request import Sampling
from ...agreement.tolerances import INTEGERS
from ...progress import Bar
from ...ranks.offline import complete
from .results import BringupFailure

WHAT = "a short serve"
REQUESTS, TOKENS = 4, 12


def prompts_of(executor: Executor, requests: int = REQUESTS) -> list[list[int]]:
    """Prompts of different lengths, the last one longer than the smallest prefill bucket where the context allows."""
    generator, longest = np.random.default_rng(0), executor.limits.max_model_len - TOKENS - 1
    smallest = min(bucket.q_len for bucket in executor.buckets if kind_of(bucket).chunks)
    lengths = [max(1, min(longest, length)) for length in (5, 1, 17, smallest + 3)]
    return [[int(t) for t in generator.integers(0, executor.vocab_size, lengths[i % len(lengths)])] for i in range(requests)]


def run_serve(executor: Executor, bar: Bar) -> tuple[list[BringupFailure], dict[str, Any]]:
    """Completes the prompts greedily with and without drafts: the tokens are equal, and nothing is compiled meanwhile.

    Where two logits are as good as equal a request may go another way with drafts than without; few may.
    """
    prompts, runs = prompts_of(executor), []
    kinds = [None, 0] if executor.limits.drafts else [None]
    for drafts in kinds:
        try:
            completions = complete(executor, prompts, Sampling(), TOKENS, frozenset(), speculative_tokens=drafts)
        except NpucompileError as error:
            return [BringupFailure.of("one-session", WHAT, error)], {}
        runs.append([completion.token_ids for completion in completions])
        bar.step("without drafts" if drafts == 0 else "as built")
    facts: dict[str, Any] = {"requests": len(prompts), "tokens": sum(map(len, runs[0])), "compiles": executor.compiles()}
    if facts["compiles"]:
        return [BringupFailure("one-session", WHAT, f"{facts['compiles']} compiles after ready; legal is none")], facts
    if any(not 0 <= token < executor.vocab_size for tokens in runs[0] for token in tokens):
        return [BringupFailure("kernels", WHAT, f"tokens {runs[0]}; legal are 0 to {executor.vocab_size - 1}")], facts
    if len(runs) > 1:
        return _compared(runs[0], runs[1]), facts
    return [], facts


def _compared(drafted: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> list[BringupFailure]:
    places = [_first_difference(a, b) for a, b in zip(drafted, plain, strict=True)]
    different = [i for i, place in enumerate(places) if place < TOKENS]
    if len(different) <= INTEGERS * sum(places):
        return []
    first = different[0]
    message = f"with drafts {list(drafted[first])}, without {list(plain[first])}; {len(different)} of {len(places)} requests differ"
    return [BringupFailure("delta-rule", WHAT, message)]


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), max(len(a), len(b)) if len(a) == len(b) else min(len(a), len(b))
    )

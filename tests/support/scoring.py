"""A kind of steps that nothing ships, as docs/adding-a-step-kind.md adds it: log probabilities of a chunk of a prompt at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from npucompile.graphs import ops
from npucompile.graphs.spmd.layout import constrain
from npucompile.graphs.steps import table
from npucompile.graphs.steps.kind import StepOutput
from npucompile.graphs.steps.prefill import PREFILL
from npucompile.graphs.types import Tree
from npucompile.models import sequence_parallel
from npucompile.models.sampling import LOGPROBS
from npucompile.models.step import _Step
from npucompile.runtime.steps import rows

SCORE = replace(
    PREFILL,
    name="score",
    # It needs the token behind the chunk whether steps draft or not.
    inputs=tuple(replace(field, needs="") if field.name == "next_tokens" else field for field in PREFILL.inputs),
    outputs=tuple(StepOutput(name, dims, kind) for name, dims, kind in zip(LOGPROBS, ("BQ", "BQ?", "BQ?"), "fif", strict=True)),
    reads=("pages", "slots", "first_slots"),
    writes=("pages", "slots", "first_slots"),
    sampled=lambda bucket: 0,
)


def score(self: _Step, params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
    """Computes a chunk of each row's prompt; gives of each of its tokens the log probability of the one that follows."""
    bucket = self.bucket
    hidden, state, _, _ = self._forward(params, state, inputs)
    logits = self.model.family.head(self.model.wide, params, sequence_parallel.whole(hidden, bucket.tokens))
    logits = constrain(logits, None, None)[:, : self.model.config.vocab_size].float().view(bucket.batch, bucket.q_len, -1)
    following = self._next_tokens(inputs, inputs["next_tokens"]).clamp(min=0)
    scored = ops.token_logprobs(logits, following, inputs["logprobs"], self.max_logprobs)
    return dict(zip(LOGPROBS, scored, strict=True)), state


@contextmanager
def added() -> Iterator[None]:
    """The kind is one of those there are: its record, its program and what its rows are."""
    kinds: Any = mock.patch.dict(table.STEP_KINDS, score=SCORE)
    with kinds, mock.patch.dict(rows.ROWS, score=rows.PrefillRow), mock.patch.object(_Step, "score", score, create=True):  # type: ignore[arg-type]
        yield


def with_scores(plan: Any, *q_lens: int) -> Any:
    """A plan that has such buckets too, of one prompt."""
    return replace(plan, buckets=tuple(sorted((*plan.buckets, *(SCORE.bucket(1, q_len) for q_len in q_lens)))))

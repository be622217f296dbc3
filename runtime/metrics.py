"""The engine's counters, as `/metrics` shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..graphs.steps.table import kind_of
from ..graphs.types import Bucket
from .latencies import Latencies
from .request import FINISH_REASONS, Event, TokenEvent
from .scheduler.advance import GroupResults
from .scheduler.picture_ledger import PictureLedger
from .scheduler.scheduled_step import ScheduledRequest, ScheduledStep

EXPERTS = "experts"
"""Name of the counter that is a table."""


class Metrics:
    """Counters since the engine was created; they only grow. The engine guards them with its lock.

    Args:
        drafts: most drafts verified for a request in a step.
        max_model_len: longest request in tokens.
    """

    def __init__(self, drafts: int = 0, max_model_len: int = 1) -> None:
        self.latencies = Latencies(max_model_len)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.padded_rows = 0
        self.discarded_rows = 0
        self.verified_rows = 0
        self.drafted_tokens = 0
        self.accepted = [0] * drafts
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.failed_steps = 0
        self.not_finite = 0
        self.bucket_steps: dict[str, int] = {}
        self.degraded_steps: dict[str, int] = {}
        self.decode_batch_steps: dict[int, int] = {}
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.encode_ms = 0.0
        self.pictures: dict[str, int] = {}
        self.experts: npt.NDArray[np.int64] | None = None

    def count_results(self, step: ScheduledStep, results: Sequence[GroupResults], wanted: Bucket | None, now_ms: float) -> None:
        """Counts a step that ran and what came of each row.

        Args:
            results: of the rows of each group.
            wanted: the bucket that it would have taken, if that one cannot run.
            now_ms: when the results were known.
        """
        continued: list[str] = []
        computed = 0
        self.count_step(step.bucket, sum(len(part.rows) for part in step.groups), len(step.groups) * step.shape.batch)
        if kind_of(step.bucket).decodes:
            self.count_decode_batch(max(len(part.rows) for part in step.groups))
        if wanted is not None:
            self.count_degraded(wanted)
        verified: list[tuple[int, int]] = []
        for part, rows in zip(step.groups, results, strict=True):
            for row, tokens in zip(part.rows, rows, strict=True):
                state, decoding = row.state, row.state.decoding
                computed += 0 if decoding else row.num_tokens
                if tokens is None:
                    self.discarded_rows += 1
                    continue
                token_ids, num_drafts, _, _, _, not_finite = tokens
                count, request = len(token_ids), state.request
                computed += count if decoding else min(count, row.samples)
                self.not_finite += not_finite
                if num_drafts:
                    verified.append((num_drafts, count - 1))
                # Most rows have all of the prompt behind them.
                if count and decoding and state.num_computed_tokens >= len(request.prompt):
                    continued.append(request.id)
                elif count:
                    self._count_first(row, count, continued, now_ms)
        for (drafted, accepted), times in Counter(verified).items():
            self.count_verified(drafted, accepted, times)
        self.latencies.more_tokens(continued, now_ms)
        self.latencies.step(computed)

    def _count_first(self, row: ScheduledRequest, count: int, continued: list[str], now_ms: float) -> None:
        """Counts the first token of an output, if that is among those of a row, or puts a request that has further ones to the others."""
        index, request = row.first_index, row.request
        if index <= 0 and index + count >= min(request.max_tokens, 1):
            self.prompt_tokens += len(request.prompt)
            if request.max_tokens:
                self.latencies.first_token(request, row.state.submitted_ms, now_ms)
        elif index > 0:
            continued.append(request.id)

    def count_experts(self, counts: npt.NDArray[np.int64]) -> None:
        """Adds what `step_outputs.count_experts` found."""
        before = counts[:, :0] if self.experts is None else self.experts
        wide = max(before.shape[1], counts.shape[1])
        before, counts = (np.pad(each, ((0, 0), (0, wide - each.shape[1]))) for each in (before, counts))
        self.experts = before + counts

    def count_launch(self, step: ScheduledStep) -> None:
        """Counts a step that is launched: what is preempted, and what is known of those that are admitted for the first time."""
        for part in step.groups:
            self.preemptions += len(part.preempted)
            for row in part.rows if part.admitted else ():
                if row.match is not None and not row.state.record.preemptions and not row.request.skip_reading_prefix_cache:
                    self.prefix_queries += row.state.num_tokens
                    self.prefix_hits += row.state.num_computed_tokens

    def count_events(self, events: Sequence[Event]) -> None:
        """Counts what is sent to clients."""
        for event in events:
            if isinstance(event, TokenEvent):
                self.generation_tokens += len(event.token_ids)
            else:
                self.finished[event.reason] += 1
                self.latencies.finished(event)
                # A stop token was generated but is not in any TokenEvent.
                self.generation_tokens += event.reason == "stop"

    def count_encoded(self, step: ScheduledStep, failed: int, wanted: Bucket | None, took_ms: float) -> None:
        """Counts an encode step that ran.

        Args:
            failed: requests whose pictures came out as no numbers.
            wanted: as of `count_results`.
            took_ms: since it was launched.
        """
        self.count_step(step.bucket, sum(len(part.segments) for part in step.groups), len(step.groups) * step.bucket.batch)
        self.not_finite += failed
        self.encode_ms += took_ms
        if wanted is not None:
            self.count_degraded(wanted)

    def count_pictures(self, ledgers: Sequence[PictureLedger]) -> None:
        """Takes over what the ledgers of all dp groups have counted."""
        self.pictures = {
            "encoded_pictures_total": sum(ledger.encoded for ledger in ledgers),
            "picture_row_queries_total": sum(ledger.queries for ledger in ledgers),
            "picture_row_hits_total": sum(ledger.hits for ledger in ledgers),
            "picture_evictions_total": sum(ledger.evictions for ledger in ledgers),
            "picture_rows_pinned": sum(ledger.num_pinned for ledger in ledgers),
            "picture_rows_cached": sum(ledger.num_cached for ledger in ledgers),
        }

    def count_step(self, bucket: Bucket, live_rows: int, rows: int) -> None:
        """Counts a step that ran, with its rows, and the live ones, of all dp groups together."""
        self.bucket_steps[bucket.name] = self.bucket_steps.get(bucket.name, 0) + 1
        self.padded_rows += rows - live_rows

    def count_decode_batch(self, live_rows: int) -> None:
        """Counts a decode step by the live rows of the dp group that has most of them, which decide its bucket."""
        self.decode_batch_steps[live_rows] = self.decode_batch_steps.get(live_rows, 0) + 1

    def count_degraded(self, wanted: Bucket) -> None:
        """Counts a step that ran in another bucket because the one that it would have taken cannot run."""
        self.degraded_steps[wanted.name] = self.degraded_steps.get(wanted.name, 0) + 1

    def count_failure(self) -> None:
        """Counts a step that failed."""
        self.failed_steps += 1

    def count_verified(self, drafted: int, accepted: int, times: int = 1) -> None:
        """Counts rows of a decode step that each verified `drafted` drafts and accepted the first `accepted` of them."""
        self.verified_rows += times * (drafted > 0)
        self.drafted_tokens += times * drafted
        for position in range(accepted):
            self.accepted[position] += times

    def snapshot(self) -> dict[str, Any]:
        """A copy of all counters, by public name.

        `prompt_tokens_total` counts each prompt once, when the first token behind it is sampled, or would be. `generation_tokens_total`
        counts sampled tokens, including stop tokens. `prefix_cache_queries_total` counts the tokens of prompts that were looked up when
        they were first admitted, `prefix_cache_hits_total` those that had been computed before. Failed steps count in
        `steps_failed_total` and nowhere else.
        `requests_not_finite_total` counts requests that failed because the model returned what is no number.
        `discarded_rows_total` counts rows whose request had ended before the step's results were known. Drafts are counted as in
        vLLM: `spec_decode_num_drafts_total` is rows that verified drafts, `spec_decode_num_draft_tokens_total` the drafts they
        verified, `spec_decode_num_accepted_tokens_total` the accepted ones, and `spec_decode_num_accepted_tokens_per_pos` maps a
        draft's position in its row, from "0", to how often it was accepted. `degraded_steps` maps the name of a bucket that cannot run to
        how many steps ran in another one in its place. `decode_batch_steps` maps the live rows of the largest dp group to how many decode
        steps had them. `histograms` maps vLLM's names to those of `latencies`.

        Where graphs take pictures, `encoded_pictures_total` counts those that were encoded, and `encode_seconds_total` the time from the
        launches of their steps to their results; `picture_row_queries_total` counts the rows that admitted requests needed, and
        `picture_row_hits_total` those of them that were there; `picture_evictions_total` counts pictures whose rows went to others;
        `picture_rows_pinned` are in use now, and `picture_rows_cached` are kept for later requests.

        Where graphs tell experts, `experts` [L, E] says how often each of each layer was chosen, up to the last one that was.
        """
        return {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "requests_total": sum(self.finished.values()),
            **{f"requests_finished_{reason}": count for reason, count in self.finished.items()},
            "padded_rows_total": self.padded_rows,
            "discarded_rows_total": self.discarded_rows,
            "spec_decode_num_drafts_total": self.verified_rows,
            "spec_decode_num_draft_tokens_total": self.drafted_tokens,
            "spec_decode_num_accepted_tokens_total": sum(self.accepted),
            "spec_decode_num_accepted_tokens_per_pos": {str(position): count for position, count in enumerate(self.accepted)},
            "preemptions_total": self.preemptions,
            "prefix_cache_queries_total": self.prefix_queries,
            "prefix_cache_hits_total": self.prefix_hits,
            "steps_total": sum(self.bucket_steps.values()),
            "steps_failed_total": self.failed_steps,
            "requests_not_finite_total": self.not_finite,
            "bucket_steps": dict(sorted(self.bucket_steps.items())),
            "degraded_steps": dict(sorted(self.degraded_steps.items())),
            "decode_batch_steps": {str(rows): count for rows, count in sorted(self.decode_batch_steps.items())},
            **({**self.pictures, "encode_seconds_total": self.encode_ms / 1e3} if self.pictures else {}),
            **({} if self.experts is None else {EXPERTS: self.experts}),
            "histograms": self.latencies.snapshot(),
        }

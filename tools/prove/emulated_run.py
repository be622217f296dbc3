"""The emulated run: all ranks of a mesh execute a step trace on this machine, and their outputs are compared with the trace's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...graphs.errors import VerifyError
from ...graphs.ir.trace import signature_of
from ...graphs.ops.packed_latents import parts_of, with_rotary_in
from ...graphs.steps.table import kind_of
from ...graphs.types import Leaf, Mesh, Signature
from ...models import step
from ...models.head_padding import copies
from ..agreement.compare import live_values
from ..agreement.pools import holds_scales, is_paged, is_picture_pool, is_request_slots, request_slot_pool
from ..agreement.tolerances import SETTLED, AllowedDifferences, deviation
from .all_ranks import Outputs, Run, run_step
from .small_model import BucketCase, SmallModel, model_params
from .speculation import REQUEST_SLOTS, check_logprobs, check_request_slots, compare_drafts, same_draft_inputs
from .step_trace import ExpectedOutputs, StepTrace, TraceStep

States = tuple[list[torch.Tensor], ...]
"""State pools of every rank."""
Graphs = Mapping[BucketCase, tuple[Run, Signature]]

GARBAGE = 3.0
"""Standard deviation of the values in pages that nothing was written to. They are finite, because an NPU's attention multiplies some of
them by zero; unwritten slots hold NaN."""


MEDIAN_OF = 4
"""Results of which a median says something. A group that prefills one prompt has one result; it counts with those of the other groups."""


@dataclass(frozen=True)
class RankOutputs:
    """The outputs of all ranks.

    Attributes:
        steps: outputs of each rank by name, with its pool of request slots after the step, by number of the step.
        after: pools of each rank after the step.
    """

    steps: Mapping[int, tuple[Outputs, ...]]
    after: Mapping[int, States]


@dataclass(frozen=True)
class Ranks:
    """All ranks of a mesh with their shards of a small model.

    Attributes:
        leaves: state leaves, global.
        params: parameters of each rank.
    """

    small: SmallModel
    trace: StepTrace
    leaves: tuple[Leaf, ...]
    params: tuple[list[torch.Tensor], ...]

    @staticmethod
    def of(small: SmallModel, trace: StepTrace, checkpoint: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Ranks:
        """The ranks of the small model with that computing dtype."""
        model, rules = small.model_in(dtype), small.rules()
        signature = signature_of(step.program(model, small.cases[0].bucket, small.limits, dtype))
        whole = list(zip(model_params(model, checkpoint, dtype), signature.params, strict=True))
        params = [
            [tensor[rules.local_slice(leaf.aval, small.mesh, rank)].contiguous() for tensor, leaf in whole]
            for rank in range(small.mesh.size)
        ]
        return Ranks(small, trace, signature.state, tuple(params))

    def run(self, graphs: Graphs, numbers: Iterable[int] | None = None) -> RankOutputs:
        """Runs steps, by default all, each from what the trace has before it, whatever the ranks computed before.

        What rounds to integers may round the other way on several ranks; from there on states would differ, and no later step would say
        more than that.
        """
        steps, after = {}, {}
        for number in range(len(self.trace.steps)) if numbers is None else numbers:
            after[number] = tuple(self._pools(rank, self.trace.steps[number]) for rank in range(self.small.mesh.size))
            steps[number] = self._run_step(graphs, number, after[number])
        return RankOutputs(steps, after)

    def _run_step(self, graphs: Graphs, number: int, state: States) -> tuple[Outputs, ...]:
        trace_step = self.trace.steps[number]
        run, signature = graphs[trace_step.case]
        outputs = run_step(run, self.small.mesh, signature, self.params, state, trace_step.inputs)
        request_slots = request_slot_pool(self.leaves)
        return tuple({**own, REQUEST_SLOTS: pools[request_slots].clone()} for own, pools in zip(outputs, state, strict=True))

    def shard(self, pools: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """A rank's part of the reference's pools, with key-value heads repeated, and heads of zeros behind them, as the model has them."""
        mesh, rules, shards = self.small.mesh, self.small.rules(), []
        for leaf, pool in zip(self.leaves, pools, strict=True):
            pool = held(leaf, pool)
            heads = 1 if holds_scales(leaf) else 2
            times = min(copies(pool.shape[heads], mesh.axis("tp")), leaf.aval.shape[heads] // pool.shape[heads]) if is_paged(leaf) else 1
            repeated = pool.repeat_interleave(times, heads) if times > 1 else pool
            missing = [(0, wide - size) for wide, size in zip(leaf.aval.shape, repeated.shape, strict=True)]
            if any(count for _, count in missing):
                repeated = torch.nn.functional.pad(repeated, [count for pair in reversed(missing) for count in pair])
            shards.append(repeated[rules.local_slice(leaf.aval, mesh, rank)].to(leaf.aval.dtype, copy=True))
        return shards

    def _pools(self, rank: int, step: TraceStep) -> list[torch.Tensor]:
        """A rank's pools before a step, with garbage in pages that nothing was written to."""
        generator = torch.Generator().manual_seed(rank)
        pools = self.shard(step.before[self.group(rank)], rank)
        for leaf, pool in zip(self.leaves, pools, strict=True):
            if is_paged(leaf):
                garbage = (GARBAGE * torch.randn(pool.shape, generator=generator)).to(pool.dtype)
                pool.copy_(torch.where(torch.isnan(pool), garbage, pool))
        pools[request_slot_pool(self.leaves)].copy_(step.request_slots[self.group(rank)])
        return pools

    def group(self, rank: int) -> int:
        """Index of a rank's dp group."""
        return self.small.mesh.coordinates(rank)["dp"]

    def live_values(self, step: TraceStep, rank: int, pools: Sequence[torch.Tensor], resampled: Collection[int]) -> Iterator[torch.Tensor]:
        """What each of a rank's pools holds of requests after a step: [tokens or slots, ...]; the request slots hold nothing.

        Args:
            resampled: places of live rows that sampled another token, as they may; what a draft head cached of them is left out.
        """
        prefix = f"{self.small.model.family.draft_key}."
        for leaf, pool in zip(self.leaves, pools, strict=True):
            if is_picture_pool(leaf):
                yield pool
            elif is_request_slots(leaf):
                yield pool[:0]
            else:
                rows = [row for i, row in enumerate(step.rows[self.group(rank)]) if i not in resampled or not leaf.path.startswith(prefix)]
                yield torch.cat([values for row in rows for values in live_values(leaf, row, pool)] or [pool[:0]])


def check_against_trace(ranks: Ranks, actual: RankOutputs, allowed: AllowedDifferences, what: str) -> dict[str, float]:
    """Compares the outputs of all ranks with those of one device.

    The median difference of a rank's logits (see `MEDIAN_OF`) must be within `typical`, of chunks of prompts within `rounding`, as that of
    each pool's live rows; every logit within `worst`, and each pool within `state`. A greedy token, and a draft, must equal the trace's
    where its logit leads by more than the difference of the logits can explain. Counts and request slots must follow from the tokens and
    drafts of the rank itself.

    Returns:
        rows, logits_error, typical_error, state_error; the number of tokens and drafts that had to be equal; and token_mismatches and
        draft_mismatches among the others.

    Raises:
        VerifyError: naming the graphs, the step, the rank, the measure, its value and the largest legal one.
    """
    state_error, counts = 0.0, dict.fromkeys(("tokens", "token_mismatches", "drafts", "draft_mismatches"), 0)
    wrong_drafts: list[str] = []
    errors_of: dict[tuple[int, bool], torch.Tensor] = {}
    for rank in range(ranks.small.mesh.size):
        where = f"{what}, {_rank_name(rank, ranks.small.mesh)}"
        for number, outputs in actual.steps.items():
            key = rank, kind_of(ranks.trace.steps[number].case.bucket).decodes
            error = _check_step(ranks, number, rank, outputs[rank], allowed, counts, wrong_drafts, where)
            if error is not None:
                errors_of[key] = torch.cat([errors_of.get(key, error[:0]), error])
            state_error = max(state_error, _check_state(ranks, actual, number, rank, allowed, where))
    medians = dict.fromkeys((True, False), 0.0)
    for (rank, decodes), own in errors_of.items():
        all_groups = _of_all_groups(errors_of, rank, decodes, ranks.small.mesh)
        median = float((own if len(own) >= MEDIAN_OF else torch.cat(all_groups)).median())
        medians[decodes] = max(medians[decodes], median)
        legal, kind = (allowed.typical, "") if decodes else (allowed.rounding, " of prompts")
        _refuse(median, legal, f"{what}, {_rank_name(rank, ranks.small.mesh)}: half of all logits{kind}")
    if len(wrong_drafts) > allowed.drafts * (counts["drafts"] + len(wrong_drafts)):
        raise VerifyError(wrong_drafts[0])
    errors = torch.cat([*errors_of.values()])
    measured = {"rows": len(errors), "logits_error": float(errors.max()), "typical_error": medians[True] or medians[False]}
    return {name: float(value) for name, value in {**measured, "state_error": state_error, **counts}.items()}


def _of_all_groups(errors_of: Mapping[tuple[int, bool], torch.Tensor], rank: int, decodes: bool, mesh: Mesh) -> list[torch.Tensor]:
    """The errors of the ranks that stand where this one does in their dp groups, in steps that decode or not."""
    place = {**mesh.coordinates(rank), "dp": 0}
    return [errors for (other, kind), errors in errors_of.items() if kind == decodes and {**mesh.coordinates(other), "dp": 0} == place]


def _check_step(
    ranks: Ranks,
    number: int,
    rank: int,
    outputs: Outputs,
    allowed: AllowedDifferences,
    counts: dict[str, int],
    wrong_drafts: list[str],
    where: str,
) -> torch.Tensor | None:
    """Checks one step of one rank; returns the errors of its valid logits, or None where its group has no live row."""
    trace_step, group = ranks.trace.steps[number], ranks.group(rank)
    what = f"{where}, step {number} ({trace_step.case.bucket.name})"
    if (expected := trace_step.expected[group]) is None:
        check_request_slots(trace_step, group, outputs, what, room=ranks.small.limits.drafts)
        return None
    error = _errors(expected, outputs["logits"])
    _refuse(float(error.max()), allowed.worst, f"{what}: logits")
    compared = _compare_tokens(expected, outputs["tokens"], error, allowed.typical)
    if wrong := _count(counts, "token", expected, outputs["tokens"], compared, what):
        raise VerifyError(wrong)
    check_request_slots(trace_step, group, outputs, what, room=ranks.small.limits.drafts)
    if "drafts" in outputs:
        compared = compare_drafts(trace_step, group, outputs, error.amax(1), allowed.rounding)
        if wrong := _count(counts, "draft", expected, outputs["drafts"], compared, what):
            wrong_drafts.extend([wrong] * int((compared[1] & ~compared[0]).sum()))
    if ranks.small.max_logprobs:
        check_logprobs(expected, trace_step.inputs[group]["logprobs"], outputs, error.clamp(min=allowed.typical), what)
    return error[_valid(expected)]


def check_identical(ranks: Ranks, left: RankOutputs, right: RankOutputs, what: str) -> dict[str, float]:
    """Compares two graphs that do the same arithmetic, bit for bit: tokens of live rows, and all pools but what is null.

    Counts and drafts are compared too, because the request slots, which are a pool, contain them.

    Args:
        left: with every step that `right` has.

    Returns:
        Numbers of steps (as `turns`), tokens and state values compared.

    Raises:
        VerifyError: naming the step, the rank and both sides.
    """
    tokens = values = 0
    for number, outputs in right.steps.items():
        trace_step = ranks.trace.steps[number]
        for rank in range(ranks.small.mesh.size):
            where = f"{what}, {_rank_name(rank, ranks.small.mesh)}, step {number} ({trace_step.case.bucket.name})"
            if expected := trace_step.expected[ranks.group(rank)]:
                valid, rows = _valid(expected), list(expected.rows)
                ours, theirs = (each["tokens"][rows][valid].tolist() for each in (left.steps[number][rank], outputs[rank]))
                if ours != theirs:
                    raise VerifyError(f"{where}: tokens of rows {expected.rows} are {ours} and {theirs}; legal is no difference")
                tokens += len(ours)
            for leaf, pool, other in zip(ranks.leaves, left.after[number][rank], right.after[number][rank], strict=True):
                if not torch.equal(torch.nan_to_num(pool[1:]), torch.nan_to_num(other[1:])):
                    error = float((pool[1:].float() - other[1:].float()).nan_to_num(float("inf")).abs().max())
                    raise VerifyError(f"{where}: {leaf.name} differs by {error:.3g} or in what is NaN; legal is no difference")
                values += other[1:].numel()
    return {"turns": float(len(right.steps)), "tokens": float(tokens), "values": float(values)}


def held(leaf: Leaf, pool: torch.Tensor) -> torch.Tensor:
    """What a float32 run's pool holds, as a leaf of another computing dtype has it: rows of bytes have floats in them."""
    if pool.shape[-1] == leaf.aval.shape[-1] or (parts := parts_of(leaf.aval.axes[-1])) is None:
        return pool
    return with_rotary_in(pool, *parts)


def _valid(expected: ExpectedOutputs) -> torch.Tensor:
    """Which results of live rows count: [rows, W] bool."""
    return torch.arange(expected.tokens.shape[1])[None, :] < torch.tensor(expected.valid)[:, None]


def _errors(expected: ExpectedOutputs, logits: torch.Tensor) -> torch.Tensor:
    """Largest difference of each result's logits over the larger of 1 and its largest logit: [rows, W].

    Infinite where a logit is NaN, and 0 for results that do not count.
    """
    right, actual = expected.logits.float(), logits[list(expected.rows)].float()
    error = (right - actual).abs().amax(-1) / right.abs().amax(-1).clamp(min=1.0)
    return torch.where(_valid(expected), torch.where(torch.isnan(error), float("inf"), error), 0.0)


def _compare_tokens(
    expected: ExpectedOutputs, tokens: torch.Tensor, error: torch.Tensor, typical: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens equal the trace's or do not count, and which must equal it: [rows, W] bool each."""
    valid, logits = _valid(expected), expected.logits.float()
    best = logits.topk(2).values
    slack = 2 * error.clamp(min=typical) * logits.abs().amax(-1).clamp(min=1.0)
    greedy = torch.tensor(expected.greedy)[:, None]
    bound = torch.where(greedy, best[:, :, 0] - best[:, :, 1] > slack, error <= SETTLED)
    return (tokens[list(expected.rows)] == expected.tokens) | ~valid, bound & valid


def _count(
    counts: dict[str, int],
    kind: str,
    expected: ExpectedOutputs,
    actual: torch.Tensor,
    compared: tuple[torch.Tensor, torch.Tensor],
    what: str,
) -> str:
    """Counts values that had to be equal and are, and others that differ; returns what is wrong if some had to be equal and differ."""
    equal, bound = compared
    counts[f"{kind}s"] += int((bound & equal).sum())
    counts[f"{kind}_mismatches"] += int((~equal).sum())
    if bool((bound & ~equal).any()):
        right = (expected.tokens if kind == "token" else expected.drafts).tolist()
        return f"{what}: {kind}s of rows {expected.rows} are {actual[list(expected.rows)].tolist()}, one device's {right}"
    return ""


def _check_state(ranks: Ranks, actual: RankOutputs, number: int, rank: int, allowed: AllowedDifferences, where: str) -> float:
    """Checks a rank's state after a step; returns the largest `deviation` of a pool's live values."""
    step, group, largest = ranks.trace.steps[number], ranks.group(rank), 0.0
    expected, outputs = step.expected[group], actual.steps[number][rank]
    resampled = [place for place in range(len(expected.rows) if expected else 0) if not same_draft_inputs(step, group, place, outputs)]
    both = (ranks.live_values(step, rank, pools, resampled) for pools in (ranks.shard(step.after[group], rank), actual.after[number][rank]))
    for leaf, left, right in zip(ranks.leaves, *both, strict=True):
        if not left.numel():
            continue
        error, what = deviation([(left, right)]), f"{where}, step {number} ({step.case.bucket.name}): "
        _refuse(error, allowed.state, f"{what}{leaf.name}")
        rows = (left.float() - right.float()).flatten(1).abs().amax(1) / left.float().abs().max().clamp(min=1.0)
        _refuse(float(rows.median()), allowed.rounding, f"{what}half of {leaf.name}")
        largest = max(largest, error)
    return largest


def _refuse(value: float, limit: float, what: str) -> None:
    if not value <= limit:
        raise VerifyError(f"{what} differ by {value:.3g} from one device's; legal is at most {limit:.3g}")


def _rank_name(rank: int, mesh: Mesh) -> str:
    """`rank 3 (dp 1, tp 1)`."""
    return f"rank {rank} ({', '.join(f'{name} {at}' for name, at in mesh.coordinates(rank).items())})"

"""The layouts that a search tries: every way that a build can spread a model over so many NPUs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ....models.quant.description import formats_in
from ....models.quant.formats import W4A8_DYNAMIC, W4A16
from ....models.registry import ModelSource
from ...builder.deployments import Deployment, deployments
from ...builder.settings.model import MAX_DRAFTS
from .acceptance import accepted_of, spread_of
from .memory import fixed_bytes, request_bytes, token_bytes
from .published import machine_of
from .shape import Shape
from .system import LoadCase, PlannedLayout, PlannedMachine, PlannedServing, Scheme, System, Workload
from .traffic import share

FRACTION = 0.8
"""Of the usable memory, for weights and pools: what is left takes activations, workspaces and communication of published builds."""
CHUNKS = (1024, 2048, 4096, 8192)
DRAFTS = (0, 1, 2, 3)
LIMITS = (1.0, 0.75, 0.5, 0.25)
"""Shares of the requests in flight that run at once; the others wait, which a target for the time per token may need."""
_MULTIPLE = 128


@dataclass(frozen=True)
class Question:
    """What a search is asked.

    Attributes:
        npus: ranks of all instances.
        tpot_ms, ttft_ms: targets; None for none.
        itl_target_ms: of the servers (`PlannedServing`); None leaves it to the search.
        schemes: quantisations to try.
        drafts: k to try; None tries `DRAFTS`.
        accepted: tokens a step; None takes published rows'.
        stored: whether the checkpoint is quantised already, in the one scheme of these: a build takes its formats, and is told none.
    """

    model: str
    shape: Shape
    target: str
    npus: int
    workload: Workload
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    schemes: tuple[str, ...] = ("w8a8",)
    drafts: tuple[int, ...] | None = None
    accepted: float | None = None
    itl_target_ms: float | None = None
    stored: bool = False


@dataclass(frozen=True)
class Candidate:
    """A case, and what builds it.

    Attributes:
        deployment: published row whose launch a build inherits what no option says from: experts that are split, and phases.
        share: of the workload that one instance gets is one in so many.
    """

    case: LoadCase
    scheme: str
    share: int
    deployment: str = ""

    @property
    def label(self) -> str:
        """What tells it from others."""
        case, system = self.case, self.case.decode
        text = f"{system.layout} {self.scheme}"
        if case.prefill is not None:
            text += f", prefill {case.prefill.layout}"
        if system.shape.experts and not system.layout.spread and system.layout.ranks > 1:
            text += ", experts split"
        text = f"{text}, {system.drafts} drafts, chunk {self.chunk}x{self.prompts}, {case.serving.max_running} a group"
        target_ms = case.serving.itl_target_ms
        return text if target_ms is None else f"{text}, gaps of {target_ms:g} ms"

    @property
    def chunk(self) -> int:
        serving = self.case.prefill_serving or self.case.serving
        return serving.chunk or serving.budget

    @property
    def prompts(self) -> int:
        return (self.case.prefill_serving or self.case.serving).prompts


def schemes_of(model: str) -> tuple[str, ...]:
    """Quantisations that published rows of a model have, w8a8 without any."""
    return tuple(dict.fromkeys(row.quantization for row in deployments().values() if row.model == model)) or ("w8a8",)


def stored_scheme(source: ModelSource) -> str | None:
    """The scheme nearest to the formats of a quantised checkpoint; None for one of floats, or a preset.

    Raises:
        CheckpointError: its description cannot be read.
    """
    formats = formats_in(source.checkpoint_dir) if source.checkpoint_dir else None
    if formats is None or not formats.quantises:
        return None
    forms = {form for _, form in formats.rules}
    return next((name for form, name in ((W4A8_DYNAMIC, "w4a8"), (W4A16, "w4a16")) if form in forms), "w8a8")


def candidates(question: Question) -> Iterator[Candidate]:
    """All candidates whose weights and at least one request fit; others are not worth a name."""
    machine = machine_of(question.target)
    chunks = _chunks(question.workload)
    for scheme, drafts in itertools.product(question.schemes, _drafts(question)):
        for layout, row in layouts(question, machine):
            system = System(question.shape, Scheme.named(scheme, "bf16"), layout, machine, drafts)
            yield from _mixed(question, system, scheme, chunks, row)
        for prefill, decode, row in _split_layouts(question, machine):
            yield from _disaggregated(question, prefill, decode, scheme, drafts, machine, min(chunks[-1], 4096), row)


def layouts(question: Question, machine: PlannedMachine, npus: int | None = None) -> Iterator[tuple[PlannedLayout, str]]:
    """Every legal split of the NPUs into instances, groups and ranks, and the row that a build of it names."""
    npus = npus or question.npus
    split_row = _row(question, lambda row: row.phase().ep == 1 and "mixed" in row.phases)
    for ranks in _divisors(npus):
        for tp in _divisors(ranks):
            if not legal_tp(question.shape, tp, ranks, machine):
                continue
            layout = PlannedLayout(ranks // tp, tp, ranks > 1 and question.shape.experts > 0, instances=npus // ranks)
            if not question.shape.experts or question.shape.experts % ranks == 0:
                yield layout, ""
            if question.shape.experts and ranks > 1 and layout.dp == 1 and split_row and question.shape.expert_width % tp == 0:
                yield replace(layout, spread=False), split_row.id


def legal_tp(shape: Shape, tp: int, ranks: int, machine: PlannedMachine) -> bool:
    """Whether heads divide by a group, and a group does not straddle nodes in a way that a build refuses."""
    heads = [shape.heads, *((shape.linear.key_heads, shape.linear.value_heads) if shape.linear else ())]
    kv_heads = [shape.kv_heads, *((shape.draft.kv_heads,) if shape.draft else ())]
    if any(count % tp for count in heads):
        return False
    if shape.latent is None and any(max(tp, count) % min(tp, count) for count in kv_heads):
        return False
    node = machine.npu.npus_per_node
    if tp > node:
        return machine.npu.node_link_bytes_per_s == machine.npu.link_bytes_per_s and tp % node == 0
    return ranks <= node or node % tp == 0


def _split_layouts(question: Question, machine: PlannedMachine) -> Iterator[tuple[PlannedLayout, PlannedLayout, str]]:
    """Instances that prefill and one that decodes, for models with a published split, which a build takes its phases from."""
    row = _row(question, lambda row: "prefill" in row.phases)
    if row is None:
        return
    node = machine.npu.npus_per_node
    for ranks in _divisors(question.npus):
        decode_npus = question.npus - ranks
        if ranks == question.npus or decode_npus % node or ranks % node:
            continue
        for instances in _divisors(ranks // node):
            own = ranks // instances
            for tp in (8, 4, 1):
                if not legal_tp(question.shape, tp, own, machine) or question.shape.experts % own:
                    continue
                prefill = PlannedLayout(own // tp, tp, question.shape.experts > 0, instances=instances)
                for decode_tp in (1, 2, 4, 8):
                    if legal_tp(question.shape, decode_tp, decode_npus, machine) and question.shape.experts % decode_npus == 0:
                        yield prefill, PlannedLayout(decode_npus // decode_tp, decode_tp, question.shape.experts > 0), row.id


def _mixed(question: Question, system: System, scheme: str, chunks: Sequence[int], row: str) -> Iterator[Candidate]:
    layout = system.layout
    work = share(question.workload, layout.instances)
    single = replace(system, layout=replace(layout, instances=1))
    accepted, why = _accepted(question, system.drafts)
    spread = spread_of(question.model, accepted)
    for running, chunk, prompts in itertools.product(_limits(system, work), chunks, (1, 4)):
        if prompts <= max(running, 1):
            tokens = running * request_tokens(system, work)
            serving = PlannedServing("npucompile", running, chunk * prompts, chunk, prompts, memory_fraction=FRACTION, max_tokens=tokens)
            serving = replace(serving, itl_target_ms=question.itl_target_ms)
            yield Candidate(LoadCase(single, serving, work, accepted, spread, assumed=why), scheme, layout.instances, row)


def _limits(system: System, work: Workload) -> list[int]:
    """Requests of a group that may run at once."""
    each, most = work.concurrency / system.layout.dp, fitting(system, work)
    return sorted({min(math.ceil(each * part), most) for part in LIMITS} - {0}, reverse=True) if most > 0 else []


def _disaggregated(
    question: Question,
    prefill: PlannedLayout,
    decode: PlannedLayout,
    scheme: str,
    drafts: int,
    machine: PlannedMachine,
    chunk: int,
    row: str,
) -> Iterator[Candidate]:
    work, weights = question.workload, Scheme.named(scheme, "bf16")
    system = System(question.shape, weights, decode, machine, drafts)
    first = System(question.shape, weights, prefill, machine, drafts)
    if fitting(first, work) < 1:
        return
    accepted, why = _accepted(question, drafts)
    for running in _limits(system, work):
        tokens = running * request_tokens(system, work)
        serving = PlannedServing("npucompile", running, chunk, chunk, 1, memory_fraction=FRACTION, max_tokens=tokens)
        prefill_serving = PlannedServing("npucompile", 4, max(chunk, max(work.inputs)), chunk, 1, memory_fraction=FRACTION)
        case = LoadCase(system, serving, work, accepted, spread_of(question.model, accepted), first, prefill_serving, why)
        yield Candidate(case, scheme, 1, row)


def request_tokens(system: System, work: Workload) -> int:
    """Tokens that the longest request caches, in whole pages; a build has as many for each that runs."""
    longest = max(i + o for i, o in zip(work.inputs, work.outputs, strict=True)) + 2 * system.candidates
    return -(-longest // _MULTIPLE) * _MULTIPLE


def fitting(system: System, work: Workload) -> int:
    """Requests of a group that fit at full length, in pages of 128 tokens."""
    pages = request_tokens(system, work)
    free = FRACTION * system.machine.npu.usable_hbm_bytes - sum(fixed_bytes(system).values())
    return int(free // (pages * token_bytes(system) + request_bytes(system)))


def _chunks(work: Workload) -> Sequence[int]:
    """Prefill sizes: parts of the longest prompt that are padded least, in multiples of 128."""
    longest = max(work.inputs)
    sizes = {min(chunk, -(-longest // _MULTIPLE) * _MULTIPLE) for chunk in CHUNKS}
    counts = {math.ceil(longest / size) for size in sizes}
    return sorted({math.ceil(longest / count / _MULTIPLE) * _MULTIPLE for count in counts})


def _drafts(question: Question) -> tuple[int, ...]:
    if question.shape.draft is None:
        return (0,)
    return tuple(k for k in question.drafts or DRAFTS if k <= MAX_DRAFTS)


def _accepted(question: Question, drafts: int) -> tuple[float, tuple[str, ...]]:
    if not drafts:
        return 1.0, ()
    if question.accepted is not None:
        return min(question.accepted, drafts + 1.0), ()
    work = question.workload
    accepted, why = accepted_of(question.model, drafts, work.mean_input, work.mean_output, None)
    return accepted, (why,)


def _row(question: Question, wanted: Callable[[Deployment], bool]) -> Deployment | None:
    rows = (row for row in deployments().values() if row.model == question.model and row.target == question.target and row.phases)
    return next((row for row in rows if wanted(row)), None)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]

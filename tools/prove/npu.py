"""The proof, on any machine, that an artifact for NPUs computes on all ranks what its model computes on one device.

The artifact itself cannot run here. What is visible on disk is checked there (shipped.py). The rest is proved of a small model with the
same structure (small_model.py): its layers are spread over the same mesh, lowered, converted and linked by the same code, and then run
on all ranks by emulators (emulated_run.py) and compared with the unsharded reference (step_trace.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...graphs.errors import GraphError, LoweringError, VerifyError
from ...graphs.ops.packed_latents import parts_of
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import PartitionedProgram, partition
from ...graphs.steps.table import kind_of
from ...graphs.types import DTYPES, Bucket, Leaf, Signature
from ...lowering.artifact.artifact import Artifact
from ...lowering.ascend.emulator.interpreter import Interpreter
from ...lowering.ascend.shipped import ENCODINGS, ShippedGraph
from ...lowering.backend import backend
from ...lowering.lower import LoweredProgram
from ...lowering.platform import CPU, Platform
from ...models import step
from ..agreement.tolerances import FLOAT, QUANTISED, QUANTISED_LATENTS, AllowedDifferences
from ..builder.pool import rewriting
from ..builder.targets import target
from ..progress import Progress, quiet_torch
from . import shipped as verify_shipped
from .emulated_run import Ranks, check_against_trace, check_identical
from .encode import small_bucket, verify_small
from .small_model import BucketCase, SmallModel, random_checkpoint, shrink
from .speculation import first_position
from .step_trace import StepTrace, TraceStep, record_trace

DEFAULT_STEPS = 3
Measured = dict[str, dict[str, float]]
F32 = torch.float32


def is_for_device(artifact: Artifact) -> bool:
    """Whether an artifact was built for NPUs."""
    return not target(artifact.manifest.target).local


def verify_device(artifact: Artifact, cache_dir: Path, progress: Progress, *, steps: int = DEFAULT_STEPS, seed: int = 0) -> Measured:
    """Proves an artifact for NPUs; returns measurements by the name of the check.

    Args:
        cache_dir: directory that lowering keeps between builds.
        steps: decode steps of every decode bucket of the small model.
        seed: seed of weights, prompts and drafts.

    Raises:
        VerifyError: naming the check, both sides and what is legal.
        LoweringError: this machine cannot lower for NPUs, saying what is missing.
    """
    chosen = backend(artifact.manifest.backend)
    if reason := chosen.compiles_here():
        raise LoweringError(reason)
    threads = torch.get_num_threads()
    try:
        # Values of a small model are so few that a second thread gains nothing, and where others work it waits for a core at each operator.
        torch.set_num_threads(1)
        with quiet_torch():
            cache_dir.mkdir(parents=True, exist_ok=True)
            chosen.prepare(cache_dir)
            return _Proof(artifact, cache_dir, progress, steps, seed).run()
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class BuiltCase:
    """A case's graph after each stage: partitioned, lowered to NPU operators, and as its backend ships it, read back from its file."""

    partitioned: PartitionedProgram
    lowered: LoweredProgram
    shipped: ShippedGraph | None

    @property
    def signature(self) -> Signature:
        """Calling convention of the lowered and the shipped graph."""
        return self.lowered.signature


class _Proof:
    def __init__(self, artifact: Artifact, cache_dir: Path, progress: Progress, steps: int, seed: int) -> None:
        self.artifact, self.cache_dir, self.progress = artifact, cache_dir, progress
        self.seed = seed
        self.small = shrink(artifact.manifest, steps)
        variant = self.small.model.config.variant
        self.quantised = variant.formats.rounds
        self.measured: Measured = {}

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[dict[str, float]]:
        """One named check, which fills the mapping it gets with measurements; an error of a graph fails the check."""
        measured: dict[str, float] = {}
        try:
            yield measured
        except GraphError as error:
            raise VerifyError(f"{name}: {error}") from error
        self.measured[name] = measured
        self.bar.step(f"{name} {describe(measured)}")

    def run(self) -> Measured:
        manifest = self.artifact.manifest
        encodes = [entry for entry in manifest.graphs if kind_of(entry.bucket).tower]
        checks = 6 + len(manifest.graphs) + len(encodes) + len(self.small.cases) + (not self.quantised)
        with self.progress.bar("verify", checks) as self.bar:
            with self.check("manifest") as measured:
                measured |= verify_shipped.check_manifest(manifest)
            for entry in manifest.graphs:
                with self.check(f"{entry.bucket.name} shipped") as measured:
                    measured |= verify_shipped.check_entry(self.artifact, entry)
            proved: dict[Bucket, dict[str, float]] = {}
            for entry in encodes:
                with self.check(f"{entry.bucket.name} small") as measured:
                    if (small := small_bucket(entry)) not in proved:
                        proved[small] = verify_small(manifest, small, self.cache_dir)
                    measured |= proved[small]
            with self.check("ranks") as measured:
                measured |= verify_shipped.check_patched(self.artifact)
            self.check_small_model()
        return self.measured

    def check_small_model(self) -> None:
        """All checks that run the small model."""
        small, generator = self.small, torch.Generator().manual_seed(self.seed)
        with self.check("small model") as measured:
            checkpoint = random_checkpoint(small.model, generator)
            trace = record_trace(small, checkpoint, generator)
            measured |= _sizes(small, trace)
        ranks = Ranks.of(small, trace, checkpoint, F32)
        allowed = allowed_differences(ranks.leaves, self.quantised)
        with self.check("lowered f32") as measured:
            # torchair converts integer products to 16-bit types only, so quantised graphs are converted in the artifact's dtype alone.
            graphs = {case: self.build(small, case, F32, emit_logits=True, convert=not self.quantised) for case in small.cases}
            outputs = ranks.run(emulators(small, graphs))
            measured |= check_against_trace(ranks, outputs, allowed, "lowered f32")
        if not self.quantised:
            with self.check(f"{self.form} f32") as measured:
                measured |= check_against_trace(ranks, ranks.run(interpreters(small, graphs)), allowed, f"{self.form} f32")
        with self.check("lowered f32, logits in shares") as measured:
            sharded = {case: self.build(small, case, F32, emit_logits=False, convert=False) for case in small.cases}
            sharded_outputs = ranks.run(emulators(small, sharded), representative_steps(trace))
            measured |= check_identical(ranks, outputs, sharded_outputs, "lowered f32, logits whole and in shares")
        self.check_shipped_form(small, Ranks.of(small, trace, checkpoint, self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Computing dtype of the artifact."""
        return DTYPES[self.artifact.manifest.dtype]

    @property
    def form(self) -> str:
        """What the shipped graphs are called."""
        return "GE" if self.artifact.manifest.backend == "ge" else self.artifact.manifest.backend

    def check_shipped_form(self, small: SmallModel, ranks: Ranks) -> None:
        """In the form and dtype of the artifact, the shipped graph does bit for bit what the lowered graph does."""
        name, graphs = self.artifact.manifest.dtype, {}
        for case in small.cases:
            with self.check(f"{case.bucket.name} small") as measured:
                graphs[case] = built = self.build(small, case, self.dtype, emit_logits=False, convert=True)
                assert built.shipped is not None
                measured |= verify_shipped.check_small_bucket(self.artifact, case, built.partitioned, built.shipped)
        with self.check(f"{self.form} {name} as lowered") as measured:
            lowered = ranks.run(emulators(small, graphs), numbers := representative_steps(ranks.trace))
            # GE respects data and control edges and no other order, so the order furthest from the file's must give the same.
            shipped = ranks.run(interpreters(small, graphs, order="reversed-ready"), numbers)
            measured |= check_identical(ranks, lowered, shipped, f"{self.form} {name} against lowered {name}")

    def build(self, small: SmallModel, case: BucketCase, dtype: torch.dtype, *, emit_logits: bool, convert: bool) -> BuiltCase:
        """A case's graph through the pipeline of a build."""
        with rewriting():
            return self._build(small, case, dtype, emit_logits, convert)

    def _build(self, small: SmallModel, case: BucketCase, dtype: torch.dtype, emit_logits: bool, convert: bool) -> BuiltCase:
        chosen = backend(self.artifact.manifest.backend)
        model, max_logprobs = small.model_for(case, dtype), small.max_logprobs
        program = step.program(model, case.bucket, small.limits, dtype, emit_logits=emit_logits, max_logprobs=max_logprobs)
        partitioned = optimise(partition(program, small.mesh, small.rules(case)))
        platform = Platform.of(self.artifact.manifest.platform)
        lowered = chosen.lower(partitioned, platform)
        if not convert:
            return BuiltCase(partitioned, lowered, None)
        compiled = chosen.compile(lowered, cache_dir=self.cache_dir, threads=0)
        # A graph in another dtype than the artifact's is made to be compared, and no device takes it.
        chosen.prove(compiled, partitioned, platform if dtype == DTYPES[self.artifact.manifest.dtype] else CPU)
        return BuiltCase(partitioned, lowered, ENCODINGS[chosen.name].decode(compiled.data))


def allowed_differences(state: Iterable[Leaf], quantised: bool) -> AllowedDifferences:
    """How far ranks may differ from one device, by the pools of the model and whether its products read int8 activations."""
    if not quantised:
        return FLOAT
    return QUANTISED_LATENTS if any(parts_of(leaf.aval.axes[-1]) for leaf in state) else QUANTISED


def representative_steps(trace: StepTrace) -> tuple[int, ...]:
    """For every case the fullest step, of those with cached tokens if there are any, and for every decode case its last step."""
    numbers: set[int] = set()
    for case in {trace_step.case for trace_step in trace.steps}:
        of_case = [i for i, trace_step in enumerate(trace.steps) if trace_step.case == case]
        numbers |= {max(of_case, key=lambda i: _fullness(trace.steps[i])), *(of_case[-1:] if kind_of(case.bucket).decodes else ())}
    return tuple(sorted(numbers))


def _fullness(trace_step: TraceStep) -> tuple[bool, int]:
    """Whether a row has cached tokens, and the number of results that count."""
    live = [(group, expected) for group, expected in enumerate(trace_step.expected) if expected]
    cached = any(first_position(trace_step, group, row) for group, expected in live for row in expected.rows)
    return cached, sum(sum(expected.valid) for _, expected in live)


def emulators(small: SmallModel, graphs: Mapping[BucketCase, BuiltCase]) -> dict[BucketCase, tuple[Interpreter, Signature]]:
    """Runners of each case's lowered graph on all ranks."""
    return {case: (Interpreter(built.lowered.graph, small.mesh), built.signature) for case, built in graphs.items()}


def interpreters(
    small: SmallModel, graphs: Mapping[BucketCase, BuiltCase], order: str = "file"
) -> dict[BucketCase, tuple[Interpreter, Signature]]:
    """Runners of each case's shipped graph on all ranks, with the operators of a GE graph in an order that GE may choose."""
    runners = {}
    for case, built in graphs.items():
        assert built.shipped is not None, case
        orders = {} if built.shipped.ordered else {"order": order}
        runners[case] = Interpreter(built.shipped, small.mesh, **orders), built.signature
    return runners


def describe(measured: Mapping[str, float]) -> str:
    """`rows 12, logits_error 1.25e-06`."""
    return ", ".join(f"{name} {value:.0f}" if value == int(value) else f"{name} {value:.3g}" for name, value in measured.items())


def _sizes(small: SmallModel, trace: StepTrace) -> dict[str, float]:
    config, live = small.model.config, [expected for trace_step in trace.steps for expected in trace_step.expected if expected]
    sizes = {"ranks": small.mesh.size, "layers": len(config.layer_kinds), "experts": config.num_experts}
    return {**sizes, "buckets": len(small.cases), "steps": len(trace.steps), "results": sum(sum(expected.valid) for expected in live)}

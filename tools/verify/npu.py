"""Turns an artifact for NPUs into a proof, on any machine, that its pipeline means on all ranks what the model means on one device.

The artifact itself runs nowhere here. What can be seen of it is checked as it lies on disk (verify_shipped.py). What cannot is proved
of a small model in its image (scaled.py): the same layers on the same mesh, held, exchanged, lowered, converted and linked by the
same code, and run here for all ranks against the unsharded reference (rehearse.py, replay.py).
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...graphs.errors import GraphError, VerifyError
from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import Partitioned, partition
from ...graphs.types import DTYPES, Signature
from ...lowering.artifact.artifact import Artifact
from ...lowering.ascend.emulator.emulator import RankEmulator
from ...lowering.ascend.emulator.ge_interpreter import GeInterpreter
from ...lowering.ascend.ge_file import GeFile, decode
from ...lowering.backend import backend
from ...lowering.lower import Lowered
from ...models import step
from ..build.targets import TARGETS, target
from ..progress import Progress
from . import shipped as verify_shipped
from .emulated_run import Allowed, Cast, Heard, against_each_other, against_script
from .small_model import Case, Scaled, draw, scaled
from .speculation import start
from .step_trace import Script, Turn, rehearse

DEFAULT_STEPS = 3
Measured = dict[str, dict[str, float]]
F32 = torch.float32

FLOAT = Allowed(typical=1e-4, worst=5e-3, state=1e-2)
"""Of float32 graphs without integers. Ranks add in another order than one device: half of the logits were seen to differ by less than
3e-6, single ones by up to 1e-4 (ten seeds, 16 ranks). A router that is undecided between two experts within that noise, of which there is
one in some 1e4 tokens, would put one token of a prompt off by more: `worst` leaves room for what later tokens see of it."""

QUANTISED = Allowed(typical=1e-2, worst=0.25, state=0.1)
"""Of float32 graphs with int8 activations. A sum in another order moves a value across a rounding step once in some thousand values;
that is 1/127 of a row's largest value, in a row. Half of the logits were seen to differ by less than 2e-3, single ones by up to 2e-2 and
pools by 1e-2 (twelve seeds). One such step may also decide between two experts, and then a token is off by what an expert weighs, which
is why single logits are allowed a quarter. A wrong scale, expert or assist moves every row by more than `typical`."""


def is_for_device(artifact: Artifact) -> bool:
    """Whether an artifact is for NPUs."""
    name = artifact.manifest.target
    return name in TARGETS and target(name).backend == "ge"


def verify_device(artifact: Artifact, cache_dir: Path, progress: Progress, *, steps: int = DEFAULT_STEPS, seed: int = 0) -> Measured:
    """Proves an artifact for NPUs; returns what was measured, by check.

    Args:
        cache_dir: what lowering keeps between builds.
        steps: decode steps of every form of bucket.
        seed: of weights, prompts and drafts.

    Raises:
        VerifyError: naming the check, both sides and what is legal.
        LoweringError: this machine cannot lower for NPUs, saying what is missing.
    """
    made = backend("ge")
    made.check_target()
    with _quiet(), tempfile.TemporaryDirectory(prefix="npucompile-verify-") as scratch:
        cache_dir.mkdir(parents=True, exist_ok=True)
        made.prepare(cache_dir)
        return _Proof(artifact, Path(scratch), cache_dir, progress, steps, seed).run()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps to themselves what tracing and torchair say to their developers."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Built:
    """A case's graph, step by step: one device's, in operators of the NPU, and as GE takes it, read back from its bytes."""

    partitioned: Partitioned
    lowered: Lowered
    ge_file: GeFile | None

    @property
    def signature(self) -> Signature:
        return self.lowered.signature


class _Proof:
    def __init__(self, artifact: Artifact, scratch: Path, cache_dir: Path, progress: Progress, steps: int, seed: int) -> None:
        self.artifact, self.scratch, self.cache_dir, self.progress = artifact, scratch, cache_dir, progress
        self.seed = seed
        self.small = scaled(artifact.manifest, steps)
        variant = self.small.model.config.variant
        self.quantised = variant.attention != "plain" or variant.experts not in ("plain", "grouped")
        self.found: Measured = {}

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[dict[str, float]]:
        """One check: what it measured goes into the mapping it is given; what a graph cannot do fails it by name."""
        measured: dict[str, float] = {}
        try:
            yield measured
        except GraphError as error:
            raise VerifyError(f"{name}: {error}") from error
        self.found[name] = measured
        self.bar.step(f"{name} {describe(measured)}")

    def run(self) -> Measured:
        manifest = self.artifact.manifest
        checks = 6 + len(manifest.graphs) + len(self.small.cases) + (not self.quantised)
        with self.progress.bar("verify", checks) as self.bar:
            with self.check("manifest") as measured:
                measured |= verify_shipped.check_manifest(manifest)
            for entry in manifest.graphs:
                with self.check(f"{entry.bucket.name} shipped") as measured:
                    measured |= verify_shipped.check_entry(self.artifact, entry)
            with self.check("ranks") as measured:
                measured |= verify_shipped.check_patched(self.artifact)
            self.rehearse()
        return self.found

    def rehearse(self) -> None:
        """All that is proved of the small model."""
        small, generator = self.small, torch.Generator().manual_seed(self.seed)
        with self.check("small model") as measured:
            checkpoint = draw(small.model, generator)
            script = rehearse(small, checkpoint, generator)
            measured |= _told(small, script)
        cast, allowed = Cast.of(small, script, checkpoint, F32), QUANTISED if self.quantised else FLOAT
        with self.check("lowered f32") as measured:
            # torchair gives integer products in 16 bits only: a quantised graph is converted in the artifact's own type alone.
            whole = {case: self.build(small, case, F32, emit_logits=True, convert=not self.quantised) for case in small.cases}
            heard = cast.replay(lockstep(small, whole), keep=excerpts(script))
            measured |= against_script(cast, heard, allowed, "lowered f32")
        if not self.quantised:
            with self.check("GE f32") as measured:
                measured |= against_script(cast, cast.replay(interpreted(small, whole)), allowed, "GE f32")
        with self.check("lowered f32, logits in shares") as measured:
            sampled = {case: self.build(small, case, F32, emit_logits=False, convert=False) for case in small.cases}
            shared = cast.excerpt(lockstep(small, sampled), heard.before)
            measured |= against_each_other(cast, heard, shared, "lowered f32, logits whole and in shares")
        self.as_shipped(small, Cast.of(small, script, checkpoint, self.dtype), heard)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.artifact.manifest.dtype]

    def as_shipped(self, small: Scaled, cast: Cast, heard: Heard) -> None:
        """The graphs in the form and type of the artifact: what GE is given does, bit for bit, what was lowered."""
        name, graphs = self.artifact.manifest.dtype, {}
        for case in small.cases:
            with self.check(f"{case.bucket.name} small") as measured:
                graphs[case] = one = self.build(small, case, self.dtype, emit_logits=False, convert=True)
                assert one.ge_file is not None
                measured |= verify_shipped.check_likeness(self.artifact, case, one.partitioned, one.ge_file)
        with self.check(f"GE {name} as lowered") as measured:
            lowered = cast.excerpt(lockstep(small, graphs), heard.before)
            # GE keeps to data and control edges and to nothing else, so the order furthest from the file's must do the same.
            shipped = cast.excerpt(interpreted(small, graphs, order="reversed-ready"), heard.before)
            measured |= against_each_other(cast, lowered, shipped, f"GE {name} against lowered {name}")

    def build(self, small: Scaled, case: Case, dtype: torch.dtype, *, emit_logits: bool, convert: bool) -> Built:
        """A case's graph by the pipeline of a build."""
        made, out = backend("ge"), self.scratch / "graph.ge"
        held, told = small.held(case, dtype), small.max_logprobs
        program = step.program(held, case.bucket, small.limits, dtype, emit_logits=emit_logits, max_logprobs=told)
        partitioned = optimise(partition(program, small.mesh, small.rules(case)))
        lowered = made.lower(partitioned)
        if not convert:
            return Built(partitioned, lowered, None)
        assert made.compile is not None
        made.compile(lowered.graph, lowered.signature, out, cache_dir=self.cache_dir, threads=0)
        return Built(partitioned, lowered, decode(out.read_bytes()))


def excerpts(script: Script) -> tuple[int, ...]:
    """Turns that stand for all: of every case the fullest in which a row goes on behind tokens it has, and the last that decodes."""
    chosen: set[int] = set()
    for case in {turn.case for turn in script.turns}:
        numbers = [i for i, turn in enumerate(script.turns) if turn.case == case]
        chosen |= {max(numbers, key=lambda i: _fullness(script.turns[i])), *(numbers[-1:] if case.form.kind == "decode" else ())}
    return tuple(sorted(chosen))


def _fullness(turn: Turn) -> tuple[bool, int]:
    """Whether a row has tokens already, and live results."""
    live = [(group, one) for group, one in enumerate(turn.expected) if one]
    return any(start(turn, group, row) for group, one in live for row in one.rows), sum(sum(one.valid) for _, one in live)


def lockstep(small: Scaled, graphs: Mapping[Case, Built]) -> dict[Case, tuple[RankEmulator, Signature]]:
    """What runs each case's lowered graph on all ranks."""
    return {case: (RankEmulator(one.lowered.graph, small.mesh), one.signature) for case, one in graphs.items()}


def interpreted(small: Scaled, graphs: Mapping[Case, Built], order: str = "file") -> dict[Case, tuple[GeInterpreter, Signature]]:
    """What runs each case's GE graph on all ranks, in an order that GE may choose."""
    made = {case: GeInterpreter(one.ge_file, small.mesh, order=order) for case, one in graphs.items() if one.ge_file}
    return {case: (run, graphs[case].signature) for case, run in made.items()}


def describe(measured: Mapping[str, float]) -> str:
    """`rows 12, logits_error 1.25e-06`."""
    return ", ".join(f"{name} {value:.0f}" if value == int(value) else f"{name} {value:.3g}" for name, value in measured.items())


def _told(small: Scaled, script: Script) -> dict[str, float]:
    config, live = small.model.config, [one for turn in script.turns for one in turn.expected if one]
    sizes = {"ranks": small.mesh.size, "layers": len(config.layer_types), "experts": config.num_experts}
    return {**sizes, "buckets": len(small.cases), "steps": len(script.turns), "results": sum(sum(one.valid) for one in live)}

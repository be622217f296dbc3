"""The rungs of a bring-up, in order; each adds one thing to those before. Processes of their own have the device, this one has none."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ....lowering.artifact.artifact import Artifact
from ....lowering.ascend.acl_graph.file import AclFile
from ....lowering.ascend.cost.estimate import estimate
from ....lowering.ascend.cost.parameters import parameters
from ....lowering.ascend.ge_file import GeFile
from ....lowering.ascend.toolchain.harness import installed
from ....lowering.platform import Platform
from ....lowering.toolchain import toolchain
from ....runtime.device_params import LoadParams
from ....runtime.distributed.rendezvous import RendezvousConfig
from ...builder.targets import target
from ...inspection.cost import chip_of, step_cost
from ...progress import Progress
from ...ranks.executors import params_of, without_buckets
from ...ranks.rank_settings import RankSettings
from ..golden import Golden
from . import layers, operators
from .captured import CallRecorder, OperatorCall
from .child import Cases, ChildWork
from .children import Children
from .collectives import collective_cases
from .environment import EnvironmentCase
from .findings import Findings
from .on_all_ranks import READY, STARTING, OnAllRanks
from .rates import RatesCase
from .recording import BucketGraph, CapturedBucket, ShippedBucket, StepRecorder, shipped_buckets
from .results import (
    ALL,
    BUCKETS,
    COLLECTIVES,
    ENVIRONMENT,
    LAYERS,
    OPERATORS,
    BringupFailure,
    BringupFinding,
    DeviceCase,
    RungResult,
    Timing,
    Wanted,
)
from .steps import StepPlanner

ALL_RANKS = ALL[3:]
RECORDED_STEPS = 2
"""Steps before the one whose tensors are the operands of single operators: a later step has more in its caches."""
BATCH = 20
"""Cases that a process with a device is handed at once."""
LIMIT_S = 900.0
"""How long a process may show no sign of life beside a step: compilers take minutes."""


@dataclass
class Bringup:
    """One bring-up of an artifact on a kind of device.

    Attributes:
        settings: with the kind of device settled.
        environment: of this process and of those that it starts.
        config: of a launcher that started this process; None starts the other ranks.
        wanted: what to run.
        findings: of all rungs.
        resume: whether what passed before is not run again.
        stop: whether nothing is run behind a rung that fails.
        golden: what the artifact's model answers; None runs no such rung.
        limit_s: how long a process with a device may show no sign of life; None is LIMIT_S beside a step.
        on_rung: called after each rung.
    """

    artifact: Artifact
    settings: RankSettings
    environment: Mapping[str, str]
    progress: Progress
    config: RendezvousConfig | None = None
    wanted: Wanted = field(default_factory=Wanted)
    findings: Findings = field(default_factory=Findings)
    resume: bool = False
    stop: bool = False
    golden: Golden | None = None
    limit_s: float | None = None
    on_rung: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self._mesh = Mesh.parse(self.artifact.manifest.mesh)
        self._estimates = dict[str, float]()

    @property
    def results(self) -> list[RungResult]:
        """Of the rungs that have run."""
        return [result for result in self.findings.results() if result.name in self.wanted.cases or result.failures]

    @property
    def passed(self) -> bool:
        """Whether all that was wanted has run, and passed."""
        return {result.name for result in self.results if result.passed} >= self.wanted.cases.keys()

    def run(self) -> list[RungResult]:
        """Runs the rungs; what a device does ends none but the case that it happens in."""
        limit_s = LIMIT_S + self.settings.step_limit_s if self.limit_s is None else self.limit_s
        index = self.config.local_rank if self.config and self.config.local_rank is not None else 0
        with tempfile.TemporaryDirectory(prefix="npucompile-") as scratch:
            children = Children(self.artifact, self.settings, index, self.environment, limit_s, Path(scratch), self._add)
            try:
                if self._look(children):
                    self._climb(children)
                children.close()
            finally:
                children.kill()
        return self.results

    def _look(self, children: Children) -> bool:
        """Opens the device, which says of what the findings are; returns whether it could."""
        early: list[BringupFinding] = []
        children.add = early.append
        cases: list[DeviceCase] = [EnvironmentCase(self.artifact.path, self.environment)]
        if ENVIRONMENT in self.wanted.cases:
            cases.append(RatesCase(chip_of(self.artifact.manifest)))
        children.run(lambda: None if early else Cases(ENVIRONMENT, tuple(cases)), ENVIRONMENT)
        children.add = self._add
        if children.version:
            identity = {"artifact": self.artifact.digest, "device": self.settings.device, "version": children.version}
            identity |= {f"off {switch}": switch for switch in self.settings.off}
            kept = self.findings.begin(identity | toolchain() | installed(), resume=self.resume)
            if self.resume:
                self.progress.say(f"{kept} cases passed before and are not run again")
        else:
            # Earlier findings are for the day on which there is a device again.
            self.findings = Findings()
        if ENVIRONMENT in self.wanted.cases or not children.version:
            for finding in (*early, BringupFinding(ENVIRONMENT, "")):
                self._add(finding)
        return bool(children.version)

    def _climb(self, children: Children) -> None:
        captured = [graph for graph in self._shipped if isinstance(graph, CapturedBucket)]
        with self._rung(OPERATORS) as runs:
            if runs:
                cases, facts, left_out = self._operators() if not captured else self._calls(captured)
                if self._judge(children, OPERATORS, cases):
                    self._add(BringupFinding(OPERATORS, "", facts=facts, left_out=left_out))
        with self._rung(LAYERS) as runs:
            if runs:
                left_out = ["layers of captured graphs: they run within their buckets"] if captured else []
                for graph in self._graphs:
                    layer_cases, communicating = self._layers(graph)
                    left_out += communicating
                    if not self._judge(children, LAYERS, layer_cases):
                        break
                else:
                    self._add(BringupFinding(LAYERS, "", facts={"steps": layers.STEPS}, left_out=left_out))
        children.close()
        if self._goes_on:
            self._on_all_ranks(children)

    @functools.cached_property
    def _shipped(self) -> list[ShippedBucket]:
        return shipped_buckets(self.artifact)

    @property
    def _graphs(self) -> list[BucketGraph]:
        return [graph for graph in self._shipped if isinstance(graph, BucketGraph)]

    @property
    def _goes_on(self) -> bool:
        return not (self.stop and any(result.failures for result in self.results))

    @contextmanager
    def _rung(self, name: str) -> Iterator[bool]:
        """Whether a rung is to run; what goes wrong before a device has a part in it is the rung's failure."""
        concluded = any(result.name == name and result.passed for result in self.results)
        if name not in self.wanted.cases or not self._goes_on or concluded:
            yield False
            return
        try:
            yield True
        except Exception as error:
            self._add(BringupFinding(name, "recording on the CPU", failures=[BringupFailure.of("compiles", name, error)]))
        if not self._ended(name):
            self._end(name)

    def _end(self, name: str) -> None:
        if result := next((result for result in self.results if result.name == name), None):
            self.progress.say(f"{name}: {'passed' if result.passed else 'failed'} in {result.seconds:.1f} s")
            self.on_rung()

    def _add(self, finding: BringupFinding) -> None:
        """Takes a finding, with the estimates of the cost model; the last one of a rung ends it."""
        estimated = [replace(timing, estimate_s=self._estimate(finding.rung, timing)) for timing in finding.timings]
        self.findings.add(replace(finding, timings=estimated))
        if not finding.case:
            self._end(finding.rung)

    def _estimate(self, rung: str, timing: Timing) -> float | None:
        manifest = self.artifact.manifest
        if rung in (OPERATORS, LAYERS):
            npu = target(manifest.target).npu
            # Of an operator of a captured graph only its operands are known.
            return self._estimates.get(timing.what) or (timing.moved_bytes / npu.hbm_bytes_per_s if npu else None)
        if rung == COLLECTIVES:
            return self._collectives.get(timing.what)
        entry = next((entry for entry in manifest.graphs if entry.bucket.name == timing.what), None)
        return step_cost(self.artifact, entry).step_ms / 1e3 if entry else None

    @functools.cached_property
    def _collectives(self) -> Mapping[str, float]:
        """What each collective takes by the cost model, by name."""
        cases, _ = collective_cases(self._shipped, self._mesh)
        return {case.name: seconds for case in cases if (seconds := self._seconds_of(case.file)) is not None}

    def _price(self, cases: Iterable[DeviceCase]) -> None:
        """Estimates what the cases take, by the cost model of whole graphs."""
        for case in cases:
            if isinstance(case, operators.OperatorCase | layers.LayerCase) and (seconds := self._seconds_of(case.graph)) is not None:
                self._estimates[case.name] = seconds

    def _seconds_of(self, graph: GeFile | AclFile) -> float | None:
        platform = Platform.of(self.artifact.manifest.platform)
        speeds, context = parameters(chip_of(self.artifact.manifest)), self.artifact.manifest.limits.max_model_len // 2
        with suppress(LoweringError):
            return estimate(graph, speeds, self._mesh, context, platform).step_ms / 1e3
        return None

    def _judge(self, children: Children, rung: str, cases: Iterable[DeviceCase]) -> bool:
        """Has the cases of a rung judged that have not been, a batch after another; returns whether all of them were."""
        left = [case for case in cases if self.wanted.takes(rung, case.name) and case.name not in self.findings.judged(rung)]
        self._price(left)
        with self.progress.bar(rung, len(left)) as bar:
            for first in range(0, len(left), BATCH):
                batch = left[first : first + BATCH]
                if not children.run(functools.partial(self._remaining, rung, batch), rung):
                    return False
                bar.step(batch[-1].name, len(batch))
        return True

    def _remaining(self, rung: str, cases: list[DeviceCase]) -> ChildWork | None:
        judged = self.findings.judged(rung)
        left = tuple(case for case in cases if case.name not in judged)
        return Cases(rung, left) if left else None

    def _recorder(self, graph: BucketGraph) -> tuple[StepRecorder, StepPlanner]:
        planner = StepPlanner.of(self.artifact)
        return StepRecorder(graph, self._mesh, self._params_of, planner.initial_state(graph.signature.state)), planner

    def _params_of(self, rank: int) -> LoadParams:
        return params_of(self.artifact, self.settings, rank, Progress(quiet=True))

    def _operators(self) -> tuple[list[DeviceCase], dict[str, int], list[str]]:
        """Operators of GE graphs, how many there are, and those that are left out."""
        cases: dict[tuple[str, ...], operators.OperatorCase] = {}
        with self.progress.bar("record", len(self._graphs)) as bar:
            for graph in self._graphs:
                recorder, planner = self._recorder(graph)
                for step in planner.of_one_bucket(graph.bucket, RECORDED_STEPS):
                    values = recorder.run(step)
                cases = {**operators.distinct_operators(graph.bucket, graph.whole, values), **cases}
                bar.step(graph.bucket.name)
        selected, others = operators.chosen(list(cases.values()))
        left_out = [f"{case.name} {case.shapes}: between the smallest and the largest of its kind" for case in others]
        return [*selected], {"distinct": len(cases), "run": len(selected)}, left_out

    def _calls(self, graphs: list[CapturedBucket]) -> tuple[list[DeviceCase], dict[str, int], list[str]]:
        """Operators of captured graphs."""
        calls: dict[str, OperatorCall] = {}
        with self.progress.bar("record", len(graphs)) as bar:
            for graph in graphs:
                planner = StepPlanner.of(self.artifact)
                state = [planner.initial_state(graph.signature.state) for _ in range(self._mesh.size)]
                recorder = CallRecorder(graph, self._mesh, self._params_of, state)
                for step in planner.of_one_bucket(graph.bucket, RECORDED_STEPS):
                    recorder.run(step)
                calls = {**recorder.calls, **calls}
                bar.step(graph.bucket.name)
        return [*calls.values()], {"distinct": len(calls), "run": len(calls)}, []

    def _layers(self, graph: BucketGraph) -> tuple[list[layers.LayerCase], list[str]]:
        """The layers of a bucket, and those that communicate."""
        recorder, planner = self._recorder(graph)
        with self.progress.bar("record", layers.STEPS) as bar:
            return layers.layer_cases(graph, recorder, planner.of_one_bucket(graph.bucket, layers.STEPS), bar)

    def _on_all_ranks(self, children: Children) -> None:
        rungs = [rung for rung in ALL_RANKS if rung in self.wanted.cases]
        # Ranks that a launcher started join once, and all of them decide by their command lines what they run.
        asked = itertools.count()

        def remaining() -> ChildWork | None:
            for rung in rungs:
                if not self._ended(rung) and self._all_judged(rung):
                    self._add(BringupFinding(rung, ""))
            done = {rung: self.findings.judged(rung) for rung in rungs if not self._ended(rung)}
            if self.config and COLLECTIVES in rungs:
                done[COLLECTIVES] = frozenset()
            stuck = any(READY in cases for cases in done.values()) or (self.config and next(asked)) or not self._goes_on
            if stuck or not done:
                return None
            return OnAllRanks(self.config, self.environment, done, self.wanted, self.stop, self.golden, self._failed_starts)

        children.run(remaining, next((rung for rung in rungs if not self._ended(rung)), BUCKETS))
        for rung in rungs:
            if not self._ended(rung):
                self._end(rung)

    @property
    def _failed_starts(self) -> frozenset[str]:
        """Buckets whose start ended a process."""
        cases = {case for rung in ALL_RANKS for case in self.findings.judged(rung) if case.startswith(STARTING)}
        return frozenset(case.removeprefix(STARTING) for case in cases)

    def _ended(self, rung: str) -> bool:
        return any(result.name == rung and result.finished for result in self.results)

    def _all_judged(self, rung: str) -> bool:
        """Whether nothing is left of a rung on all ranks, as far as is known here; collectives are counted by the ranks."""
        judged = {case for case in self.findings.judged(rung) if case != READY and not case.startswith(STARTING)}
        if rung == BUCKETS:
            started = without_buckets(self.artifact, self._failed_starts).manifest.graphs
            return judged >= {entry.bucket.name for entry in started if self.wanted.takes(BUCKETS, entry.bucket.name)}
        return rung != COLLECTIVES and bool(judged)

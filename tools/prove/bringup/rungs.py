"""The rungs of a bring-up, in order; each adds one thing to the one before, and the first that fails is the last that runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from ....graphs.errors import NpucompileError
from ....graphs.steps.decode import DECODE
from ....graphs.steps.prefill import PREFILL
from ....graphs.steps.table import kind_of
from ....graphs.types import Mesh
from ....lowering.artifact.artifact import Artifact
from ....lowering.artifact.manifest import GraphEntry
from ....lowering.device import open_device
from ....lowering.platform import Platform
from ....runtime.device_executor import DeviceExecutor
from ....runtime.device_params import LoadParams
from ....runtime.distributed.rendezvous import RendezvousConfig
from ....runtime.distributed.sharded_executor import ShardedExecutor
from ....runtime.executor import Executor
from ....runtime.kv_transfer.layout import Region, instance_of, located
from ....runtime.kv_transfer.opening import open_pools, protocol_of
from ...builder.targets import target
from ...inspection.views import roofline_of
from ...progress import Progress
from ...ranks.executors import params_of
from ...ranks.launch import opened_ranks
from ...ranks.rank_settings import RankSettings
from . import buckets, handovers, layers, operators, short_serve
from .captured import CallRecorder, OperatorCall, run_calls
from .collectives import CollectivesCheck, failure_in
from .device_graph import Host
from .environment import check_environment
from .recording import BucketGraph, Recorder, shipped_buckets
from .results import Failure, RungResult, Timing
from .steps import StepPlanner

ENVIRONMENT, OPERATORS, LAYERS, COLLECTIVES = "environment", "operators", "layers", "collectives"
BUCKETS, ALTERNATION, SERVE, HANDOVERS = "buckets", "alternation", "serve", "handovers"
RUNGS = (ENVIRONMENT, OPERATORS, LAYERS, COLLECTIVES, BUCKETS, ALTERNATION, SERVE, HANDOVERS)
"""Names in order. Collectives come before whole buckets, which contain them."""
ONE_DEVICE, ALL_RANKS = RUNGS[:3], RUNGS[3:]
RECORDED_STEPS = 2
"""Steps before the one whose tensors are the operands of single operators: a later step has more in its caches."""


@dataclass
class Bringup:
    """One bring-up of an artifact on a kind of device.

    Attributes:
        settings: with the kind of device settled.
        environment: of this process and of those that it starts.
        config: of a launcher that started this process; None starts the other ranks.
        wanted: names of the rungs to run.
        results: of the rungs that have run.
    """

    artifact: Artifact
    settings: RankSettings
    environment: Mapping[str, str]
    progress: Progress
    config: RendezvousConfig | None = None
    wanted: Collection[str] = RUNGS
    results: list[RungResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        manifest = self.artifact.manifest
        self._mesh = Mesh.parse(manifest.mesh)
        self._shipped = shipped_buckets(self.artifact)
        self._graphs = [graph for graph in self._shipped if isinstance(graph, BucketGraph)]
        self._captured = [graph for graph in self._shipped if not isinstance(graph, BucketGraph)]
        self._most_logprobs = max((entry.max_logprobs for entry in manifest.graphs), default=0)

    @property
    def passed(self) -> bool:
        """Whether every rung that has run passed."""
        return all(result.passed for result in self.results)

    def run(self) -> list[RungResult]:
        """Runs the rungs until one fails."""
        if set(self.wanted) & set(ONE_DEVICE):
            self._on_one_device()
        if self.passed and set(self.wanted) & set(ALL_RANKS):
            try:
                self._on_all_ranks()
            except NpucompileError as error:
                # Where ranks failed, leaving them says so once more.
                if self.passed:
                    self._fail(BUCKETS, error)
        return self.results

    @contextmanager
    def _rung(self, name: str) -> Iterator[RungResult | None]:
        """Times a rung and catches what it raises; None where it is not to run."""
        if name not in self.wanted or not self.passed:
            yield None
            return
        result, began = RungResult(name), time.monotonic()
        try:
            yield result
        except NpucompileError as error:
            result.failures.append(Failure("compiles", name, str(error)))
        result.seconds = time.monotonic() - began
        self.results.append(result)
        self.progress.say(f"{name}: {'passed' if result.passed else 'failed'} in {result.seconds:.1f} s")

    def _fail(self, name: str, error: Exception, began: float | None = None) -> None:
        collective = failure_in(str(error))
        name = COLLECTIVES if collective else name
        failure = collective or Failure("communicators" if self._mesh.size > 1 else "compiles", "getting ready", str(error))
        seconds = 0.0 if began is None else time.monotonic() - began
        self.results = [result for result in self.results if result.name != name]
        self.results.append(RungResult(name, seconds, [failure]))
        self.progress.say(f"{name}: failed")

    def _on_one_device(self) -> None:
        device = open_device(self.settings.device, self.config.local_rank if self.config and self.config.local_rank is not None else 0)
        try:
            device.load_packages(Platform.of(self.artifact.manifest.platform).packages)
            with tempfile.TemporaryDirectory(prefix="npucompile-") as scratch:
                host = Host(device, Path(scratch), self.settings.step_limit_s)
                with self._rung(ENVIRONMENT) as result:
                    if result:
                        result.failures, result.facts = check_environment(self.artifact, host, self.environment)
                with self._rung(OPERATORS) as result:
                    if result:
                        result.timings = [self._with_estimate(timing) for timing in self._operators(host, result)]
                with self._rung(LAYERS) as result:
                    if result:
                        self._layers(host, result)
        finally:
            device.close()

    def _recorder(self, graph: BucketGraph) -> tuple[Recorder, StepPlanner]:
        planner = self._planner()
        return Recorder(graph, self._mesh, self._params_of, planner.initial_state(graph.signature.state)), planner

    def _planner(self) -> StepPlanner:
        manifest = self.artifact.manifest
        return StepPlanner(manifest.limits, int(manifest.model["vocab_size"]), self._mesh.axis("dp"), self._most_logprobs)

    def _params_of(self, rank: int) -> LoadParams:
        return params_of(self.artifact, self.settings, rank, Progress(quiet=True))

    def _operator_calls(self, host: Host, result: RungResult) -> list[Timing]:
        """The operators rung of captured graphs; returns the times."""
        calls: dict[str, OperatorCall] = {}
        with self.progress.bar("record", len(self._captured)) as bar:
            for graph in self._captured:
                planner = self._planner()
                state = [planner.initial_state(graph.signature.state) for _ in range(self._mesh.size)]
                recorder = CallRecorder(graph, self._mesh, self._params_of, state)
                for step in planner.of_one_bucket(graph.bucket, RECORDED_STEPS):
                    recorder.run(step)
                calls = {**recorder.calls, **calls}
                bar.step(graph.bucket.name)
        result.facts = {"distinct": len(calls), "run": len(calls)}
        with self.progress.bar("operators", len(calls)) as bar:
            result.failures, timings = run_calls(host, list(calls.values()), bar)
        return timings

    def _operators(self, host: Host, result: RungResult) -> list[Timing]:
        if self._captured:
            return self._operator_calls(host, result)
        cases: dict[tuple[str, ...], operators.OperatorCase] = {}
        with self.progress.bar("record", len(self._graphs)) as bar:
            for graph in self._graphs:
                recorder, planner = self._recorder(graph)
                for step in planner.of_one_bucket(graph.bucket, RECORDED_STEPS):
                    values = recorder.run(step)
                cases = {**operators.distinct_operators(graph.bucket, graph.whole, values), **cases}
                bar.step(graph.bucket.name)
        selected, left_out = operators.chosen(list(cases.values()))
        result.facts = {"distinct": len(cases), "run": len(selected)}
        result.left_out = [f"{case.name} {case.shapes}: between the smallest and the largest of its kind" for case in left_out]
        with self.progress.bar("operators", len(selected)) as bar:
            result.failures, timings = operators.run_operators(host, selected, bar)
        return timings

    def _layers(self, host: Host, result: RungResult) -> None:
        if self._captured:
            result.left_out = ["layers of captured graphs: they run within their buckets"]
        with self.progress.bar("layers", len(self._graphs) * layers.STEPS) as bar:
            for graph in self._graphs:
                recorder, planner = self._recorder(graph)
                steps = planner.of_one_bucket(graph.bucket, layers.STEPS)
                failures, timings, communicating = layers.run_layers(host, graph, recorder, steps, bar)
                result.failures += failures
                result.timings += [self._with_estimate(timing) for timing in timings]
                result.left_out += communicating
        result.facts = {"layers": len(result.timings), "steps": layers.STEPS}

    def _with_estimate(self, timing: Timing) -> Timing:
        npu = target(self.artifact.manifest.target).npu
        return replace(timing, estimate_s=timing.moved_bytes / npu.hbm_bytes_per_s) if npu else timing

    def _on_all_ranks(self) -> None:
        check, settings = CollectivesCheck(), self.settings
        if self._captured:
            check.left_out = ["collectives of captured graphs: they run within their buckets"]
        elif COLLECTIVES in self.wanted:
            settings = replace(self.settings, before_loading=check)
        began = time.monotonic()
        with opened_ranks(self.artifact, self.config, settings, self.environment, self.progress) as load:
            try:
                executor = load()
            except NpucompileError as error:
                self._fail(BUCKETS, error, began)
                return
            if COLLECTIVES in self.wanted:
                facts = {"ranks": self._mesh.size, "collectives": check.count}
                self.results.append(RungResult(COLLECTIVES, check.seconds, facts=facts, left_out=check.left_out))
                self.progress.say(f"{COLLECTIVES}: passed in {check.seconds:.1f} s")
            self._whole_steps(executor)

    def _whole_steps(self, executor: Executor) -> None:
        read_state, planner = state_reader(executor, self.settings.step_limit_s), self._planner()
        comparison, notes = self._comparison(executor)
        with self._rung(BUCKETS) as result:
            if result:
                with self.progress.bar("buckets", sum(1 for _ in buckets.one_after_another(planner, executor.buckets, 1))) as bar:
                    result.failures, seconds = buckets.run_buckets(executor, read_state, planner, comparison, bar)
                result.timings = buckets.timings(seconds, self.artifact.manifest.graphs, self._estimate)
                result.facts, result.left_out = {"rows": comparison.compared, "other_tokens": len(comparison.messages)}, notes
        fresh = replace(comparison, different=set(), messages=[], compared=0)
        with self._rung(ALTERNATION) as result:
            if result:
                total = sum(1 for _ in buckets.alternation(planner, executor.buckets))
                with self.progress.bar("alternation", total) as bar:
                    result.failures = buckets.run_alternation(executor, read_state, planner, fresh, bar)
                result.facts, result.left_out = {"steps": total, "rows": fresh.compared, "other_tokens": len(fresh.messages)}, notes
        missing = {PREFILL.name, DECODE.name} - {bucket.kind for bucket in executor.buckets}
        with self._rung(SERVE) as result:
            if result and missing:
                result.left_out = [f"an artifact without {missing.pop()} buckets serves in a pair"]
            elif result:
                with self.progress.bar("serve", 2) as bar:
                    result.failures, result.facts = short_serve.run_serve(executor, bar)
        with self._rung(HANDOVERS) as result:
            if result:
                self._hand_over(executor, result)

    def _hand_over(self, executor: Executor, result: RungResult) -> None:
        if reason := self._keeps_to_itself(executor):
            result.left_out = [reason]
            return
        address = self.config.node.address if self.config else "127.0.0.1"
        try:
            pools = open_pools(executor, self.settings.host_address or address, protocol_of(self.settings.device))
        except NpucompileError as error:
            result.failures = [Failure("handovers", "the transfer engine", str(error))]
            return
        with closing(pools), self.progress.bar("handovers", handovers.PROMPTS) as bar:
            instance = located(instance_of(self.artifact.manifest), pools.ranks)
            read = item_reader(executor, self.settings.step_limit_s)
            own = handovers.Handovers(executor, pools, instance, read, self.settings.step_limit_s)
            result.failures, result.facts = own.run(bar)

    def _keeps_to_itself(self, executor: Executor) -> str:
        """Why nothing can be handed over; empty where it can."""
        if find_spec("mooncake") is None:
            return "no transfer engine is installed: pip install 'npucompile[kv-transfer]', and its package for NPUs"
        if not any(kind_of(bucket).chunks for bucket in executor.buckets):
            return "no prefill bucket computes a prompt: bring the prefill server's artifact up"
        if executor.groups == 1 and executor.limits.num_request_slots < 3:
            return "a handover to itself takes two requests, and the artifact runs one"
        return ""

    def _comparison(self, executor: Executor) -> tuple[buckets.Comparison, list[str]]:
        needed, free = buckets.oracle_bytes(self.artifact), buckets.free_bytes()
        if needed > free // 2:
            note = f"nothing was compared with the CPU: all ranks take {needed:,} bytes there, and {free:,} are free"
            return buckets.Comparison(executor.vocab_size, None), [note]
        oracle = buckets.MeshOracle(self._shipped, self._mesh, self._params_of)
        return buckets.Comparison(executor.vocab_size, oracle), []

    def _estimate(self, entry: GraphEntry) -> float | None:
        roofline = roofline_of(self.artifact.manifest, entry, self._mesh)
        return roofline.step_s if roofline else None


def state_reader(executor: Executor, timeout_s: float) -> Callable[[], Mapping[str, torch.Tensor]]:
    """Reads the pools of rank 0 from its device."""
    local, host = _local(executor, timeout_s)
    return lambda: {name: host.read(pool) for name, pool in local.state.items()}


def item_reader(executor: Executor, timeout_s: float) -> handovers.ReadItem:
    """Reads what travels of an item of a pool of rank 0 from its device."""
    local, host = _local(executor, timeout_s)

    def read(region: Region, number: int) -> bytes:
        return host.read(local.state[f"state.{region.name}"][number]).view(torch.uint8).numpy().tobytes()[: region.item_bytes]

    return read


def _local(executor: Executor, timeout_s: float) -> tuple[DeviceExecutor, Host]:
    local = executor.local if isinstance(executor, ShardedExecutor) else executor
    assert isinstance(local, DeviceExecutor)
    return local, Host(local.device, Path(), timeout_s)

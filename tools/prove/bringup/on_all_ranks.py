"""The rungs that take all ranks: collectives before anything is loaded, then whole buckets, alternation, a short serve and handovers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ....graphs.errors import NpucompileError
from ....graphs.steps.decode import DECODE
from ....graphs.steps.prefill import PREFILL
from ....graphs.steps.table import kind_of
from ....lowering.device_error import code_of
from ....runtime.device_executor import DeviceExecutor
from ....runtime.distributed.rendezvous import RendezvousConfig
from ....runtime.distributed.sharded_executor import ShardedExecutor
from ....runtime.executor import Executor
from ....runtime.kv_transfer.layout import Region, instance_of, located
from ....runtime.kv_transfer.opening import open_pools, protocol_of
from ...progress import Progress
from ...ranks.executors import params_of
from ...ranks.launch import opened_ranks
from ..golden import Golden
from . import buckets, golden_tokens, handovers, short_serve
from .child import Child, Moves
from .collectives import CollectivesCheck, CollectiveWatch, failure_in
from .device_graph import Host
from .recording import shipped_buckets
from .results import ALTERNATION, BUCKETS, COLLECTIVES, GOLDEN, HANDOVERS, SERVE, BringupFailure, BringupFinding, Judgement, Timing, Wanted
from .steps import StepPlanner

READY = "getting ready"
STARTING = "starting "
"""Before a bucket's name: the case that it is compiled and runs its first step, which all ranks do before any step is judged."""
ASSUMED = {BUCKETS: "one-session", ALTERNATION: "alternation", SERVE: "one-session", HANDOVERS: "handovers", GOLDEN: "one-session"}
"""What refutes it if a case of a rung ends the process."""


@dataclass(frozen=True)
class OnAllRanks:
    """The rungs on all ranks of an artifact, the first of which is the process that is asked.

    Attributes:
        config: of a launcher; None starts the other ranks.
        done: for each rung that has not ended the cases that are not to be run.
        wanted: which cases are to be run at all.
        stop: whether nothing is run behind a rung that fails.
        golden: for the rung that serves its prompts.
        failed_starts: buckets whose start ended a process.
    """

    config: RendezvousConfig | None
    environment: Mapping[str, str]
    done: Mapping[str, frozenset[str]]
    wanted: Wanted
    stop: bool = False
    golden: Golden | None = None
    failed_starts: frozenset[str] = frozenset()

    def run(self, child: Child) -> None:
        """Runs them."""
        check = CollectivesCheck(self.done.get(COLLECTIVES, frozenset()), self.wanted)
        settings = replace(child.settings, without=self.failed_starts)
        if COLLECTIVES in self.done:
            check.watch, settings = _Told(self, child), replace(settings, before_loading=check)
        self.get_ready(child)
        try:
            with opened_ranks(child.artifact, self.config, settings, self.environment, _Starts(self, child)) as load:
                executor = load()
                self.get_ready(child)
                if COLLECTIVES in self.done:
                    facts = {"ranks": child.mesh.size, "collectives": check.count}
                    child.conclude(BringupFinding(COLLECTIVES, "", facts=facts, left_out=check.left_out))
                _WholeSteps(self, child, executor).run()
        except NpucompileError as error:
            # That of another rank may come from here or, where this one was waiting, from leaving the ranks.
            if failure := failure_in(str(error)):
                child.begin(COLLECTIVES, failure.what, failure.assumption)
                child.end(Judgement([failure], spent=True))
            raise

    @property
    def rung(self) -> str:
        """Of what happens before any step is judged."""
        return next((rung for rung in ASSUMED if rung in self.done), COLLECTIVES)

    def get_ready(self, child: Child) -> None:
        """Says that what happens now is about no case, but keeps all from running."""
        child.begin(self.rung, READY, "communicators" if child.mesh.size > 1 else "compiles")


class _Starts(Moves):
    """Says which bucket starts, on all ranks at once."""

    def __init__(self, work: OnAllRanks, child: Child) -> None:
        super().__init__(child)
        self._work = work

    def begins(self, what: str) -> None:
        """Says so. One that failed and is tried again, as its kind has no other, ends everything if it fails again."""
        if what in self._work.failed_starts:
            self._work.get_ready(self.child)
        else:
            self.child.begin(self._work.rung, STARTING + what, ASSUMED[BUCKETS])

    def say(self, text: str) -> None:
        """Says that a bucket has started, or cannot: what goes wrong next is not about it."""
        super().say(text)
        self._work.get_ready(self.child)


class _Told(CollectiveWatch):
    """Says what becomes of collectives on the first rank."""

    def __init__(self, work: OnAllRanks, child: Child) -> None:
        self._work, self._child = work, child

    def begin(self, name: str, assumption: str) -> None:
        """Says so."""
        self._child.begin(COLLECTIVES, name, assumption)

    def end(self, failures: list[BringupFailure], timings: Sequence[Timing] = (), facts: Mapping[str, Any] = {}) -> list[BringupFailure]:
        """Says what it came to."""
        self._child.end(Judgement(failures, timings, facts))
        self._work.get_ready(self._child)
        return []


class _WholeSteps:
    """Steps of the loaded artifact."""

    def __init__(self, work: OnAllRanks, child: Child, executor: Executor) -> None:
        self._work, self._child, self._executor = work, child, executor
        self._artifact, self._settings = child.artifact, child.settings
        self._read_state = state_reader(executor, child.settings.step_limit_s)
        self._planner = StepPlanner.of(self._artifact)

    def run(self) -> None:
        if not any(rung in self._work.done for rung in ASSUMED):
            return
        comparison, notes = self._comparison()
        if BUCKETS in self._work.done:
            for bucket, reason in getattr(self._executor, "missing", {}).items():
                self._judge(BUCKETS, bucket.name, functools.partial(_missing, bucket.name, reason))
            judge = functools.partial(self._judge, BUCKETS)
            buckets.run_buckets(self._executor, self._read_state, self._planner, comparison, judge)
            self._child.conclude(BringupFinding(BUCKETS, "", left_out=notes))
        fresh = replace(comparison, different=set(), messages=[], compared=0)
        self._alone(ALTERNATION, buckets.IN_TURNS, functools.partial(self._alternate, fresh), notes)
        missing = {PREFILL.name, DECODE.name} - {bucket.kind for bucket in self._executor.buckets}
        without = f"an artifact without {missing.pop()} buckets serves in a pair" if missing else ""
        self._alone(SERVE, short_serve.WHAT, self._serve, [without] if without else [], run=not without)
        reason = self._keeps_to_itself()
        self._alone(HANDOVERS, handovers.WHAT, self._hand_over, [reason] if reason else [], run=not reason)
        without = without or ("random weights answer nothing" if self._settings.random_weights else "")
        self._alone(GOLDEN, golden_tokens.WHAT, self._golden, [without] if without else [], run=not without)

    def _judge(self, rung: str, case: str, run: Callable[[], Judgement]) -> None:
        if case not in self._work.done[rung] and self._work.wanted.takes(rung, case):
            self._child.judge(rung, case, ASSUMED[rung], run)

    def _alone(self, rung: str, case: str, judge: Callable[[], Judgement], left_out: Sequence[str], *, run: bool = True) -> None:
        """A rung of one case."""
        if rung not in self._work.done or (self._work.stop and self._child.failed):
            return
        if run:
            self._judge(rung, case, judge)
        self._child.conclude(BringupFinding(rung, "", left_out=left_out))

    def _alternate(self, comparison: buckets.Comparison) -> Judgement:
        with self._child.progress.bar(ALTERNATION, 0) as bar:
            return buckets.run_alternation(self._executor, self._read_state, self._planner, comparison, bar)

    def _serve(self) -> Judgement:
        with self._child.progress.bar(SERVE, 0) as bar:
            failures, facts = short_serve.run_serve(self._executor, bar)
        return Judgement(failures, facts=facts, spent=bool(failures))

    def _golden(self) -> Judgement:
        assert self._work.golden is not None
        allowed = golden_tokens.FLOATS if self._artifact.manifest.quantization == "none" else golden_tokens.QUANTISED
        with self._child.progress.bar(GOLDEN, 0) as bar:
            failures, facts, left_out = golden_tokens.run_golden(self._executor, self._work.golden, allowed, bar)
        return Judgement(failures, facts=facts, left_out=left_out, spent=bool(failures))

    def _hand_over(self) -> Judgement:
        config = self._work.config
        address = config.node.address if config else "127.0.0.1"
        try:
            pools = open_pools(self._executor, self._settings.host_address or address, protocol_of(self._settings.device))
        except NpucompileError as error:
            return Judgement([BringupFailure.of("handovers", "the transfer engine", error)])
        with closing(pools), self._child.progress.bar(HANDOVERS, 0) as bar:
            instance = located(instance_of(self._artifact.manifest), pools.ranks)
            read = item_reader(self._executor, self._settings.step_limit_s)
            own = handovers.Handovers(self._executor, pools, instance, read, self._settings.step_limit_s)
            failures, facts = own.run(bar)
        return Judgement(failures, facts=facts, spent=bool(failures))

    def _keeps_to_itself(self) -> str:
        """Why nothing can be handed over; empty where it can."""
        if find_spec("mooncake") is None:
            return "no transfer engine is installed: pip install 'npucompile[kv-transfer-npu]' on NPUs, 'npucompile[kv-transfer]' elsewhere"
        if not any(kind_of(bucket).chunks for bucket in self._executor.buckets):
            return "no prefill bucket computes a prompt: bring the prefill server's artifact up"
        if self._executor.groups == 1 and self._executor.limits.num_request_slots < 3:
            return "a handover to itself takes two requests, and the artifact runs one"
        return ""

    def _comparison(self) -> tuple[buckets.Comparison, list[str]]:
        needed, free = buckets.oracle_bytes(self._artifact), buckets.free_bytes()
        if needed > free // 2:
            note = f"nothing was compared with the CPU: all ranks take {needed:,} bytes there, and {free:,} are free"
            return buckets.Comparison(self._executor.vocab_size, None), [note]
        load = functools.partial(params_of, self._artifact, self._settings, progress=Progress(quiet=True))
        oracle = buckets.MeshOracle(shipped_buckets(self._artifact), self._child.mesh, load)
        return buckets.Comparison(self._executor.vocab_size, oracle), []


def _missing(bucket: str, reason: str) -> Judgement:
    return Judgement([BringupFailure("compiles", bucket, reason, code_of(reason))])


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

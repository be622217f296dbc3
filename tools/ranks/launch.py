"""Starts the ranks of an artifact for several devices, a process each, or joins those that torchrun started.

Under torchrun every rank is started with the same command line, and reads its number from the environment. Otherwise this process is
the first rank of its machine and starts the others as `python -m npucompile.tools.ranks.rank`.
"""

from __future__ import annotations

import _thread
import hashlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ...graphs.control_group import processors
from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact
from ...lowering.backend import backend
from ...lowering.toolchain import required, toolchain
from ...models.expert_placement import ExpertPlacement
from ...runtime.distributed.control_plane import ControlPlane, RankError
from ...runtime.distributed.rendezvous import RendezvousConfig, accept_ranks, connect_to_rank_0, open_store, substore
from ...runtime.distributed.sharded_executor import ShardedExecutor
from ...runtime.distributed.worker import Worker
from ...runtime.executor import Executor
from ..cli import Home
from ..locate import artifact_path
from ..progress import Progress
from .binding import bind
from .executors import check_weights, load_executor
from .processes import EXIT_S, RankProcesses
from .rank_settings import RankPlace, RankSettings
from .weights import placement_of

LOCALHOST = "127.0.0.1"
GROUPS = "groups"
"""Substore of the process groups."""

ABORT_S = 7.0
"""How long a process may take to end in order after the ranks have failed; then it is ended by force."""


def check_world_size(artifact: Artifact, config: RendezvousConfig | None) -> Mesh:
    """The mesh of an artifact that these ranks can run.

    Raises:
        SpecError: the launcher started another number of ranks.
    """
    mesh = Mesh.parse(artifact.manifest.mesh)
    if config is not None and config.world_size != mesh.size:
        raise SpecError(f"{artifact.path} is for mesh {mesh}, {mesh.size} ranks; the launcher started {config.world_size}")
    return mesh


def open_named_artifact(home: Home, name: str | None, local_rank: int = 0) -> Artifact:
    """The artifact that a launcher started this rank for: it must exist and be named, so that all ranks open the same one.

    Args:
        local_rank: of this process; the first of a machine compares the files with the manifest, and the ranks compare manifests.

    Raises:
        SpecError: none is named.
        ArtifactError: there is none of that name, or it cannot run here.
    """
    if name is None:
        raise SpecError("ranks that a launcher starts are told what to run: name an artifact, as in `torchrun ... serve ARTIFACT`")
    artifact = Artifact.open(artifact_path(home.artifacts, name), check=local_rank == 0)
    artifact.check_runnable()
    return artifact


def rank_identity(artifact: Artifact, settings: RankSettings) -> dict[str, str]:
    """What must be the same on all ranks, by name. Hosts of two architectures may share an artifact whose executables know none."""
    versions = required(toolchain(), host_bound=backend(artifact.manifest.backend).host_bound)
    own = {"artifact": artifact.digest, "mesh": artifact.manifest.mesh, "device": settings.device}
    if placement := placement_of(artifact, settings.expert_map) or ExpertPlacement.recorded(artifact.manifest.model):
        own["expert map"] = hashlib.sha256(repr(placement).encode()).hexdigest()
    return {**own, **{f"{name} version": version for name, version in versions.items()}}


@dataclass(frozen=True)
class Cluster:
    """All ranks of an artifact after the rendezvous; none has loaded anything yet.

    Attributes:
        place: of rank 0.
        stack: closed when the ranks have ended.
    """

    artifact: Artifact
    control_plane: ControlPlane
    settings: RankSettings
    place: RankPlace
    stack: ExitStack

    @property
    def failure(self) -> RankError | None:
        """Why the ranks end, if they failed."""
        return self.control_plane.failure

    def load_executor(self, progress: Progress | None = None) -> ShardedExecutor:
        """Loads rank 0's part and waits for the other ranks; called once, on the thread that is to run the steps.

        Raises:
            ArtifactError: it cannot run here.
            RankError: another rank could not get ready.
        """
        try:
            local = load_executor(self.artifact, self.settings, self.stack, progress or Progress(quiet=True), self.place)
        except Exception as error:
            self.control_plane.fail(0, f"getting ready: {error}", lost=False)
            raise
        return ShardedExecutor(local, self.control_plane, step_timeout_s=self.settings.step_limit_s)


@contextmanager
def lead_ranks(
    artifact: Artifact,
    config: RendezvousConfig | None,
    settings: RankSettings,
    environment: Mapping[str, str],
    progress: Progress | None = None,
    on_failure: Callable[[str], None] = lambda _: None,
) -> Iterator[Cluster | None]:
    """Rank 0: starts or accepts all other ranks, and ends them on leaving; None for an artifact of one device.

    When the ranks fail, the main thread is interrupted as if by SIGTERM from outside, again and again, and after ABORT_S the process
    is ended with status 1.

    Args:
        config: of a launcher, or of several machines; None starts all other ranks on this one.
        environment: of the processes that are started.
        progress: says which machines are waited for.
        on_failure: called with the reason as soon as the ranks have failed; this process may wait for a lost one in a step meanwhile.

    Raises:
        ArtifactError: the artifact has no weights.
        SpecError: the number of ranks is wrong.
        RankError: some did not connect, or do not match; or, on leaving, one was lost meanwhile.
    """
    progress = progress or Progress(quiet=True)
    mesh = check_world_size(artifact, config)
    check_weights(artifact, settings)
    if mesh.size == 1:
        bind(settings.cores, 0)
        yield None
        return
    config = config or RendezvousConfig(
        0, mesh.size, LOCALHOST, 0, mesh.size, settings.join_timeout_s, hosts_store=True, token=secrets.token_hex(16), starts_ranks=True
    )
    _divide_threads(settings, config.local_world_size)
    bind(settings.cores, config.local_rank)
    with ExitStack() as stack:
        store = open_store(config)
        processes = RankProcesses()
        if config.starts_ranks:
            stack.callback(processes.stop)
            processes.start(artifact.path, replace(config, port=store.port), settings, environment)
        identity = rank_identity(artifact, settings)
        arrivals = accept_ranks(config, store, identity, processes.first_exit, progress.say, processes.working)
        connections = {rank: arrival.stream for rank, arrival in arrivals.items()}
        address = config.node.address or next(iter(connections.values())).getsockname()[0]
        left = threading.Event()

        def failed(error: RankError) -> None:
            on_failure(str(error))
            _interrupt(error, left)

        control_plane = ControlPlane(
            mesh,
            connections,
            exit_reason=processes.exit_reason,
            on_failure=failed,
            silence_s=settings.silence_s,
            nodes={rank: str(arrival.node) for rank, arrival in arrivals.items() if arrival.node.count > 1},
        )
        stack.callback(left.set)
        stack.callback(control_plane.close)
        place = RankPlace(mesh, 0, config.local_rank, substore(store, config, GROUPS), address)
        cluster = Cluster(artifact, control_plane, settings, place, stack.enter_context(ExitStack()))
        try:
            yield cluster
        except KeyboardInterrupt:
            if cluster.failure is None:
                raise
        if cluster.failure is not None:
            raise cluster.failure


@contextmanager
def opened_ranks(
    artifact: Artifact,
    config: RendezvousConfig | None,
    settings: RankSettings,
    environment: Mapping[str, str],
    progress: Progress,
    on_failure: Callable[[str], None] = lambda _: None,
) -> Iterator[Callable[[], Executor]]:
    """Rank 0, whether or not there are others: the function that loads the executor of all, to be called on the thread that steps.

    Args and Raises as `lead_ranks`.
    """
    with lead_ranks(artifact, config, settings, environment, progress, on_failure) as cluster, ExitStack() as stack:
        if cluster is None:
            yield lambda: load_executor(artifact, settings, stack, progress)
        else:
            yield lambda: cluster.load_executor(progress)


def run_rank(
    artifact: Artifact,
    config: RendezvousConfig,
    settings: RankSettings,
    environment: Mapping[str, str] = MappingProxyType({}),
    progress: Progress | None = None,
    abandoned: Callable[[], str | None] | None = None,
) -> None:
    """Any other rank: connects to rank 0, and runs its steps until it sends "stop". The first one of a machine may start the others of it.

    Args:
        environment: of the processes that are started.
        progress: says which machines are waited for.
        abandoned: says so when the process that started this one has ended.

    Raises:
        SpecError: the number of ranks is wrong.
        RankError: this rank was refused, or a rank failed.
    """
    progress = progress or Progress(quiet=True)
    mesh = check_world_size(artifact, config)
    _divide_threads(settings, config.local_world_size)
    bind(settings.cores, config.local_rank)
    if not config.starts_ranks:
        _leave_signals_to_rank_0()
    check_weights(artifact, settings)
    processes = RankProcesses()
    exited = abandoned or processes.first_exit
    store = open_store(config, progress.say, exited)
    with ExitStack() as stack:
        try:
            if config.starts_ranks:
                processes.start(artifact.path, config, settings, environment)
            stream = connect_to_rank_0(config, store, rank_identity(artifact, settings), exited, progress.say)
        except BaseException:
            processes.stop(within_s=0)
            raise
        stack.callback(processes.stop)
        _leave_signals_to_rank_0(ends_by_interrupt=config.starts_ranks)
        address = config.node.address or stream.getsockname()[0]
        place = RankPlace(mesh, config.rank, config.local_rank, substore(store, config, GROUPS), address)

        def end(text: str) -> None:
            if config.node.count > 1:
                # This rank may wait for a machine that is gone until it is ended by force.
                progress.say(text)
            exit_after(ABORT_S, 1, f"Error: {text}")

        rank_0 = f"rank 0 at {config.host}" if config.node.count > 1 else "rank 0"
        worker = Worker(config.rank, mesh, stream, on_end=end, silence_s=settings.silence_s, node=config.on_node, rank_0=rank_0)
        stack.callback(worker.close)
        loaded = stack.enter_context(ExitStack())
        try:
            worker.serve(lambda: load_executor(artifact, settings, loaded, Progress(quiet=True), place))
        except RankError:
            # Rank 0 sees that they are gone; how, only this process knows.
            for text in processes.killed():
                progress.say(text)
            raise


def _leave_signals_to_rank_0(ends_by_interrupt: bool = False) -> None:
    """Rank 0 ends all ranks in order: torchrun sends SIGTERM to all at once, and so does a terminal send SIGINT or SIGHUP on one machine.

    Args:
        ends_by_interrupt: whether these end this rank as SIGTERM does, as on a machine without rank 0.
    """

    def end(number: int, _: object) -> None:
        exit_after(EXIT_S, 128 + number)

    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end if ends_by_interrupt else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)


def _divide_threads(settings: RankSettings, ranks: int) -> None:
    """Sets the CPU threads of this rank: with more threads than cores, ranks would wait for each other at every operator."""
    torch.set_num_threads(settings.threads or max(1, processors() // ranks))


def _interrupt(error: RankError, left: threading.Event) -> None:
    deadline = time.monotonic() + ABORT_S
    while not left.wait(0.2):
        if time.monotonic() > deadline:
            _exit(f"Error: {error}", 1)
        _thread.interrupt_main(signal.SIGTERM)


def exit_after(seconds: float, status: int, text: str = "") -> None:
    """Ends this process by force if it still runs after that time."""
    timer = threading.Timer(seconds, _exit, (text, status))
    timer.daemon = True
    timer.start()


def _exit(text: str, status: int) -> None:
    """Ends this process, even if its other threads are blocked."""
    if text:
        print(text, file=sys.stderr, flush=True)
    os._exit(status)

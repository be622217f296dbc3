"""Starts the ranks of an artifact for several devices, a process each, or joins those that torchrun started.

Under torchrun every rank is started with the same command line, and reads its number from the environment. Otherwise this process is
rank 0 and starts the others as `python -m npucompile.tools.serve.rank`.
"""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...graphs.errors import ArtifactError, SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact
from ...lowering.backend import backend
from ...lowering.toolchain import required, toolchain
from ...runtime.cpu_executor import CpuExecutor
from ...runtime.distributed.control_plane import ControlPlane, RankError
from ...runtime.distributed.process_groups import ProcessGroups
from ...runtime.distributed.rendezvous import RendezvousConfig, accept_ranks, connect_to_rank_0, open_store, substore
from ...runtime.distributed.sharded_executor import ShardedExecutor
from ...runtime.distributed.worker import Worker
from ..cli import Home
from ..locate import artifact_path

LOCALHOST = "127.0.0.1"
GLOO = "gloo"
"""Substore of the process groups."""

EXIT_S = 5.0
"""How long a rank may take to end by itself when nothing is left to do."""

ABORT_S = 7.0
"""How long a process may take to end in order after the ranks have failed; then it is ended by force."""

EXIT_STATUS_S = 1.0
"""How long to wait for the exit status of a rank whose connection is lost."""

SILENCE_MARGIN_S = 10.0


@dataclass(frozen=True)
class RankSettings:
    """How ranks run.

    Attributes:
        threads: CPU threads of each rank; None divides the cores of this machine.
        join_timeout_s: how long ranks wait for each other at the start.
        step_timeout_s: how long a rank waits for the slowest one within a step.
    """

    threads: int | None = None
    join_timeout_s: float = 60.0
    step_timeout_s: float = 60.0

    @property
    def silence_s(self) -> float:
        """How long a rank may be silent. Compiled code holds the GIL while it waits in a collective, so no heartbeat is sent."""
        return self.step_timeout_s + SILENCE_MARGIN_S


def launcher_config(environment: Mapping[str, str], settings: RankSettings) -> RendezvousConfig | None:
    """The rank that torchrun, or a launcher that sets the same variables, made this process; None without a launcher.

    Raises:
        SpecError: variables are missing or are not numbers.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise SpecError(f"RANK and WORLD_SIZE are set, and {' and '.join(missing)} is not; torchrun sets all four, or set none")
    rank, size, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size:
        raise SpecError(f"RANK is {rank} and WORLD_SIZE {size}; legal is 0 to {size - 1}")
    local_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else size
    run, restart = environment.get("TORCHELASTIC_RUN_ID", ""), environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent_hosts_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RendezvousConfig(
        rank,
        size,
        environment["MASTER_ADDR"],
        port,
        local_size,
        settings.join_timeout_s,
        prefix=f"npucompile/{run}/{restart}",
        hosts_store=rank == 0 and not agent_hosts_store,
    )


def check_world_size(artifact: Artifact, config: RendezvousConfig | None) -> Mesh:
    """The mesh of an artifact that these ranks can run.

    Raises:
        ArtifactError: the artifact has no weights.
        SpecError: the launcher started another number of ranks.
    """
    mesh = Mesh.parse(artifact.manifest.mesh)
    if artifact.manifest.weights is None:
        raise ArtifactError(f"{artifact.path} was built without weights: it can be inspected, and not run; build a checkpoint directory")
    if config is not None and config.world_size != mesh.size:
        raise SpecError(f"{artifact.path} is for mesh {mesh}, {mesh.size} ranks; the launcher started {config.world_size}")
    return mesh


def open_named_artifact(home: Home, name: str | None) -> Artifact:
    """The artifact that a launcher started this rank for: it must exist and be named, so that all ranks open the same one.

    Raises:
        SpecError: none is named.
        ArtifactError: there is none of that name, or it cannot run here.
    """
    if name is None:
        raise SpecError("ranks that a launcher starts are told what to run: name an artifact, as in `torchrun ... serve ARTIFACT`")
    artifact = Artifact.open(artifact_path(home.artifacts, name))
    artifact.check_runnable()
    return artifact


def rank_identity(artifact: Artifact) -> dict[str, str]:
    """What must be the same on all ranks, by name. Hosts of two architectures may share an artifact whose executables know none."""
    versions = required(toolchain(), host_bound=backend(artifact.manifest.backend).host_bound)
    return {"artifact": artifact.digest, "mesh": artifact.manifest.mesh, **{f"{k} version": v for k, v in versions.items()}}


class Cluster:
    """All ranks of an artifact after the rendezvous; none has loaded anything yet."""

    def __init__(self, artifact: Artifact, control_plane: ControlPlane, settings: RankSettings) -> None:
        self.artifact, self.control_plane, self._settings = artifact, control_plane, settings

    @property
    def failure(self) -> RankError | None:
        """Why the ranks end, if they failed."""
        return self.control_plane.failure

    def load_executor(self) -> ShardedExecutor:
        """Loads rank 0's part and waits for the other ranks; called once, on the thread that is to run the steps.

        Raises:
            ArtifactError: it cannot run here.
            RankError: another rank could not get ready.
        """
        try:
            local = CpuExecutor(self.artifact, rank=0)
        except Exception as error:
            self.control_plane.fail(0, f"getting ready: {error}", lost=False)
            raise
        return ShardedExecutor(local, self.control_plane, step_timeout_s=self._settings.step_timeout_s)


@contextmanager
def lead_ranks(
    artifact: Artifact, config: RendezvousConfig | None, settings: RankSettings, environment: Mapping[str, str]
) -> Iterator[Cluster | None]:
    """Rank 0: starts or accepts all other ranks, and ends them on leaving; None for an artifact of one device.

    When the ranks fail, the main thread is interrupted as if by SIGTERM from outside, again and again, and after ABORT_S the process
    is ended with status 1.

    Args:
        config: of a launcher; None starts the other ranks on this machine.
        environment: of the processes that are started.

    Raises:
        SpecError: the number of ranks is wrong.
        RankError: some did not connect, or do not match; or, on leaving, one was lost meanwhile.
    """
    mesh = check_world_size(artifact, config)
    if mesh.size == 1:
        yield None
        return
    starts_ranks = config is None
    config = config or RendezvousConfig(0, mesh.size, LOCALHOST, 0, mesh.size, settings.join_timeout_s, hosts_store=True)
    _divide_threads(settings, config.local_world_size)
    with ExitStack() as stack:
        store = open_store(config)
        processes = RankProcesses()
        if starts_ranks:
            stack.callback(processes.stop)
            processes.start(artifact.path, replace(config, port=store.port), settings, environment)
        connections = accept_ranks(config, store, rank_identity(artifact), processes.first_exit)
        address = next(iter(connections.values())).getsockname()[0]
        left = threading.Event()
        control_plane = ControlPlane(
            mesh,
            connections,
            exit_reason=processes.exit_reason,
            on_failure=lambda error: _interrupt(error, left),
            silence_s=settings.silence_s,
        )
        stack.callback(left.set)
        stack.callback(control_plane.close)
        stack.enter_context(ProcessGroups(mesh, 0, substore(store, config, GLOO), address, settings.step_timeout_s))
        cluster = Cluster(artifact, control_plane, settings)
        try:
            yield cluster
        except KeyboardInterrupt:
            if cluster.failure is None:
                raise
        if cluster.failure is not None:
            raise cluster.failure


def run_rank(artifact: Artifact, config: RendezvousConfig, settings: RankSettings) -> None:
    """Any other rank: connects to rank 0, and runs its steps until it sends "stop".

    Raises:
        SpecError: the number of ranks is wrong.
        RankError: this rank was refused, or a rank failed.
    """
    mesh = check_world_size(artifact, config)
    _divide_threads(settings, config.local_world_size)
    # Ctrl-C goes to all ranks at once, and torchrun sends SIGTERM to all; rank 0 ends them in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: _exit_after(EXIT_S, 128 + number))
    store = open_store(config)
    stream = connect_to_rank_0(config, store, rank_identity(artifact))
    address = stream.getsockname()[0]
    worker = Worker(config.rank, stream, on_end=lambda text: _exit_after(ABORT_S, 1, f"Error: {text}"), silence_s=settings.silence_s)
    with ExitStack() as stack, closing(worker):

        def load_executor() -> CpuExecutor:
            groups = ProcessGroups(mesh, config.rank, substore(store, config, GLOO), address, settings.step_timeout_s)
            stack.enter_context(groups)
            return CpuExecutor(artifact, rank=config.rank)

        worker.serve(load_executor)


class RankProcesses:
    """The ranks that this process started, and ends."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, path: Path, config: RendezvousConfig, settings: RankSettings, environment: Mapping[str, str]) -> None:
        """Starts every rank but 0 on this machine."""
        for rank in range(1, config.world_size):
            command = [sys.executable, "-m", f"{__package__}.rank", str(path)]
            options: dict[str, float] = {"rank": rank, "world-size": config.world_size, "port": config.port}
            options |= {"threads": torch.get_num_threads()}
            options |= {"join-timeout": settings.join_timeout_s, "step-timeout": settings.step_timeout_s}
            command += [f"--{name}={value}" for name, value in options.items()]
            self._processes[rank] = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def first_exit(self) -> str | None:
        """Which rank has ended, and how; None while all run."""
        rank = next((rank for rank, process in self._processes.items() if process.poll() is not None), None)
        return None if rank is None else f"rank {rank} ended before it was ready: {self.exit_reason(rank)}; it says why above, if it could"

    def exit_reason(self, rank: int) -> str | None:
        """How a rank's process ended; None when it still runs, or this process did not start it."""
        process = self._processes.get(rank)
        if process is None:
            return None
        try:
            status = process.wait(EXIT_STATUS_S)
        except subprocess.TimeoutExpired:
            return None
        if status < 0:
            return f"process {process.pid} was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"process {process.pid} ended with status {status}"

    def stop(self) -> None:
        """Waits until all have ended, and kills those that do not end in time."""
        deadline = time.monotonic() + EXIT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _divide_threads(settings: RankSettings, ranks: int) -> None:
    """Sets the CPU threads of this rank: with more threads than cores, ranks would wait for each other at every operator."""
    torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // ranks))


def _interrupt(error: RankError, left: threading.Event) -> None:
    deadline = time.monotonic() + ABORT_S
    while not left.wait(0.2):
        if time.monotonic() > deadline:
            _exit(f"Error: {error}", 1)
        _thread.interrupt_main(signal.SIGTERM)


def _exit_after(seconds: float, status: int, text: str = "") -> None:
    timer = threading.Timer(seconds, _exit, (text, status))
    timer.daemon = True
    timer.start()


def _exit(text: str, status: int) -> None:
    """Ends this process, even if its other threads are blocked."""
    if text:
        print(text, file=sys.stderr, flush=True)
    os._exit(status)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise SpecError(f"{name} is {text!r}; legal is a whole number")
    return int(text)

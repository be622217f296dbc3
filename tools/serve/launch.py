"""Turns an artifact for several devices into ranks, a process each: started by torchrun, or by this one.

Under torchrun every rank is started with the same command line, and learns its number from the environment. Otherwise this process
is rank 0 and starts the others as `python -m npucompile.tools.serve.rank`.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...graphs.errors import ArtifactError, SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact
from ...lowering.toolchain import toolchain
from ...runtime.cpu_executor import CpuExecutor
from ...runtime.distributed.control_plane import Job, RankError
from ...runtime.distributed.process_groups import Groups
from ...runtime.distributed.rendezvous import Seat, gather, join, keys, open_store
from ...runtime.distributed.sharded_executor import ShardedExecutor
from ...runtime.distributed.worker import Worker
from ..cli import Home
from ..locate import artifact_path

LOCALHOST = "127.0.0.1"
GROUPS = "gloo"
EXIT_S = 5.0
"""How long a rank may take to end by itself when there is nothing left to do."""

LAST_S = 7.0
"""How long a rank may take to end in order after the job has failed; then it is ended as it is."""

GONE_S = 1.0
MARGIN_S = 10.0


@dataclass(frozen=True)
class Settings:
    """How ranks run.

    Attributes:
        threads: CPU threads of each rank; None shares out the cores of this machine.
        join_timeout_s: how long ranks wait for each other to come.
        step_timeout_s: how long a rank waits for the slowest one within a step.
    """

    threads: int | None = None
    join_timeout_s: float = 60.0
    step_timeout_s: float = 60.0

    @property
    def silence_s(self) -> float:
        """How long a rank may be silent: compiled code keeps Python's lock while it waits in a collective, and no beat is sent."""
        return self.step_timeout_s + MARGIN_S


@dataclass(frozen=True)
class Place:
    """Which rank a launcher made this process.

    Attributes:
        local_world: ranks on this machine.
        hosts_store: whether rank 0 offers the store at host and port, the launcher not doing so itself.
    """

    rank: int
    world: int
    host: str
    port: int
    local_world: int
    prefix: str = "npucompile"
    hosts_store: bool = False


def place_of(environment: Mapping[str, str]) -> Place | None:
    """What torchrun, or a launcher that sets the same variables, says; None when this process was started by itself.

    Raises:
        SpecError: on variables that are missing or are not numbers.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise SpecError(f"RANK and WORLD_SIZE are set, and {' and '.join(missing)} is not; torchrun sets all four, or set none")
    rank, world, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= world:
        raise SpecError(f"RANK is {rank} and WORLD_SIZE {world}; legal is 0 to {world - 1}")
    run, again = environment.get("TORCHELASTIC_RUN_ID", ""), environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    local = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else world
    return Place(rank, world, environment["MASTER_ADDR"], port, local, f"npucompile/{run}/{again}", rank == 0 and not agent)


def check_world(artifact: Artifact, place: Place | None) -> Mesh:
    """The mesh of an artifact that these ranks can run.

    Raises:
        ArtifactError: the artifact has nothing to run.
        SpecError: when the launcher started another number of ranks.
    """
    mesh = Mesh.parse(artifact.manifest.mesh)
    if artifact.manifest.weights is None:
        raise ArtifactError(f"{artifact.path} was built without weights: it can be inspected, and not run; build a checkpoint directory")
    if place is not None and place.world != mesh.size:
        raise SpecError(f"{artifact.path} is for mesh {mesh}, {mesh.size} ranks; the launcher started {place.world}")
    return mesh


def named(home: Home, name: str | None) -> Artifact:
    """The artifact that a launcher started this rank for: it must be there, and named, so that all ranks open the same.

    Raises:
        SpecError: none is named.
        ArtifactError: there is none of that name, or it cannot run here.
    """
    if name is None:
        raise SpecError("ranks that a launcher starts are told what to run: name an artifact, as in `torchrun ... serve ARTIFACT`")
    artifact = Artifact.open(artifact_path(home.artifacts, name))
    artifact.check_runnable()
    return artifact


def facts(artifact: Artifact) -> dict[str, str]:
    """What must be the same on all ranks."""
    return {"artifact": artifact.digest, "mesh": artifact.manifest.mesh, **{f"{k} version": v for k, v in toolchain().items()}}


class Team:
    """Rank 0 and the others, all let in; nothing is loaded yet."""

    def __init__(self, artifact: Artifact, job: Job, settings: Settings) -> None:
        self.artifact, self.job, self._settings = artifact, job, settings

    @property
    def failure(self) -> RankError | None:
        """What ended the job, if something did."""
        return self.job.failure

    def executor(self) -> ShardedExecutor:
        """Loads this rank's part and waits for the others; called once, on the thread that is to run the steps.

        Raises:
            ArtifactError: it cannot run here.
            RankError: another rank could not get ready.
        """
        try:
            local = CpuExecutor(self.artifact, rank=0)
        except Exception as error:
            self.job.fail(0, f"getting ready: {error}", gone=False)
            raise
        return ShardedExecutor(local, self.job, step_timeout_s=self._settings.step_timeout_s)


@contextmanager
def leading(artifact: Artifact, place: Place | None, settings: Settings, environment: Mapping[str, str]) -> Iterator[Team | None]:
    """Rank 0: brings all ranks of an artifact together, and ends them in the end; None where one process is all there is.

    When the job fails, a process that is doing something else is interrupted: it gets SIGTERM again and again, as if from
    outside, and after LAST_S it is ended with status 1.

    Raises:
        SpecError: the number of ranks is wrong.
        RankError: some did not come, or do not fit; or, on leaving, one was lost meanwhile.
    """
    mesh = check_world(artifact, place)
    if mesh.size == 1:
        yield None
        return
    seat = _seat(place, mesh, settings)
    _share_threads(settings, place.local_world if place else mesh.size)
    with ExitStack() as stack:
        store = open_store(seat)
        children = Children()
        if place is None:
            stack.callback(children.stop)
            children.start(artifact.path, replace(seat, port=store.port), settings, environment)
        peers = gather(seat, store, facts(artifact), children.ended)
        address = next(iter(peers.values())).getsockname()[0]
        left = threading.Event()
        job = Job(mesh, peers, how_it_ended=children.how, on_failure=lambda error: _interrupt(error, left), silence_s=settings.silence_s)
        stack.callback(left.set)
        stack.callback(job.close)
        stack.enter_context(Groups(mesh, 0, keys(store, seat, GROUPS), address, settings.step_timeout_s))
        team = Team(artifact, job, settings)
        try:
            yield team
        except KeyboardInterrupt:
            if team.failure is None:
                raise
        if team.failure is not None:
            raise team.failure


def follow(artifact: Artifact, place: Place, settings: Settings) -> None:
    """Any other rank: joins, and runs what rank 0 says until it says stop.

    Raises:
        SpecError: the number of ranks is wrong.
        RankError: this rank was refused, or the job has failed.
    """
    mesh = check_world(artifact, place)
    _share_threads(settings, place.local_world)
    # Ctrl-C goes to all ranks at once, and torchrun sends SIGTERM to all: it is rank 0 that ends them, in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: _end_after(EXIT_S, 128 + number))
    seat = _seat(place, mesh, settings)
    store = open_store(seat)
    stream = join(seat, store, facts(artifact))
    address = stream.getsockname()[0]
    worker = Worker(place.rank, stream, on_end=lambda text: _end_after(LAST_S, 1, f"Error: {text}"), silence_s=settings.silence_s)
    try:

        def make() -> CpuExecutor:
            groups.append(Groups(mesh, place.rank, keys(store, seat, GROUPS), address, settings.step_timeout_s))
            return CpuExecutor(artifact, rank=place.rank)

        groups: list[Groups] = []
        worker.serve(make)
    finally:
        worker.close()
        for bound in groups:
            bound.close()


class Children:
    """Ranks that this process started, and is to end."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, path: Path, seat: Seat, settings: Settings, environment: Mapping[str, str]) -> None:
        """Starts every rank but 0 on this machine."""
        for rank in range(1, seat.world):
            command = [sys.executable, "-m", f"{__package__}.rank", str(path)]
            options: dict[str, float] = {"rank": rank, "world": seat.world, "port": seat.port, "threads": torch.get_num_threads()}
            options |= {"join-timeout": settings.join_timeout_s, "step-timeout": settings.step_timeout_s}
            command += [f"--{name}={value}" for name, value in options.items()]
            self._processes[rank] = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ended(self) -> str | None:
        """Which rank has ended, and how, if one has."""
        found = next((rank for rank, process in self._processes.items() if process.poll() is not None), None)
        return None if found is None else f"rank {found} ended before it was ready: {self.how(found)}; it says why above, if it could"

    def how(self, rank: int) -> str | None:
        """How a rank's process ended, which it is about to; None when it did not, or was started by somebody else."""
        process = self._processes.get(rank)
        if process is None:
            return None
        try:
            status = process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            return None
        if status < 0:
            return f"process {process.pid} was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"process {process.pid} ended with status {status}"

    def stop(self) -> None:
        """Waits until all have ended; those that do not are killed."""
        deadline = time.monotonic() + EXIT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _seat(place: Place | None, mesh: Mesh, settings: Settings) -> Seat:
    if place is None:
        return Seat(0, mesh.size, LOCALHOST, 0, settings.join_timeout_s, hosts_store=True)
    return Seat(place.rank, place.world, place.host, place.port, settings.join_timeout_s, place.prefix, place.hosts_store)


def _share_threads(settings: Settings, ranks: int) -> None:
    """Ranks that together ask for more threads than there are cores wait for each other at every operator."""
    torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // ranks))


def _interrupt(error: RankError, left: threading.Event) -> None:
    deadline = time.monotonic() + LAST_S
    while not left.wait(0.2):
        if time.monotonic() > deadline:
            _end(f"Error: {error}", 1)
        _thread.interrupt_main(signal.SIGTERM)


def _end_after(seconds: float, status: int, text: str = "") -> None:
    timer = threading.Timer(seconds, _end, (text, status))
    timer.daemon = True
    timer.start()


def _end(text: str, status: int) -> None:
    """Ends this process whatever its other threads wait for."""
    if text:
        print(text, file=sys.stderr, flush=True)
    os._exit(status)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise SpecError(f"{name} is {text!r}; legal is a whole number")
    return int(text)

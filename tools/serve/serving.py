"""Starts the service of an artifact, and the background build that adds executables to it."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...graphs.errors import ArtifactMissing, ModelError, NpucompileError, SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact, stamp
from ...lowering.artifact.lock import builder_of
from ...models.presets import BUNDLED
from ...runtime.engine import Engine
from ...runtime.engine_groups import EngineGroups, groups_apart
from ...runtime.executor import Executor
from ...runtime.kv_transfer.pools import Pools
from ...runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from ...server.engine.service import Service
from ...server.guard.limits import SocketLimits
from ...server.pictures.limits import MediaLimits
from ..builder import plan as planning
from ..cli import Home
from ..hub import checkpoint_of
from ..locate import artifact_path, check_family, newest_runnable
from ..progress import Progress
from ..ranks.executors import settled
from ..ranks.rank_settings import RankSettings
from .api_settings import ApiSettings
from .artifact_tokenizer import codec_of
from .options import PREFILL
from .pairing import Pairing
from .served import calm_collector, service_of

NO_PAIR = Pairing()

WITHOUT_BUILD = (
    "--no-build builds nothing: legal is `serve` without it, which serves a model uncompiled within seconds and compiles it meanwhile, or "
    f"`npucompile build MODEL` before, which compiles for minutes; `npucompile build {BUNDLED[0]} --backend eager` takes seconds"
)

POLL_S = 0.1
WATCH_POLLS = 8
"""How often within the limit of a step it is looked whether one has ended."""
BUILD_NICENESS = 10
"""Of compilers that run beside a server."""


@dataclass(frozen=True)
class RunningService:
    """A service, the engine under it, and what is closed before that."""

    service: Service
    engine: Engine | EngineGroups
    closing: ExitStack


@dataclass(frozen=True)
class StartedEngine:
    """An engine that steps.

    Attributes:
        pools: of its executor, where other servers read or write them.
        readiness: what probes say of it.
    """

    engine: Engine | EngineGroups
    pools: Pools | None
    readiness: Callable[[], Mapping[str, Any]]


def start_service(
    artifact: Artifact,
    load_executor: Callable[[], Executor],
    on_failure: Callable[[], None] = lambda: None,
    *,
    api: ApiSettings | None = None,
    limits: SocketLimits | None = None,
    pairing: Pairing = NO_PAIR,
    media: MediaLimits | None = None,
    **settings: Any,
) -> RunningService:
    """Loads an artifact and starts its engine; from then on this process traces and compiles nothing.

    Args:
        load_executor: called on the engine's thread.
        on_failure: called when no step can run any more; `engine.failure` says why.
        api: how the model presents itself.
        limits: of requests that wait or run.
        pairing: with which servers it works together.
        media: limits of pictures.
        settings: as of `start_engine`.

    Raises:
        ArtifactError: it cannot run here.
        RankError: another rank cannot run it.
        ModelError: the chat template cannot be used.
        SpecError: there is no parser of that name.
    """
    codec, api = codec_of(artifact), api or ApiSettings()
    # Before anything is loaded.
    chat = api.chat_of(artifact)
    started, closing = start_engine(artifact, load_executor, on_failure, pairing=pairing, **settings), ExitStack()
    joined = pairing.joined(started.engine, artifact, closing, started.pools) if started.pools else (started.engine, None)
    client, join = joined
    groups = started.engine.executor.groups
    paired = pairing.role == PREFILL
    service = service_of(client, artifact, codec, api, chat, groups, started.readiness, limits, media or MediaLimits(), paired=paired)
    if service.pictures:
        closing.callback(service.pictures.close)
    if join:
        join(service)
    return RunningService(service, started.engine, closing)


def start_engine(
    artifact: Artifact,
    load_executor: Callable[[], Executor],
    on_failure: Callable[[], None] = lambda: None,
    *,
    step_limit_s: float = math.inf,
    itl_target_ms: float | None = None,
    prefix_cache: PrefixCacheSettings | None = None,
    pairing: Pairing = NO_PAIR,
    lockstep: bool = False,
) -> StartedEngine:
    """Loads an artifact and starts its engine.

    Args:
        step_limit_s: how long a step may take before the engine counts as hanging; a thread watches it.
        itl_target_ms: see `runtime.scheduler.policy.Policy`.
        prefix_cache: how prefixes are kept; None keeps none.
        lockstep: whether dp groups step together even where they need not, as a journal of them does.

    Raises:
        ArtifactError, RankError: see `start_service`.
    """
    calm_collector()
    opened = list[Pools]()
    load = functools.partial(pairing.load, load_executor, opened.append)
    apart = groups_apart(artifact.manifest) and not lockstep
    start: Callable[..., Engine | EngineGroups] = EngineGroups.from_loader if apart else Engine.from_loader
    engine = start(load, on_failure, measured=True, itl_target_ms=itl_target_ms, prefix_cache=prefix_cache)
    watch(engine, step_limit_s)

    def readiness() -> Mapping[str, Any]:
        backends = engine.executor.backends
        compiled = sum(name != "eager" for name in backends.values())
        step_age_s = engine.step_age_s
        status = "stuck" if step_age_s > step_limit_s else "ok" if engine.alive else "failed" if engine.failure else "stopped"
        return {"status": status, "buckets": len(backends), "compiled_buckets": compiled, "step_age_s": round(step_age_s, 3)}

    return StartedEngine(engine, opened[0] if opened else None, readiness)


def watch(engine: Engine | EngineGroups, limit_s: float) -> None:
    """Starts a thread that gives the engine up when a step has taken longer than `limit_s`; without a limit it starts none.

    A step that hangs ends the server with an error instead of all its clients waiting. One beside which this process stood still has the
    time again.
    """
    if math.isinf(limit_s):
        return

    def run() -> None:
        pause_s, looked_s = min(1.0, limit_s / WATCH_POLLS), time.monotonic()
        resumed_s = -math.inf
        while engine.failure is None:
            if (now_s := time.monotonic()) - looked_s > limit_s / 2:
                resumed_s = now_s
            looked_s = now_s
            if engine.step_age_s > limit_s and now_s - resumed_s > limit_s:
                engine.give_up(f"a step has not ended within {limit_s:g} s, the time that --step-timeout gives it")
            time.sleep(pause_s)

    threading.Thread(target=run, name="npucompile-watchdog", daemon=True).start()


class BackgroundBuild:
    """`npucompile build` in a process of its own, one graph at a time and at low priority. It ends with this process at the latest.

    Args:
        arguments: of the build command, without its output directory and scheduling options.
        out: the artifact's directory.
        environment: of that process.
    """

    def __init__(self, arguments: Sequence[str], out: Path, environment: Mapping[str, str]) -> None:
        self.out, self._stamp_before = out, stamp(out)
        command = [sys.executable, "-m", "npucompile.tools.serve.child", str(os.getpid()), "build", *arguments]
        command += ["--out", str(out), "--jobs", "1", "--nice", str(BUILD_NICENESS)]
        self.process = subprocess.Popen(command, env=dict(environment), stdout=subprocess.DEVNULL)

    def wait_servable(self) -> Artifact:
        """Waits until the build has published an artifact; one that existed before counts where the build finds it up to date.

        Raises:
            NpucompileError: the build ended without one; its errors are on standard error.
        """
        while True:
            status = self.process.poll()
            if stamp(self.out) not in (None, None if status == 0 else self._stamp_before):
                return Artifact.open(self.out)
            if status is not None:
                raise NpucompileError(f"the build ended with status {status} before there was anything to serve; it said why above")
            time.sleep(POLL_S)

    def wait_complete(self) -> Artifact:
        """Waits for the end of the build.

        Raises:
            NpucompileError: it failed; its errors are on standard error.
        """
        if status := self.process.wait():
            raise NpucompileError(f"the build ended with status {status}; it said why above")
        return Artifact.open(self.out)

    def stop(self) -> None:
        """Ends the build if it is still running; the next build continues from the executables that it finished."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


def incomplete(artifact: Artifact) -> bool:
    """Whether some buckets of an artifact have no executable yet."""
    manifest = artifact.manifest
    return manifest.backend not in ("eager", "null") and any(entry.compiled is None and not entry.refused for entry in manifest.graphs)


def find_or_build(
    home: Home, name: str | None, settings: RankSettings, no_build: bool, progress: Progress, family: str | None = None
) -> tuple[Artifact, BackgroundBuild | None]:
    """The artifact to serve, and the background build that completes it, if one is needed.

    Raises:
        ArtifactError: the artifact cannot run here or was built with another family, or none can and `no_build` is set.
        SpecError: a family without a model.
        NpucompileError: the name is neither an artifact's nor a model's, or the build failed.
    """
    if name is None and family is not None:
        raise SpecError(f"--family {family}: of which model? legal is a MODEL too")
    if name is None:
        artifact, skipped = newest_runnable(home.artifacts, lambda artifact: settled(artifact, settings))
        for reason in skipped:
            progress.say(f"passed over: {reason}")
        if artifact is not None:
            return artifact, _resume_build(home, artifact, no_build, progress)
        if no_build:
            raise ArtifactMissing(f"nothing under {home.artifacts} can run here; {WITHOUT_BUILD}")
        name = BUNDLED[0]
        progress.say(f"nothing built that can run here; building the bundled model {name}")
    else:
        try:
            artifact = Artifact.open(artifact_path(home.artifacts, name))
            artifact.check_runnable()
            if family is not None:
                check_family(artifact, family)
            return artifact, _resume_build(home, artifact, no_build, progress)
        except ArtifactMissing as error:
            if no_build:
                raise ArtifactMissing(f"{error}; {WITHOUT_BUILD}") from None
    name = checkpoint_of(name, home.environment, progress)
    plan = planning.plan(planning.Options(name, family=family))
    if plan.source.tokenizer is None:
        raise ModelError(f"{plan.source.checkpoint_dir} has no tokenizer.json, and serving text needs one")
    arguments = [name, "--family", family] if family else [name]
    build = BackgroundBuild(arguments, planning.default_out(home.artifacts, plan.source), home.environment)
    try:
        return build.wait_servable(), build
    except BaseException:
        build.stop()
        raise


def _resume_build(home: Home, artifact: Artifact, no_build: bool, progress: Progress) -> BackgroundBuild | None:
    """A background build of what an interrupted build left uncompiled; none where another process, as another server of it, is at it; and
    none on a mesh, where ranks could come to run different graphs."""
    manifest = artifact.manifest
    if no_build or Mesh.parse(manifest.mesh).size > 1 or not incomplete(artifact) or not manifest.build_arguments:
        return None
    if other := builder_of(artifact.path):
        progress.say(f"process {other} builds what {artifact.path.name} lacks; it is run here as well when it is there")
        return None
    return BackgroundBuild(manifest.build_arguments, artifact.path, home.environment)

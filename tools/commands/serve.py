"""`npucompile serve`: serves an artifact, and builds it in the background where that is needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from ...graphs.errors import LoweringError, NpucompileError, SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact
from ...lowering.backends.inductor import unpacking
from ...lowering.backends.inductor.backend import NAME as INDUCTOR
from ...runtime.distributed.rendezvous import RendezvousConfig
from ...runtime.engine import Engine
from ...runtime.engine_groups import EngineGroups
from ...runtime.journal import Journal, JournalFile
from ...server.client import WEBSOCKET_PATH
from ...server.engine.lifecycle import Lifecycle
from ...server.guard.access import Access
from ...server.run import Stop, allow_open_files, running, websocket_url
from ...server.telemetry.access_log import AccessLog
from ...server.telemetry.tracing import Tracing
from ..builder.settings.model import FAMILY
from ..cli import Home
from ..locate import artifact_path, newest_runnable
from ..progress import Progress
from ..ranks.binding import bound
from ..ranks.environment import applied
from ..ranks.executors import choose_device, settled
from ..ranks.launch import ABORT_S, exit_after, open_named_artifact, opened_ranks, run_rank
from ..ranks.nodes import TOKEN_VARIABLE, NodeOptions, node_config, read_token, said_of
from ..ranks.rank_settings import SILENCE_MARGIN_S, RankSettings
from ..ranks.torchrun import launcher_config
from ..serve.api_servers import NPU, Chosen, chosen, said_of_choice
from ..serve.checkpoint_texts import with_texts_of
from ..serve.door import DoorSettings
from ..serve.doors import Doors
from ..serve.options import BOTH, HOST, PORT, SECTIONS
from ..serve.pairing import Pairing, transfer_variables
from ..serve.recording import facts_of
from ..serve.served import said_of_ends
from ..serve.serving import RunningService, StartedEngine, find_or_build, start_engine, start_service
from ..serve.vision import said_of_pictures
from .config_file import config_file
from .family_option import family_option
from .option_groups import grouped
from .other_names import KnowsOtherNames
from .server_options import api_settings, media_limits, prefix_cache_settings, read_keys, server_options, serving_settings

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
GROUPS = {title: tuple(f"--{option.option}" for option in options) for title, options in SECTIONS.items()}
GROUPS["What is built and read first"] += (f"--{FAMILY.option}",)
GROUPS["What most servers say"] += ("--config", "--print-config")
"""Sections of the help."""


@click.command("serve", cls=grouped(GROUPS, KnowsOtherNames))
@click.argument("artifact_or_model", required=False)
@server_options
@config_file(GROUPS)
@family_option
@click.pass_obj
def command(
    home: Home,
    /,
    artifact_or_model: str | None,
    host: str,
    port: int,
    threads: int | None,
    join_timeout: float,
    step_timeout: float | None,
    itl_target: float | None,
    cpu_binding: bool,
    device: str,
    checkpoint: Path | None,
    off: tuple[str, ...],
    expert_map: str | None,
    family: str | None,
    no_build: bool,
    api_servers: str | int,
    access_log: str | None,
    transfer_port: int | None,
    otlp_traces_endpoint: str | None,
    record: Path | None,
    verbose: bool,
    nnodes: int,
    node_rank: int,
    master_addr: str | None,
    host_address: str | None,
    rank_token: Path | None,
    **options: Any,
) -> None:
    """Serve an artifact, or build and serve a model.

    \b
    npucompile serve                            the newest artifact that runs here, or else the bundled model
    npucompile serve qwen3.5-tiny --port 8001   a model, built first where it is not
    npucompile serve DIR --api-key keys.txt     an artifact, for who has one of these keys
    npucompile serve A --role prefill           of a pair; the other is B --role decode --prefill http://HOST:8000
    npucompile serve --print-config > f.toml    every option, also those that few need: then serve DIR --config f.toml

    Buckets without an executable run uncompiled; a background build adds executables, and the server swaps them in. An artifact for NPUs
    runs on NPUs or, with --device emulated, on this CPU: a rehearsal, for small models. For several devices it runs as a process per
    device, which this command or torchrun starts, on several machines with --nnodes.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    if threads:
        torch.set_num_threads(threads)
    settings = RankSettings(
        *(threads, join_timeout, step_timeout, device, checkpoint, expert_map, home.cache), host_address=host_address, off=frozenset(off)
    )
    config = rank_config(home, artifact_or_model, settings, NodeOptions(nnodes, node_rank, master_addr, rank_token))
    address = config.node.address if config else ""
    if config and config.local_rank == 0 and address:
        Progress().say(said_of(config))
    if config and config.rank:
        artifact = open_named_artifact(home, artifact_or_model, config.local_rank)
        settings, progress = settled(artifact, settings), Progress(quiet=config.local_rank > 0)
        if cpu_binding:
            settings = bound(settings, config.local_world_size, home.environment, progress)
        home = applied(home, artifact, settings, progress, address).with_variables(transfer_variables(transfer_port, artifact))
        run_rank(artifact, config, settings, home.environment, progress)
        return
    serving, api, media = serving_settings(home.environment, options), api_settings(options), media_limits(options)
    pairing = Pairing.of(
        {**options, "record": record, "host_address": host_address or address}, host, read_keys(options["api_key"], home.environment)
    )
    choice = Chosen(api_servers, "") if isinstance(api_servers, int) else auto(home, artifact_or_model, settings, config, pairing.role)
    if choice.doors and pairing.role != BOTH:
        raise SpecError(f"--api-servers {api_servers} with --role {pairing.role}: a server of a pair is one process; legal is 0")
    warn_if_open(host, serving.access)
    allow_open_files()
    door = DoorSettings(host, serving, api, media, access_log, otlp_traces_endpoint, verbose)
    tracing = Tracing.to(otlp_traces_endpoint) if otlp_traces_endpoint and not choice.doors else None
    # Files are closed last: the server and the engine write to them while they end. The port is bound before anything is built, and
    # answers: whoever watches the server sees it start.
    with (
        ExitStack() as files,
        opened_log(None if choice.doors else access_log) as access,
        Stop(raises=True) as stop,
        Doors(door, port, choice.doors, home.environment)
        if choice.doors
        else running(Lifecycle(), host, port, settings=replace(serving, access_log=access)) as server,
        ExitStack() as stack,
    ):
        progress = Progress()
        if config:
            artifact, build = open_named_artifact(home, artifact_or_model, config.local_rank), None
        else:
            artifact, build = find_or_build(home, artifact_or_model, settings, no_build, progress, family)
        if build:
            stack.callback(build.stop)
        packages = [entry.compiled.file for entry in artifact.manifest.graphs if entry.compiled and entry.compiled.backend == INDUCTOR]
        unpacked = sum((artifact.path / name).stat().st_size for name in packages)
        if packages and (reason := unpacking.problem(home.temporary, unpacked)):
            raise LoweringError(reason)
        settings = settled(artifact, settings)
        if cpu_binding:
            ranks = config.local_world_size if config else Mesh.parse(artifact.manifest.mesh).size
            settings = bound(settings, ranks, home.environment, progress)
        artifact, pairing = with_texts_of(artifact, checkpoint), pairing.settled(artifact, settings.device, checkpoint)
        home = applied(home, artifact, settings, progress, address).with_variables(transfer_variables(transfer_port, artifact))
        engines: list[Engine | EngineGroups] = []

        def ranks_failed(reason: str) -> None:
            if address:
                # A machine that is cut off leaves this one waiting in a step; its error comes when it is ended by force.
                progress.say(reason)
            for engine in engines:
                engine.give_up(reason)

        load_executor = stack.enter_context(opened_ranks(artifact, config, settings, home.environment, progress, ranks_failed))
        steps: dict[str, Any] = {
            "step_limit_s": settings.step_limit_s + SILENCE_MARGIN_S,
            "itl_target_ms": itl_target,
            "prefix_cache": prefix_cache_settings(options),
            "lockstep": record is not None,
        }
        # Of one process, a service and its engine; of two, the engine here.
        served: RunningService | StartedEngine
        if isinstance(server, Doors):
            served = start_engine(artifact, load_executor, **steps)
        else:
            served = start_service(artifact, load_executor, api=api, limits=serving.limits, pairing=pairing, media=media, **steps)
        engines.append(served.engine)
        stack.callback(served.engine.stop, drain=False)
        if record:
            assert isinstance(served.engine, Engine)
            written = files.enter_context(closing(JournalFile(record, facts_of(artifact, served.engine))))
            served.engine.stepper.journal = Journal(written.write)
        if isinstance(server, Doors):
            assert isinstance(served, StartedEngine)
            name, notes = server.open(artifact, served)
            prefills = False
        else:
            assert isinstance(served, RunningService)
            stack.push(served.closing)
            if access:
                served.engine.on_end = access.ended
            if tracing:
                tracing.model = served.service.model.name
                served.service.tracing = tracing
                files.callback(tracing.close)
            server.lifecycle.service = service = served.service
            name, prefills = service.model.name, service.handovers is not None
            notes = (said_of_ends(service), *said_of_pictures(service), *api.said_of_sampling(artifact))
        stop.raises = False
        notes = (*notes, *pairing.notes(transfer_port, artifact), *said_of_choice(choice))
        announce(name, served.engine.executor.backends, artifact, build is not None, progress, notes, prefills)(server.url)
        server.wait(stop, lambda: served.engine.failure is not None)
        if served.engine.failure:
            # A step that hangs may hold this process at its end.
            exit_after(ABORT_S, 1, f"Error: {served.engine.failure}")
            raise NpucompileError(served.engine.failure)


def auto(home: Home, name: str | None, settings: RankSettings, config: RendezvousConfig | None, role: str) -> Chosen:
    """How many processes speak with clients, before anything is built or loaded: the port is bound first."""
    artifact = None
    # What cannot be served is refused where it is opened to be served.
    with suppress(NpucompileError):
        if name is None:
            artifact, _ = newest_runnable(home.artifacts, lambda found: settled(found, settings))
        else:
            artifact = Artifact.open(artifact_path(home.artifacts, name), check=False)
        if artifact and role == BOTH and choose_device(artifact, settings.device) == NPU:
            ranks = config.local_world_size if config else Mesh.parse(artifact.manifest.mesh).size
            return chosen(artifact, len(os.sched_getaffinity(0)), ranks)
    return Chosen(0, "")


def rank_config(home: Home, name: str | None, settings: RankSettings, options: NodeOptions) -> RendezvousConfig | None:
    """Which rank this process is, as torchrun or the options say; None where it is the only one, or starts all others on this machine.

    Raises:
        SpecError: both say it, or what they say is not legal.
        RankError: there is no route to the other machines.
    """
    environment = {**home.environment, TOKEN_VARIABLE: read_token(options.rank_token, home.environment)}
    config = launcher_config(environment, settings)
    if config and options.nnodes > 1:
        raise SpecError(
            f"torchrun started this process as rank {config.rank}, and --nnodes {options.nnodes} starts ranks; legal is one of both"
        )
    if config or (options.nnodes == 1 and not options.node_rank):
        return config
    mesh = Mesh.parse(open_named_artifact(home, name, local_rank=1).manifest.mesh)
    return node_config(options, mesh, environment, settings.join_timeout_s, settings.host_address)


def opened_log(file: str | None) -> AbstractContextManager[AccessLog | None]:
    """An access log for the length of a `with`; "-" is standard output, None no log."""
    return nullcontext() if file is None else AccessLog.opened(None if file == "-" else Path(file))


def warn_if_open(host: str, access: Access) -> None:
    """Says so where anyone who reaches this machine may use the server."""
    if not access.key_digests and host not in LOOPBACK:
        log.warning("listening on %s without --api-key: whoever reaches this address can use the server", host)


def announce(
    name: str,
    backends: Mapping[str, str],
    artifact: Artifact,
    building: bool,
    progress: Progress,
    notes: Sequence[str] = (),
    prefills: bool = False,
) -> Callable[[str], None]:
    """A callback for when requests are served, which prints what is served, these notes, and how to reach it.

    Args:
        name: of the model.
        backends: of buckets, by name.
        prefills: it computes prompts for decode servers.
    """
    uncompiled = [name for name, backend in backends.items() if backend == "eager"]
    ranks = Mesh.parse(artifact.manifest.mesh).size

    def ready(url: str) -> None:
        progress.say(f"serving {name} from {artifact.path}: {len(backends)} buckets, {len(uncompiled)} uncompiled")
        if ranks > 1:
            progress.say(f"  {ranks} ranks of mesh {artifact.manifest.mesh}, a process each")
        for note in notes:
            progress.say(f"  {note}")
        if uncompiled and building:
            progress.say("  uncompiled buckets run the reference graph until the build behind this server has compiled them")
        base = f"http{url.removeprefix('ws').removesuffix(WEBSOCKET_PATH)}"
        progress.say(f"  websocket  {url}   health  {base}/health   chat page  {base}/")
        if prefills:
            progress.say(f"  computes prompts for decode servers: npucompile serve ... --role decode --prefill {base}")
            return
        progress.say(f'  talk to it: npucompile chat "In the beginning"{"" if url == websocket_url(HOST, PORT) else f" --url {url}"}')

    return ready

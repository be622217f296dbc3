"""What the options of a prefill or decode server come to, and how its service joins its pair."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact
from ...runtime.engine import Engine
from ...runtime.engine_groups import EngineGroups
from ...runtime.executor import Executor
from ...runtime.kv_transfer.layout import instance_of, located
from ...runtime.kv_transfer.opening import open_pools, protocol_of
from ...runtime.kv_transfer.pools import Pools
from ...runtime.kv_transfer.room import DEFAULTS, Timeouts
from ...server.engine.service import EngineClient, Service
from ...server.fleet.decode_engine import DecodeEngine
from ...server.fleet.prefill_hub import PrefillHub
from ...server.fleet.prefill_link import socket_url
from ..ranks.weights import served_digest
from .options import BOTH, DECODE, PREFILL, TRANSFER_PORTS

MOONCAKE_PORTS = 15_000, 17_000
WILDCARDS = ("0.0.0.0", "::", "")
_SIDES = {PREFILL, DECODE}
"""Roles of one side, named for the kind of step that it runs."""


@dataclass(frozen=True)
class Pairing:
    """What a server of a pair is told.

    Attributes:
        role: "both" where nothing is handed over.
        prefill: URLs of the prefill servers of a decode server.
        host: address by which the other servers write to this machine's memory.
        protocol: of the transfer engine; "" where the kind of device decides.
        timeouts: of rooms.
        key: what it shows to prefill servers; "" for none.
        source: digest of the checkpoint that is served.
    """

    role: str = BOTH
    prefill: tuple[str, ...] = ()
    host: str = ""
    protocol: str = ""
    timeouts: Timeouts = DEFAULTS
    key: str = ""
    source: str = ""

    @staticmethod
    def of(options: Mapping[str, Any], host: str, keys: Sequence[str]) -> Pairing:
        """What the options of serve come to.

        Args:
            host: address that the server listens on.
            keys: that clients may use.

        Raises:
            SpecError: options that do not belong to the role, or are missing for it.
        """
        role, given = options["role"], options["prefill"]
        urls = tuple(url.strip().rstrip("/") for url in (given or "").split(",") if url.strip())
        for url in urls:
            socket_url(url)
        if (role == DECODE) != bool(urls):
            legal = f"`--role {DECODE} --prefill URL`, or neither"
            raise SpecError(f"--role {role} {'with' if urls else 'without'} --prefill{f' {given}' if urls else ''}; legal is {legal}")
        if options["record"] and role == DECODE:
            raise SpecError("--record with --role decode: a journal has no pages of other servers; legal is to record the prefill server")
        seconds = options["handover_timeout"]
        timeouts = DEFAULTS._replace(asked=seconds, held=seconds, receiving=seconds)
        address = options["host_address"] or (_own_address(urls[0]) if urls else "127.0.0.1" if host in WILDCARDS else host)
        return Pairing(role, urls, address, options["transfer_protocol"] or "", timeouts, keys[0] if keys else "")

    def check(self, artifact: Artifact) -> None:
        """Refuses a role that the buckets of an artifact cannot have.

        Raises:
            SpecError: a kind of bucket is missing.
        """
        kinds = {entry.bucket.kind for entry in artifact.manifest.graphs}
        wanted = _SIDES if self.role == BOTH else {self.role}
        if wanted - kinds:
            legal = " or ".join(f"`--role {side}`" for side in sorted(kinds & _SIDES))
            missing = " and ".join(sorted(wanted - kinds))
            raise SpecError(f"--role {self.role}: {artifact.path} has no {missing} bucket; legal is {legal}, or a build with both kinds")

    def settled(self, artifact: Artifact, device: str, checkpoint: Path | None) -> Pairing:
        """With what an artifact and its place decide.

        Args:
            device: kind of device that runs it.
            checkpoint: directory of the weights that the user named, or None.

        Raises: as `check`, and CheckpointError where the directory cannot be read.
        """
        self.check(artifact)
        if self.role == BOTH:
            return self
        return replace(self, protocol=self.protocol or protocol_of(device), source=served_digest(artifact, checkpoint))

    def notes(self, port: int | None, artifact: Artifact) -> list[str]:
        """What is said at the start.

        Args:
            port: the first one of the transfer engines.
        """
        if self.role == BOTH:
            return []
        first, last = transfer_ports(port, artifact)
        return [
            f"ports of the transfer engine, of {first} to {last} and at every address of this machine (Mooncake binds to none): "
            "whoever reaches them can read and write this server's memory; keep strangers off"
        ]

    def load(self, load_executor: Callable[[], Executor], opened: Callable[[Pools], None]) -> Executor:
        """Loads an executor and opens its pools for the other servers, both by the thread that steps.

        Args:
            opened: takes them, if there are other servers.

        Raises:
            TransferError: the transfer engine cannot be used.
            LayoutError: the model has a pool that no handover knows.
        """
        executor = load_executor()
        if self.role != BOTH:
            opened(open_pools(executor, self.host, self.protocol))
        return executor

    def joined(
        self, engine: Engine | EngineGroups, artifact: Artifact, closing: ExitStack, pools: Pools
    ) -> tuple[EngineClient, Callable[[Service], None]]:
        """The engine as its server sees it, and what is to be done to the service.

        Args:
            pools: that `load` has opened.
        """
        closing.callback(pools.close)
        instance = located(instance_of(artifact.manifest, self.source), pools.ranks)
        if self.role == PREFILL:

            def join(service: Service) -> None:
                service.handovers = PrefillHub(engine, pools, instance, self.timeouts)

            return engine, join
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        decoding = DecodeEngine(engine, instance, pools, self.prefill, headers, self.timeouts)
        closing.callback(decoding.close)

        def join_decoding(service: Service) -> None:
            service.decoding = decoding

        return decoding, join_decoding


def transfer_variables(port: int | None, artifact: Artifact) -> Mapping[str, str]:
    """Variables by which transfer engines take ports from this one on; none where any will do."""
    if port is None:
        return {}
    first, last = transfer_ports(port, artifact)
    return {"MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(last)}


def transfer_ports(port: int | None, artifact: Artifact) -> tuple[int, int]:
    """The first and the last port that transfer engines take; by default those of Mooncake's configuration."""
    return MOONCAKE_PORTS if port is None else (port, port + TRANSFER_PORTS * Mesh.parse(artifact.manifest.mesh).size - 1)


def _own_address(url: str) -> str:
    """The address of this machine on the route to a server."""
    parts = urlsplit(url)
    try:
        kind, *_, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: it only looks the route up.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SpecError(f"--prefill {url}: {error}; legal is a server that this machine has a route to, or --host-address") from None

"""Rendezvous of the ranks: each proves that it runs the same artifact and versions, or all are refused with the difference.

Rank 0 listens and the others connect to it; nothing is allocated before all match. The store of torch, which gloo needs anyway, only
says at which port. It answers whoever reaches it, so it listens where it was asked to and nowhere else, and the token that proves that a
connection comes from a rank is not in it: whoever starts the ranks gives it to each.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ...graphs.errors import ProtocolError
from .control_plane import RankError
from .messages import RankMessage, encode, receive

CONTROL = "control"
"""Substore in which rank 0 says where it listens."""

ADDRESS = "address"
"""Key there: rank 0's port."""

POLL_S = 0.1
HELLO_S = 5.0
"""How long a new connection may take to send its hello."""


@dataclass(frozen=True)
class RendezvousConfig:
    """Which rank this process is, and where the ranks meet.

    Attributes:
        world_size: number of ranks.
        host, port: of the store.
        local_world_size: number of ranks on this machine.
        timeout_s: how long to wait for the others.
        prefix: of the keys in the store.
        hosts_store: whether this process creates the store; port 0 takes a free one.
        local_rank: number of this rank on its machine.
        token: the same on all ranks, and known to nobody else.
    """

    rank: int
    world_size: int
    host: str
    port: int
    local_world_size: int
    timeout_s: float = 60.0
    prefix: str = "npucompile"
    hosts_store: bool = False
    local_rank: int = 0
    token: str = field(default="", repr=False)


def open_store(config: RendezvousConfig) -> TCPStore:
    """The store that all ranks share.

    Raises:
        RankError: when it cannot be reached, or created.
    """
    timeout = datetime.timedelta(seconds=config.timeout_s)
    try:
        if not config.hosts_store:
            return TCPStore(config.host, config.port, None, False, timeout, wait_for_workers=False)
        # By itself it would listen on all addresses of the machine.
        with _listener(config.host, config.port, config.world_size) as listener:
            port, descriptor = listener.getsockname()[1], listener.detach()
        return TCPStore(config.host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    except (RuntimeError, OSError) as error:
        action = "create the store at" if config.hosts_store else f"reach the store within {config.timeout_s:g} s at"
        where = f"{config.host} port {config.port}"
        raise RankError(f"rank {config.rank} of {config.world_size} cannot {action} {where}: {_first_line(error)}") from None


def substore(store: TCPStore, config: RendezvousConfig, purpose: str) -> Store:
    """The part of the store for one purpose."""
    return PrefixStore(f"{config.prefix}/{purpose}", store)


def accept_ranks(
    config: RendezvousConfig, store: TCPStore, identity: Mapping[str, str], exited: Callable[[], str | None] = lambda: None
) -> dict[int, socket.socket]:
    """Rank 0: waits for all other ranks, and accepts them if all match.

    Args:
        identity: what must be equal on all ranks, by name.
        exited: describes a rank's process that has already ended; None while there is none.

    Returns:
        A connected socket for every other rank.

    Raises:
        RankError: naming the ranks that did not connect in time, or both ranks and both values of what differs.
    """
    connections: dict[int, socket.socket] = {}
    refusal: str | None = None
    deadline = time.monotonic() + config.timeout_s
    with _listening(config, store) as listener:
        try:
            while refusal is None and len(connections) < config.world_size - 1:
                refusal = _accept_one(listener, connections, config, identity) or _late(connections, config, deadline) or exited()
            answer = encode("welcome") if refusal is None else encode("refused", message=refusal)
            for stream in connections.values():
                stream.sendall(answer)
        except OSError as error:
            refusal = f"a rank was lost during the rendezvous: {error}"
    if refusal is not None:
        for stream in connections.values():
            stream.close()
        raise RankError(refusal)
    return connections


def connect_to_rank_0(config: RendezvousConfig, store: TCPStore, identity: Mapping[str, str]) -> socket.socket:
    """Any other rank: connects to rank 0 and waits until all ranks have.

    Raises:
        RankError: when rank 0 is not there in time, or refuses; with its reason.
    """
    me = f"rank {config.rank} of {config.world_size}"
    try:
        port = int(substore(store, config, CONTROL).get(ADDRESS))
    except RuntimeError as error:
        late = f"rank 0 did not come to {config.host} port {config.port} within {config.timeout_s:g} s"
        raise RankError(f"{me}: {late}: {_first_line(error)}") from None
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(socket.create_connection((config.host, port), timeout=config.timeout_s))
            stream.sendall(encode("hello", token=config.token, rank=config.rank, world_size=config.world_size, identity=dict(identity)))
            # Rank 0 may wait as long for the others as this rank waited for it.
            stream.settimeout(2 * config.timeout_s)
            answer = receive(stream)
        except (OSError, ProtocolError) as error:
            raise RankError(f"{me} lost rank 0 at {config.host} during the rendezvous: {error}") from None
        if answer.kind != "welcome":
            raise RankError(str(answer.fields.get("message", f"rank 0 answered {answer.kind!r}")))
        stack.pop_all()
        return stream


@contextlib.contextmanager
def _listening(config: RendezvousConfig, store: TCPStore) -> Iterator[socket.socket]:
    try:
        listener = _listener(config.host, 0, config.world_size)
    except OSError as error:
        legal = "legal is an address of the machine that rank 0 runs on"
        raise RankError(f"rank 0 cannot listen on {config.host}: {error}; {legal}") from None
    with listener:
        listener.settimeout(POLL_S)
        substore(store, config, CONTROL).set(ADDRESS, str(listener.getsockname()[1]))
        yield listener


def _listener(host: str, port: int, backlog: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog)


def _accept_one(
    listener: socket.socket, connections: dict[int, socket.socket], config: RendezvousConfig, identity: Mapping[str, str]
) -> str | None:
    """Accepts one rank if one is connecting; returns the reason if all must be refused because of it."""
    try:
        stream, _ = listener.accept()
    except TimeoutError:
        return None
    stream.settimeout(HELLO_S)
    try:
        hello = receive(stream)
    except (OSError, ProtocolError):
        hello = None
    # Whoever does not know the token is not a rank; the rendezvous goes on without that connection.
    if hello is None or hello.kind != "hello" or not _is_token(hello.fields.get("token"), config.token):
        stream.close()
        return None
    refusal = _mismatch(hello, connections, config, identity)
    rank = hello.fields["rank"]
    connections[rank if rank not in connections else -1] = stream
    return refusal


def _is_token(given: object, token: str) -> bool:
    return isinstance(given, str) and secrets.compare_digest(given.encode(), token.encode())


def _mismatch(
    hello: RankMessage, connections: Mapping[int, socket.socket], config: RendezvousConfig, identity: Mapping[str, str]
) -> str | None:
    rank, size, other = hello.fields["rank"], hello.fields["world_size"], hello.fields["identity"]
    if size != config.world_size:
        return f"rank {rank} was started as one of {size} ranks, rank 0 as one of {config.world_size}; all ranks are to be started together"
    if not 0 < rank < config.world_size or rank in connections:
        return f"two processes came as rank {rank}; the ranks are 0 to {config.world_size - 1}, each once"
    different = [name for name in sorted({*identity, *other}) if identity.get(name) != other.get(name)]
    if not different:
        return None
    unknown = "not known"
    values = [f"{name} is {other.get(name, unknown)} on rank {rank} and {identity.get(name, unknown)} on rank 0" for name in different]
    return f"the ranks do not match: {'; '.join(values)}; all must run the same artifact with the same versions"


def _late(connections: Mapping[int, socket.socket], config: RendezvousConfig, deadline: float) -> str | None:
    if time.monotonic() < deadline or len(connections) == config.world_size - 1:
        return None
    missing = ", ".join(str(rank) for rank in range(1, config.world_size) if rank not in connections)
    present = ", ".join(map(str, sorted(connections))) or "none"
    timeout = f"{config.host} within {config.timeout_s:g} s"
    return f"ranks {missing} of {config.world_size} did not come to {timeout}; those that came: {present}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

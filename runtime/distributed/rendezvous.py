"""Turns processes that know a common address into ranks that know each other, or into a refusal that names who does not fit.

Rank 0 listens and the others come to it, each saying what it is about to run; nothing is allocated before all fit. The store of
torch, which gloo needs anyway, only tells where rank 0 listens.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ...graphs.errors import ProtocolError
from .control_plane import RankError
from .messages import Message, encode, receive

WHERE = "control"
POLL_S = 0.1
HELLO_S = 5.0
"""How long someone who connected may take to say who it is."""


@dataclass(frozen=True)
class Seat:
    """One rank's place in a job.

    Attributes:
        world: number of ranks.
        host, port: where the store is.
        timeout_s: how long to wait for the others.
        prefix: of this job's keys in the store.
        hosts_store: whether this process is to offer the store; port 0 takes a free one.
    """

    rank: int
    world: int
    host: str
    port: int
    timeout_s: float = 60.0
    prefix: str = "npucompile"
    hosts_store: bool = False


def open_store(seat: Seat) -> TCPStore:
    """The store that all ranks share.

    Raises:
        RankError: when it cannot be reached, or offered.
    """
    wait = datetime.timedelta(seconds=seat.timeout_s)
    try:
        return TCPStore(seat.host, seat.port, None, seat.hosts_store, wait, wait_for_workers=False)
    except RuntimeError as error:
        what = "offer the store of the job at" if seat.hosts_store else f"reach the store of the job within {seat.timeout_s:g} s at"
        raise RankError(f"rank {seat.rank} of {seat.world} cannot {what} {seat.host} port {seat.port}: {_first_line(error)}") from None


def keys(store: TCPStore, seat: Seat, purpose: str) -> Store:
    """A part of the store for one purpose."""
    return PrefixStore(f"{seat.prefix}/{purpose}", store)


@contextlib.contextmanager
def _listening(seat: Seat, store: TCPStore) -> Iterator[tuple[socket.socket, str]]:
    try:
        listener = socket.create_server((seat.host, 0), family=socket.AF_INET6 if ":" in seat.host else socket.AF_INET, backlog=seat.world)
    except OSError as error:
        raise RankError(f"rank 0 cannot listen on {seat.host}: {error}; legal is an address of the machine that rank 0 runs on") from None
    with listener:
        listener.settimeout(POLL_S)
        token = secrets.token_hex(16)
        keys(store, seat, WHERE).set("where", f"{listener.getsockname()[1]} {token}")
        yield listener, token


def gather(
    seat: Seat, store: TCPStore, facts: Mapping[str, str], ended: Callable[[], str | None] = lambda: None
) -> dict[int, socket.socket]:
    """Rank 0: waits for all others, and lets them in when all are to run the same.

    Args:
        facts: what must be equal on all ranks, by name.
        ended: says so when a process that would be a rank has ended already.

    Returns:
        A connected socket for every other rank.

    Raises:
        RankError: naming the ranks that did not come in time, or both ranks and both values of a fact.
    """
    found: dict[int, socket.socket] = {}
    refusal: str | None = None
    deadline = time.monotonic() + seat.timeout_s
    with _listening(seat, store) as (listener, token):
        try:
            while refusal is None and len(found) < seat.world - 1:
                refusal = _admit(listener, token, found, seat, facts) or _late(found, seat, deadline) or ended()
            answer = encode("welcome") if refusal is None else encode("refused", message=refusal)
            for stream in found.values():
                stream.sendall(answer)
        except OSError as error:
            refusal = f"a rank was lost while the job was starting: {error}"
    if refusal is not None:
        for stream in found.values():
            stream.close()
        raise RankError(refusal)
    return found


def join(seat: Seat, store: TCPStore, facts: Mapping[str, str]) -> socket.socket:
    """Any other rank: comes to rank 0 and waits until all are there.

    Raises:
        RankError: when rank 0 is not there in time, or refuses; with its reason.
    """
    me = f"rank {seat.rank} of {seat.world}"
    try:
        port, token = keys(store, seat, WHERE).get("where").decode().split()
    except RuntimeError as error:
        late = f"rank 0 did not come to {seat.host} port {seat.port} within {seat.timeout_s:g} s"
        raise RankError(f"{me}: {late}: {_first_line(error)}") from None
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(socket.create_connection((seat.host, int(port)), timeout=seat.timeout_s))
            stream.sendall(encode("hello", token=token, rank=seat.rank, world=seat.world, facts=dict(facts)))
            # Rank 0 waits for the others as long as this rank waited for it.
            stream.settimeout(2 * seat.timeout_s)
            answer = receive(stream)
        except (OSError, ProtocolError) as error:
            raise RankError(f"{me} lost rank 0 at {seat.host} while the job was starting: {error}") from None
        if answer.kind != "welcome":
            raise RankError(str(answer.fields.get("message", f"rank 0 answered {answer.kind!r}")))
        stack.pop_all()
        return stream


def _admit(listener: socket.socket, token: str, found: dict[int, socket.socket], seat: Seat, facts: Mapping[str, str]) -> str | None:
    """Takes one newcomer in if there is one; returns why nobody can be let in, if so."""
    try:
        stream, _ = listener.accept()
    except TimeoutError:
        return None
    stream.settimeout(HELLO_S)
    try:
        hello = receive(stream)
    except (OSError, ProtocolError):
        hello = None
    # A stranger at the port is no rank: it is sent away and the job goes on.
    if hello is None or hello.kind != "hello" or not secrets.compare_digest(str(hello.fields.get("token")), token):
        stream.close()
        return None
    refusal = _unlike(hello, found, seat, facts)
    rank = hello.fields["rank"]
    found[rank if rank not in found else -1] = stream
    return refusal


def _unlike(hello: Message, found: Mapping[int, socket.socket], seat: Seat, facts: Mapping[str, str]) -> str | None:
    rank, world, theirs = hello.fields["rank"], hello.fields["world"], hello.fields["facts"]
    if world != seat.world:
        return f"rank {rank} was started as one of {world} ranks, rank 0 as one of {seat.world}; all ranks are to be started together"
    if not 0 < rank < seat.world or rank in found:
        return f"two processes came as rank {rank}; the ranks of a job are 0 to {seat.world - 1}, each once"
    different = [name for name in sorted({*facts, *theirs}) if facts.get(name) != theirs.get(name)]
    if not different:
        return None
    unknown = "not known"
    told = [f"{name} is {theirs.get(name, unknown)} on rank {rank} and {facts.get(name, unknown)} on rank 0" for name in different]
    return f"the ranks do not fit each other: {'; '.join(told)}; all must run the same artifact with the same versions"


def _late(found: Mapping[int, socket.socket], seat: Seat, deadline: float) -> str | None:
    if time.monotonic() < deadline or len(found) == seat.world - 1:
        return None
    missing = [str(rank) for rank in range(1, seat.world) if rank not in found]
    there = ", ".join(map(str, sorted(found))) or "none"
    return f"ranks {', '.join(missing)} of {seat.world} did not come to {seat.host} within {seat.timeout_s:g} s; those that came: {there}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""Rendezvous of the ranks: each proves that it runs the same artifact and versions, or all are refused with the difference.

Rank 0 listens and the others connect to it; nothing is allocated before all match. The store of torch, which gloo needs anyway, only
says at which port. It answers whoever reaches it, so it listens where it was asked to and nowhere else, and the token that proves that a
connection comes from a rank is not in it: whoever starts the ranks gives it to each. It is never sent: a rank answers a challenge with it.

Over several machines everybody is told who is still missing, and before ranks are accepted each machine has reached each other one.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ...graphs.errors import ProtocolError
from .control_plane import RankError
from .messages import HEADER, RankMessage, decode, encode, receive
from .nodes import CONNECT_S, ClusterNode, Reminder, Say, family, missing_nodes, numbered, reachable, unreached, wait_for_listener

CONTROL = "control"
"""Substore in which rank 0 says where it listens."""

ADDRESS = "address"
"""Key there: rank 0's port."""

POLL_S = 0.1

Working = Callable[[Collection[int]], bool]
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
        node: this machine.
        starts_ranks: whether this process starts the other ranks of its machine.
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
    node: ClusterNode = field(default_factory=ClusterNode)
    starts_ranks: bool = False

    @property
    def on_node(self) -> str:
        """Which machine this is, behind the number of a rank; "" where there is one machine."""
        return f" on {self.node}" if self.node.count > 1 else ""


@dataclass(frozen=True)
class AcceptedRank:
    """A rank that rank 0 has accepted.

    Attributes:
        stream: connected to it.
        node: its machine.
        port: where the other machines reach it (`nodes.reachable`); 0 on all but the first rank of a machine.
    """

    stream: socket.socket
    node: ClusterNode
    port: int = 0


def _silent(_: str) -> None:
    """Says nothing."""


def open_store(config: RendezvousConfig, say: Say = _silent, exited: Callable[[], str | None] = lambda: None) -> TCPStore:
    """The store that all ranks share.

    Args:
        say: is told whom this machine waits for.
        exited: describes a process that has ended, without which this one need not wait; None while there is none.

    Raises:
        RankError: when it cannot be reached, or created.
    """
    timeout = datetime.timedelta(seconds=config.timeout_s)
    try:
        if not config.hosts_store:
            if config.node.rank:
                wait_for_listener(config.node, config.host, config.port, config.timeout_s, say, exited)
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
    config: RendezvousConfig,
    store: TCPStore,
    identity: Mapping[str, str],
    exited: Callable[[], str | None] = lambda: None,
    say: Say = _silent,
    working: Working = lambda _: False,
) -> dict[int, AcceptedRank]:
    """Rank 0: waits for all other ranks, and accepts them if all match. The time that they have begins anew while they work.

    Args:
        identity: what must be equal on all ranks, by name.
        exited: describes a rank's process that has already ended; None while there is none.
        say: is told which machines are missing, and which ranks still start.
        working: whether all these ranks are processes of this machine of which one has worked since it was last asked.

    Raises:
        RankError: naming the ranks that did not connect in time, or both ranks and both values of what differs.
    """
    arrivals: dict[int, AcceptedRank] = {}
    turned_away: list[str] = []
    refusal: str | None = None
    deadline, reminder = time.monotonic() + config.timeout_s, Reminder(say, config.node.count == 1)
    with _listening(config, store) as listener:
        try:
            while refusal is None and len(arrivals) < config.world_size - 1:
                refusal = _accept_one(listener, arrivals, config, identity, turned_away, say)
                deadline = _extended(deadline, config, arrivals, working)
                refusal = refusal or _ended(arrivals) or _late(arrivals, config, deadline, turned_away) or exited()
                if refusal is None and reminder.due():
                    _remind(config, arrivals, turned_away, deadline, say)
            refusal = refusal or _apart(config, arrivals)
            answer = encode("welcome") if refusal is None else encode("refused", message=refusal)
            for arrival in arrivals.values():
                arrival.stream.sendall(answer)
        except (OSError, ProtocolError) as error:
            refusal = f"a rank was lost during the rendezvous: {error}"
    if refusal is not None:
        for arrival in arrivals.values():
            arrival.stream.close()
        raise RankError(refusal)
    return arrivals


def connect_to_rank_0(
    config: RendezvousConfig,
    store: TCPStore,
    identity: Mapping[str, str],
    exited: Callable[[], str | None] = lambda: None,
    say: Say = _silent,
) -> socket.socket:
    """Any other rank: connects to rank 0 and waits until all ranks have.

    Args:
        exited: describes a process that has ended, without which this one need not wait; None while there is none.
        say: is told which machines are missing, by rank 0.

    Raises:
        RankError: when rank 0 is not there in time, or refuses; with its reason.
    """
    me = f"rank {config.rank} of {config.world_size}{config.on_node}"
    try:
        port = int(substore(store, config, CONTROL).get(ADDRESS))
    except RuntimeError as error:
        late = f"rank 0 did not come to {config.host} port {config.port} within {config.timeout_s:g} s"
        raise RankError(f"{me}: {late}: {_first_line(error)}", "node_late" if config.node.rank else "") from None
    # One rank of a machine answers for it.
    node = config.node if config.local_rank == 0 else ClusterNode()
    with contextlib.ExitStack() as stack, reachable(node) as own_port:
        try:
            source = (config.node.address, 0) if config.node.address else None
            stream = stack.enter_context(socket.create_connection((config.host, port), config.timeout_s, source))
            answer = _answer(stream, config, exited, say, _hello(config, identity, own_port))
        except ConnectionRefusedError:
            # Its store is there, so it was: it listens no longer once all have come, or were refused.
            text = f"rank 0 at {config.host} takes no ranks any more: another process has come as this one, or all were refused"
            raise RankError(f"{me} is too late: {text}", "node_rank_taken") from None
        except (OSError, ProtocolError) as error:
            raise RankError(f"{me} lost rank 0 at {config.host} during the rendezvous: {error}") from None
        if answer.kind != "welcome":
            raise RankError(str(answer.fields.get("message", f"rank 0 answered {answer.kind!r}")))
        stack.pop_all()
        return stream


def _hello(config: RendezvousConfig, identity: Mapping[str, str], port: int) -> bytes:
    node = config.node
    place = {"node_rank": node.rank, "nodes": node.count, "host": node.host, "address": node.address, "port": port}
    return encode("hello", rank=config.rank, world_size=config.world_size, identity=dict(identity), **place)


def _proof(token: str, challenge: bytes, hello: bytes) -> bytes:
    """What only who knows the token can say of a greeting, on one connection: HMAC-SHA256 (RFC 2104) of the challenge and the greeting."""
    return hmac.digest(token.encode(), challenge + hello, "sha256")


def _answer(stream: socket.socket, config: RendezvousConfig, exited: Callable[[], str | None], say: Say, hello: bytes) -> RankMessage:
    """Rank 0's last word, after others; raises `OSError` where there is none."""
    stream.settimeout(HELLO_S)
    while True:
        # Rank 0 may wait as long for the others as this rank waited for it, and says so where it waits longer.
        deadline = time.monotonic() + 2 * config.timeout_s
        while not _readable([stream], POLL_S):
            if reason := exited():
                stream.sendall(encode("ended", message=reason))
                raise RankError(reason)
            if time.monotonic() > deadline:
                raise TimeoutError(f"it said nothing for {2 * config.timeout_s:g} s")
        message = receive(stream)
        if message.kind == "challenge":
            stream.sendall(encode("proven", hello=hello, proof=_proof(config.token, message.fields["challenge"], hello)))
        elif message.kind == "waiting":
            say(str(message.fields["message"]))
        elif message.kind == "peers":
            others = {int(rank): (str(address), int(port)) for rank, address, port in message.fields["peers"]}
            stream.sendall(encode("reached", unreached=list(unreached(config.node, others).items())))
        else:
            return message


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


class _Hello(msgspec.Struct):
    """What `_hello` says of a rank."""

    rank: int
    world_size: int
    identity: dict[str, str]
    port: int
    node_rank: int
    nodes: int
    host: str
    address: str


def _listener(host: str, port: int, backlog: int) -> socket.socket:
    return socket.create_server((host, port), family=family(host), backlog=backlog)


def _accept_one(
    listener: socket.socket,
    arrivals: dict[int, AcceptedRank],
    config: RendezvousConfig,
    identity: Mapping[str, str],
    turned_away: list[str],
    say: Say,
) -> str | None:
    """Accepts one rank if one is connecting; returns the reason if all must be refused because of it."""
    try:
        stream, (address, *_) = listener.accept()
    except TimeoutError:
        return None
    stream.settimeout(HELLO_S)
    challenge = secrets.token_bytes(32)
    try:
        stream.sendall(encode("challenge", challenge=challenge))
        answer = receive(stream)
    except (OSError, ProtocolError):
        answer = RankMessage("", {})
    hello, proof = answer.fields.get("hello"), answer.fields.get("proof")
    # Whoever does not know the token is not a rank; the rendezvous goes on without that connection.
    if not (isinstance(hello, bytes) and isinstance(proof, bytes) and hmac.compare_digest(proof, _proof(config.token, challenge, hello))):
        if answer.kind == "proven":
            _turn_away(stream, address, turned_away, say)
        stream.close()
        return None
    try:
        came = msgspec.convert(decode(hello[HEADER.size :]).fields, _Hello)
    except (ProtocolError, msgspec.ValidationError):
        # Where there is no token anybody can prove anything.
        stream.close()
        return None
    node = ClusterNode(came.node_rank, came.nodes, came.host, came.address)
    refusal = _mismatch(came, node, arrivals, config, identity)
    arrivals[came.rank if came.rank not in arrivals else -1] = AcceptedRank(stream, node, came.port)
    return refusal


def _turn_away(stream: socket.socket, address: str, turned_away: list[str], say: Say) -> None:
    """Tells a rank that its token is wrong, and once who it was."""
    with contextlib.suppress(OSError):
        message = "rank 0 has another token than this rank, or none; legal is the same on all machines [rank_token]"
        stream.sendall(encode("refused", message=message))
    if address not in turned_away:
        turned_away.append(address)
        say(f"turned away a process at {address}: it has another token than rank 0, or none [rank_token]")


def _mismatch(
    hello: _Hello, node: ClusterNode, arrivals: Mapping[int, AcceptedRank], config: RendezvousConfig, identity: Mapping[str, str]
) -> str | None:
    rank, size, other, own = hello.rank, hello.world_size, hello.identity, config.node
    if node.count != own.count:
        legal = "legal is one --nnodes on all machines"
        return f"{node} was started as one of {node.count} machines, {own} as one of {own.count}; {legal} [nnodes_mismatch]"
    twin = next((each for each in (own, *(arrival.node for arrival in arrivals.values())) if each.rank == node.rank and each != node), None)
    if twin is not None or not 0 <= node.rank < own.count:
        came = f"{node} and {twin} are two machines" if twin else f"{node} is none"
        return f"{came}; legal is each --node-rank from 0 to {own.count - 1} once [node_rank_taken]"
    different = [name for name in sorted({*identity, *other}) if identity.get(name) != other.get(name)]
    if different:
        unknown, there = "not known", f"rank {rank}{f' on {node}' if own.count > 1 else ''}"
        here = f"rank 0{config.on_node}"
        values = [f"{name} is {other.get(name, unknown)} on {there} and {identity.get(name, unknown)} on {here}" for name in different]
        code = " [artifact_mismatch]" if "artifact" in different else ""
        return f"the ranks do not match: {'; '.join(values)}; all must run the same artifact with the same versions{code}"
    if size != config.world_size:
        return f"rank {rank} was started as one of {size} ranks, rank 0 as one of {config.world_size}; all ranks are to be started together"
    if not 0 < rank < config.world_size or rank in arrivals:
        return f"two processes came as rank {rank}; the ranks are 0 to {config.world_size - 1}, each once"
    return None


def _readable(streams: Iterable[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Those that have something to read or have ended. `select.select` takes no descriptor above 1,023, which a process may have."""
    with selectors.DefaultSelector() as selector:
        names = {selector.register(stream, selectors.EVENT_READ).fd: stream for stream in streams}
        return [names[key.fd] for key, _ in selector.select(timeout_s)]


def _ended(arrivals: Mapping[int, AcceptedRank]) -> str | None:
    """Which rank that had come has ended, and what it said of it."""
    streams = {arrival.stream: rank for rank, arrival in arrivals.items()}
    for stream in _readable(streams, 0):
        rank = streams[stream]
        node = arrivals[rank].node
        who = f"rank {rank}{f' on {node}' if node.count > 1 else ''}"
        try:
            return f"{who}: {receive(stream).fields.get('message')}"
        except (OSError, ProtocolError):
            return f"{who} ended before all ranks had come; it says why where it runs{' [rank_lost]' if node.count > 1 else ''}"
    return None


def _extended(deadline: float, config: RendezvousConfig, arrivals: Mapping[int, AcceptedRank], working: Working) -> float:
    """The deadline, anew where those that are missing work."""
    return time.monotonic() + config.timeout_s if working(_missing(config, arrivals)) else deadline


def _missing(config: RendezvousConfig, arrivals: Mapping[int, AcceptedRank]) -> list[int]:
    return [rank for rank in range(1, config.world_size) if rank not in arrivals]


def _late(arrivals: Mapping[int, AcceptedRank], config: RendezvousConfig, deadline: float, turned_away: list[str]) -> str | None:
    if time.monotonic() < deadline or len(arrivals) == config.world_size - 1:
        return None
    timeout = f"{config.host} within {config.timeout_s:g} s"
    if config.node.count > 1:
        missing = missing_nodes(config.world_size, config.node.count, {0, *arrivals})
        came = _present(config, arrivals, turned_away)
        return f"{missing} of {config.node.count} machines did not come to {timeout} (--join-timeout); {came} [node_late]"
    missing = ", ".join(map(str, _missing(config, arrivals)))
    present = ", ".join(map(str, sorted(arrivals))) or "none"
    return f"ranks {missing} of {config.world_size} did not come to {timeout} (--join-timeout); those that came: {present}"


def _present(config: RendezvousConfig, arrivals: Mapping[int, AcceptedRank], turned_away: list[str]) -> str:
    """Which machines have come, and who was no rank."""
    nodes = sorted({config.node, *(arrival.node for arrival in arrivals.values())}, key=lambda node: node.rank)
    came = f"those that came: {', '.join(map(str, nodes))}"
    return came + (f"; turned away for another token: {', '.join(turned_away)}" if turned_away else "")


def _remind(config: RendezvousConfig, arrivals: Mapping[int, AcceptedRank], turned_away: list[str], deadline: float, say: Say) -> None:
    """Tells this machine, and one rank of each other one, who is missing; without others, all ranks."""
    left_s = max(0.0, deadline - time.monotonic())
    if config.node.count > 1:
        missing = missing_nodes(config.world_size, config.node.count, {0, *arrivals})
        where = f"{config.host} port {config.port}"
        text = f"waiting for {missing} at {where}, {left_s:.0f} s more; {_present(config, arrivals, turned_away)} [node_late]"
    else:
        missing = numbered(_missing(config, arrivals))
        text = f"waiting for {missing} of {config.world_size}, {left_s:.0f} s more if nothing happens in it (--join-timeout)"
    say(text)
    for arrival in arrivals.values():
        if arrival.port or config.node.count == 1:
            arrival.stream.sendall(encode("waiting", message=text))


def _apart(config: RendezvousConfig, arrivals: Mapping[int, AcceptedRank]) -> str | None:
    """Which machine does not reach which other one; every one tries all others but this one, which all have reached."""
    first = {arrival.node.rank: arrival for arrival in arrivals.values() if arrival.port}
    peers = {rank: (arrival.node.address, arrival.port) for rank, arrival in first.items()}
    question = encode("peers", peers=[[rank, *place] for rank, place in peers.items()])
    for arrival in first.values():
        arrival.stream.sendall(question)
    failures = [(config.node, unreached(config.node, peers))]
    for arrival in first.values():
        arrival.stream.settimeout(HELLO_S + CONNECT_S * len(peers))
        failures.append((arrival.node, dict(receive(arrival.stream).fields["unreached"])))
    apart = [f"{node} does not reach {first[rank].node}: {why}" for node, reasons in failures for rank, why in reasons.items()]
    legal = "legal is an address of each machine that all others reach (--host-address), and no firewall between them"
    return f"{'; '.join(apart)}; {legal} [node_unreachable]" if apart else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

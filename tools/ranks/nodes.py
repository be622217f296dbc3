"""Which machine of a deployment this is, and the address at which the other machines reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...runtime.distributed.control_plane import RankError
from ...runtime.distributed.nodes import ClusterNode, family, numbered
from ...runtime.distributed.rendezvous import RendezvousConfig

MASTER_PORT = 29500
"""torchrun's."""

TOKEN_VARIABLE = "NPUCOMPILE_RANK_TOKEN"
"""What ranks prove that they are ranks with. Without it whoever reaches rank 0 may be one: all else that torchrun gives its ranks is in
its store, which answers everybody."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7)); its answer has it from byte 20."""


@dataclass(frozen=True)
class NodeOptions:
    """What a user says of his machines.

    Attributes:
        nnodes: how many there are; each starts its own ranks.
        node_rank: number of this one.
        master_addr: HOST[:PORT] of number 0.
        rank_token: file of the token that all machines share.
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    rank_token: Path | None = None


def read_token(file: Path | None, environment: Mapping[str, str]) -> str:
    """The token of a file, or else of the environment; "" where there is none.

    Raises:
        SpecError: the file cannot be read, or is empty.
    """
    if file is None:
        return environment.get(TOKEN_VARIABLE, "")
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--rank-token: {file} cannot be read: {getattr(error, 'strerror', None) or error} [rank_token]") from None
    if not token:
        raise SpecError(f"--rank-token: {file} is empty; legal is what `openssl rand -hex 16` draws, the same on all machines [rank_token]")
    return token


def node_config(
    options: NodeOptions, mesh: Mesh, environment: Mapping[str, str], timeout_s: float, host_address: str | None
) -> RendezvousConfig | None:
    """The first rank of this machine, which starts the others of it; None where there is one machine.

    Args:
        timeout_s: how long machines wait for each other.
        host_address: see `located`.

    Raises:
        SpecError: the options do not fit each other or the mesh, or there is no token.
        RankError: as `located`.
    """
    count, rank = options.nnodes, options.node_rank
    if not 0 <= rank < count:
        raise SpecError(f"--node-rank {rank} with --nnodes {count}; legal is 0 to {count - 1} [node_rank]")
    if count == 1:
        return None
    if mesh.size % count:
        legal = ", ".join(str(number) for number in range(1, mesh.size + 1) if mesh.size % number == 0)
        ranks = f"mesh {mesh} has {mesh.size} rank{'s' * (mesh.size > 1)}"
        raise SpecError(f"{ranks}, which {count} machines (--nnodes) cannot share evenly; legal are {legal} machines [nnodes]")
    if options.master_addr is None:
        raise SpecError(
            f"--nnodes {count} without --master-addr; legal is HOST[:PORT] of --node-rank 0, the same on all machines [master_addr]"
        )
    token = read_token(options.rank_token, environment)
    if not token:
        how = f"${TOKEN_VARIABLE} or --rank-token FILE, the same on all machines; `openssl rand -hex 16` draws one"
        raise SpecError(f"--nnodes {count} without a token: whoever reaches node rank 0 could join; legal is {how} [rank_token]")
    host, port = _parsed(options.master_addr)
    local = mesh.size // count
    return located(
        RendezvousConfig(
            rank * local,
            mesh.size,
            host,
            port,
            local,
            timeout_s,
            hosts_store=rank == 0,
            token=token,
            node=ClusterNode(rank, count),
            starts_ranks=True,
        ),
        host_address,
    )


def _parsed(place: str) -> tuple[str, int]:
    """Host and port of HOST[:PORT], [IPv6]:PORT or an IPv6 address alone."""
    if _is_number(place):
        return place, MASTER_PORT
    host, _, port = place.rpartition(":") if ":" in place else (place, "", str(MASTER_PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SpecError(f"--master-addr {place}; legal is HOST or HOST:PORT of --node-rank 0 [master_addr]")
    return host.strip("[]"), int(port)


def located(config: RendezvousConfig, host_address: str | None) -> RendezvousConfig:
    """The same with this machine's address: what its user says, or that from which packets to the place of rendezvous leave.

    Control, gloo and HCCL use this one address. What the host's name resolves to is never asked for: in many hosts files it is 127.0.1.1.

    Raises:
        SpecError: the address is none of this machine, or none that others can reach.
        RankError: there is no route.
    """
    here = socket.gethostname()
    if host_address is not None:
        if not _is_own(host_address):
            legal = ", ".join(f"{address} ({name})" for name, address in interfaces().items())
            raise SpecError(f"--host-address {host_address} is no address of this machine, {here}; legal are {legal} [host_address]")
        address = host_address
    else:
        target, address = _route(config.host, config.port)
        if address in LOOPBACK and not (config.host in LOOPBACK or _is_number(config.host)):
            where = f"{config.host} is {target} in the hosts file of {here}, which other machines do not reach"
            raise SpecError(f"{where}; legal is an address in numbers (--master-addr), or --host-address beside the name [host_address]")
        if config.node.rank == 0:
            if not _is_own(target):
                where = f"node rank 0 listens at {target}, which is no address of this machine: {here} at {address}"
                raise SpecError(f"{where}; legal is --node-rank 0 on the machine of --master-addr, and another number here [master_addr]")
            address = target
    node = replace(config.node, host=here, address=address)
    return replace(config, host=config.host if node.rank else address, node=node)


def said_of(config: RendezvousConfig) -> str:
    """Which ranks this machine has, and by which address and interface it meets the others."""
    interface = next((f" on {name}" for name, address in interfaces().items() if address == config.node.address), "")
    first = config.node.rank * config.local_world_size
    ranks = numbered(range(first, first + config.local_world_size))
    return f"{config.node} of {config.node.count}: {ranks}; meets the others at {config.host} port {config.port}{interface}"


def interfaces() -> dict[str, str]:
    """The first IPv4 address of each interface that has one, by name."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _is_number(host: str) -> bool:
    """Whether it is an address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_own(address: str) -> bool:
    try:
        with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _route(host: str, port: int) -> tuple[str, str]:
    """The address of a host, and that of this machine from which packets to it leave; none is sent."""
    try:
        kind, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(target[0]), str(probe.getsockname()[0])
    except socket.gaierror as error:
        raise SpecError(
            f"{host}, where node rank 0 is, is no name that {socket.gethostname()} knows: {error.strerror} [master_addr]"
        ) from None
    except OSError as error:
        own = ", ".join(f"{address} ({name})" for name, address in interfaces().items())
        raise RankError(f"no route to node rank 0 at {host} from {own}: {error.strerror}", "node_unreachable") from None

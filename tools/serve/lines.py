"""The command lines that start servers, one a machine: of one server, of prefill and decode servers that hand over, of replicas."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from ..builder.deployments import Deployment, deployment
from ..notation import PUBLISHED_ENCODE
from .options import BOTH, DECODE, HOST, PORT, PREFILL

HOSTS = {BOTH: "HOST", PREFILL: "PREFILL", DECODE: "DECODE"}
"""What stands for the machines of each role where nobody has named them; their numbers follow."""

PORTS = {BOTH: PORT, PREFILL: PORT, DECODE: PORT + 1}
"""Those of the published scripts."""

PAIRS_ITSELF = "no router is needed: a decode server chooses one of its prefill servers itself"
TOKEN = "the machines of one server need the same token: $NPUCOMPILE_RANK_TOKEN, or --rank-token FILE"
NAMES = "names in capitals stand for addresses; a server that others reach by a name needs --allowed-host NAME"
OR_REPLICAS = "a server for each dp group behind a router, for they share nothing:"
_WILDCARDS = ("", "0.0.0.0", "::", "localhost", "127.0.0.1")


@dataclass(frozen=True)
class Server:
    """One server, on one machine or several.

    Attributes:
        artifact: what `serve` calls it.
        role: "both", "prefill" or "decode".
        machines: by which others reach them; the first one listens, and is where the ranks of several meet.
        options: words of each machine's line, of one for all or of each.
        variables: of the environment.
        master: address and port where the ranks of several machines meet; by default the first machine.
        prefill: URLs of the prefill servers of a decode server.
    """

    artifact: str
    role: str = BOTH
    machines: tuple[str, ...] = ("",)
    options: tuple[tuple[str, ...], ...] = ((),)
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    master: str = ""
    prefill: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where it listens."""
        words = self.options[0]
        given = {name: value for name, value in pairwise(words) if name in ("--host", "--port")}
        own = given.get("--host", "")
        host = self.machines[0] or (own if own not in _WILDCARDS else HOSTS[self.role])
        return f"http://{host}:{given.get('--port', PORT)}"

    def lines(self) -> list[str]:
        """A line for each machine."""
        several = len(self.machines) > 1
        found = []
        for rank in range(len(self.machines)):
            words = [self.artifact]
            if self.role != BOTH:
                words += ["--role", self.role]
            if self.role == DECODE:
                words += ["--prefill", ",".join(self.prefill)]
            words += self.options[min(rank, len(self.options) - 1)]
            if self.role == PREFILL and not rank and "--allowed-host" not in words and (name := _name_in(self.url)):
                words += ["--allowed-host", name]
            if several:
                words += ["--nnodes", str(len(self.machines)), "--node-rank", str(rank), "--master-addr", self.master or self.machines[0]]
            settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
            found.append(" ".join([*settings, "npucompile", "serve", *map(shlex.quote, words)]))
        return found


def _name_in(url: str) -> str:
    """The name that a URL has for a machine; empty for addresses, for what stands for one, and for the machine itself."""
    host = url.removeprefix("http://").rpartition(":")[0]
    return host if re.fullmatch(r"[a-z][a-z0-9.-]*", host) and host != "localhost" else ""


def paired(servers: Sequence[Server]) -> list[Server]:
    """The servers, of which those that decode know those that prefill."""
    urls = tuple(server.url for server in servers if server.role == PREFILL)
    return [replace(server, prefill=urls or (Server("", PREFILL).url,)) if server.role == DECODE else server for server in servers]


def notes_of(servers: Sequence[Server], routed: bool = False) -> list[str]:
    """What is said of lines.

    Args:
        routed: whether there is a router before them.
    """
    pairs = any(server.role == DECODE for server in servers) and not routed
    several = any(len(server.machines) > 1 for server in servers)
    return [*([PAIRS_ITSELF] if pairs else []), *([TOKEN] if several else [])]


def replicas(
    artifact: str, count: int, npus: int, host: str = HOST, port: int = PORT, options: Sequence[str] = (), variables: Mapping[str, str] = {}
) -> tuple[list[Server], str]:
    """Servers of one machine with devices of their own, and SGLang's router before them.

    Args:
        npus: of each.
        host, port: where the router listens; the servers listen on the ports after it, for the router alone.
        options, variables: further ones of each.
    """
    found = []
    for number in range(count):
        own = {**variables, "ASCEND_RT_VISIBLE_DEVICES": ",".join(str(number * npus + device) for device in range(npus))}
        found.append(Server(artifact, options=(("--port", str(port + 1 + number), *options),), variables=own, machines=("127.0.0.1",)))
    words = ["python", "-m", "sglang_router.launch_router", "--worker-urls", *(server.url for server in found)]
    return found, shlex.join([*words, "--policy", "cache_aware", "--health-check-endpoint", "/ready", "--host", host, "--port", str(port)])


@dataclass(frozen=True)
class RowLines:
    """What starts a published deployment.

    Attributes:
        build: makes all artifacts.
        servers: in the order in which they are started.
        replicas: of a deployment whose dp groups share nothing: the build of one group, a server for each, and a router.
    """

    build: str
    servers: tuple[Server, ...]
    replicas: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """All commands that serve, a machine each."""
        return [line for server in self.servers for line in server.lines()]

    def shown(self) -> Iterator[str]:
        """For the terminal."""
        yield f"build it: {self.build}"
        yield f"serve it, a line {'a machine' if len(self.lines) > 1 else 'on its machine'}:"
        yield from (f"  {line}" for line in self.lines)
        yield from (f"  {note}" for note in (*notes_of(self.servers), *((NAMES,) if len(self.lines) > 1 else ())))
        if self.replicas:
            yield f"or {OR_REPLICAS}"
            yield from (f"  {line}" for line in self.replicas)


def lines_of(row: Deployment, artifacts: Mapping[str, str] | None = None, *, dense: bool = False) -> RowLines:
    """What starts a published deployment.

    Args:
        artifacts: of its phases; by default they are called what a build calls them.
        dense: whether the model has no experts, so that dp groups share no collective.
    """
    names = artifacts or {name: row.model if name == "mixed" else f"{row.model}-{name}" for name in row.phases}
    servers = [server for name, phase in row.phases.items() for server in alike(names[name], name, phase.nodes, phase.instances)]
    build = f"npucompile build {row.model} --deployment {row.id}" + (f" --encode {PUBLISHED_ENCODE}" if row.pictures else "")
    mixed, others = row.phases.get("mixed"), list[str]()
    if mixed and dense and mixed.mesh.axis("dp") > 1 and mixed.nodes == 1:
        tp = mixed.mesh.axis("tp")
        each, router = replicas(f"{row.model}-tp{tp}", mixed.mesh.axis("dp"), tp)
        others = [f"{build} --mesh dp=1,tp={tp} --out {row.model}-tp{tp}", *(line for server in each for line in server.lines()), router]
    return RowLines(build, tuple(paired(servers)), tuple(others))


def of_built(name: str, phase: str | None, paths: Sequence[Path]) -> list[str]:
    """What serves the artifacts of a published deployment, for the terminal; nothing where that is one server on one machine.

    Args:
        phase: that alone was built; None for all.
        paths: of the artifacts, a phase each.
    """
    row = deployment(name)
    built = dict(zip((phase,) if phase else row.phases, map(str, paths), strict=True))
    servers = lines_of(row, {each: built.get(each, "") for each in row.phases}).servers
    lines = [line for server in servers if server.artifact for line in server.lines()]
    if len(lines) == 1 and not phase:
        return []
    return [
        f"serve {'them' if len(built) > 1 else 'it'}, a line a machine:",
        *(f"  {line}" for line in (*lines, *notes_of(servers), NAMES)),
    ]


def alike(artifact: str, phase: str, nodes: int, instances: int, options: tuple[str, ...] = ()) -> Iterator[Server]:
    """Instances of one artifact, on machines that nobody has named.

    Args:
        phase: "mixed", "prefill" or "decode".
        nodes: machines of an instance.
        options: further words of each line.
    """
    role = BOTH if phase == "mixed" else phase
    several = nodes * instances > 1 or role != BOTH
    for instance in range(instances):
        numbers = range(instance * nodes + 1, (instance + 1) * nodes + 1)
        machines = tuple(f"{HOSTS[role]}{number}" for number in numbers) if several else ("",)
        own = tuple(("--host", machine, "--port", str(PORTS[role]), *options) for machine in machines) if several else (options,)
        yield Server(artifact, role, machines, own)

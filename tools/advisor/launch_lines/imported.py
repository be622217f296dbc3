"""A launch line as it comes out: what becomes of every flag and variable, and the commands that build and serve the same here."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from ....graphs.errors import SpecError
from ...builder.targets import target
from ...serve.lines import HOSTS, Server, notes_of, paired
from ...serve.options import BOTH, DECODE, PREFILL
from .commands import build_command, build_commands, place_of, replicated
from .facts import LaunchFacts
from .findings import LaunchFinding, findings_of, router_findings
from .flags import GivenFlag, read_flags
from .launches import Launch, launches
from .proposal import Named, Proposal, named, propose
from .shell import Script, read
from .tables import engine
from .verdicts import Context, Verdict

SGLANG_PORT = 30_000
NOWHERE = f"prefill servers: no line says where others reach them; put their addresses in place of {HOSTS[PREFILL]}"
LOCAL = ("", "0.0.0.0", "::", "127.0.0.1", "localhost")
"""Addresses by which no other machine reaches one."""


@dataclass(frozen=True)
class Role:
    """One instance of what a script launches, on one machine or several.

    Attributes:
        name: "mixed", "prefill", "decode" or "router".
        lines: numbers of the lines that launch it, one a machine.
        findings: of all of them, equal ones once.
        servers: one for each instance; none for a router.
        routes: lines of a router, which run as they are but for bootstrap ports.
        needless: why a router is not needed here.
        replicas: commands that serve each dp group by itself, behind a router, where groups share nothing.
    """

    name: str
    engine: str
    lines: tuple[int, ...]
    findings: tuple[LaunchFinding, ...]
    proposal: Proposal | None = None
    servers: tuple[Server, ...] = ()
    routes: tuple[str, ...] = ()
    needless: str = ""
    replicas: tuple[str, ...] = ()

    @property
    def build(self) -> str:
        """The command that builds the artifact; "" for a router."""
        return build_command(self.proposal) if self.proposal else ""

    @property
    def serve(self) -> str:
        """The commands that serve it, a line a machine; "" for a router."""
        return "\n".join(line for server in self.servers for line in server.lines())


@dataclass(frozen=True)
class Imported:
    """A script that was read.

    Attributes:
        roles: in order.
    """

    roles: tuple[Role, ...]

    @property
    def findings(self) -> list[LaunchFinding]:
        """Those of all roles, equal ones once."""
        return list({(f.name, f.given, f.status, f.why): f for role in self.roles for f in role.findings}.values())

    @property
    def commands(self) -> list[str]:
        """Build commands, then serve commands, a machine each, then those of routers; each once."""
        builds = build_commands([role.proposal for role in self.roles if role.proposal])
        serves = (line for role in self.roles for server in role.servers for line in server.lines())
        return list(dict.fromkeys((*builds, *serves, *(line for role in self.roles for line in role.routes))))

    @property
    def notes(self) -> list[str]:
        """What is said of the commands."""
        routed = any(role.name == "router" for role in self.roles)
        said = notes_of([server for role in self.roles for server in role.servers], routed)
        return [*said, *dict.fromkeys(role.needless for role in self.roles if role.needless)]

    def as_dict(self) -> dict[str, Any]:
        """As plain values: `flags` and `command` of the whole script, and `roles` with their own."""
        return {
            "flags": [asdict(finding) for finding in self.findings],
            "command": "\n".join(self.commands),
            "notes": self.notes,
            "roles": [_role_dict(role) for role in self.roles],
        }


def import_text(
    text: str, model: str | None = None, target_name: str | None = None, out: str | None = None, settings: Mapping[str, str] | None = None
) -> Imported:
    """Reads a launch line or a script.

    Args:
        model: takes the place of the checkpoints that the lines name.
        target_name: the machine, where the user says it.
        out: directory of the artifact.
        settings: variables of the script, whatever it sets them to itself.

    Raises:
        SpecError: nothing in it launches a server.
    """
    if target_name is not None:
        target(target_name)
    script = read(text, settings=settings)
    found = launches(script)
    if not found:
        raise SpecError(
            "no launch of a server in it; legal is `python -m sglang.launch_server ...`, `sglang serve ...`, `vllm serve ...`, "
            "`python -m vllm.entrypoints.openai.api_server ...`, a router's, or a file with such lines"
        )
    groups = _instances(found)
    servers = [_facts_of(group) for group in groups if group[0].launch.engine != "router"]
    known = {facts.values.get("model"): named(facts, model, target_name) for facts in servers if named(facts, model, target_name).known}
    shared = _Shared(model, target_name, _shared_rows(servers, model, target_name), known)
    roles = [_role(group, script, shared, out) for group in groups]
    names = [role.name for role in roles if role.proposal]
    if len(names) > 1:
        roles = [_in_its_own_directory(role, names, out) for role in roles]
    return Imported(tuple(_paired(roles, groups)))


@dataclass(frozen=True)
class _Shared:
    """What is the same for all servers of a script: what the user says, and what one line says for another.

    Attributes:
        among: ids of the deployments that they may be.
        known: what a line says of the checkpoint that it names, by that name.
    """

    model: str | None
    target: str | None
    among: frozenset[str]
    known: Mapping[Any, Named]

    def propose(self, facts: LaunchFacts, out: str | None) -> Proposal:
        """The build of one of them."""
        same = self.known.get(facts.values.get("model"))
        if same is None or named(facts, self.model, self.target).known:
            return propose(facts, self.model, self.target, out, self.among)
        schemes = {row.quantization for row, _ in same.rows}
        return propose(facts, same.model, self.target, out, self.among, schemes.pop() if len(schemes) == 1 else None)


def _shared_rows(servers: Sequence[LaunchFacts], model: str | None, target_name: str | None) -> frozenset[str]:
    """Ids of the deployments that most servers of a script may be: prefill and decode servers of one script are one deployment."""
    counts = Counter(row.id for facts in servers for row, _ in named(facts, model, target_name).rows)
    return frozenset(name for name, count in counts.items() if count == max(counts.values()))


def _facts_of(group: Sequence[_Read]) -> LaunchFacts:
    """The facts of an instance, with how many machines and instances its launches are for."""
    facts = group[0].facts
    seen = {repr(each.facts.values.get("node_rank", each.facts.values.get("dp_start"))) for each in group}
    facts = replace(facts, nodes_seen=len(seen))
    # A process of vLLM for each dp group is a part of one server here.
    return replace(facts, instances=1 if "dp_rank" in facts.values else max(len(group) // facts.nodes, 1))


@dataclass(frozen=True)
class _Read:
    """A launch whose words were read."""

    launch: Launch
    given: tuple[GivenFlag, ...]
    facts: LaunchFacts = field(hash=False)

    @property
    def settings(self) -> tuple[Any, ...]:
        """What is equal on all machines of an instance."""
        own = ("node_rank", "nodes", "rendezvous", "rendezvous_port", "dp_local", "dp_start", "dp_rank", "bootstrap_port")
        values = {name: value for name, value in self.facts.values.items() if name not in own}
        return (self.launch.engine, self.facts.role, repr(sorted(values.items(), key=lambda item: item[0])))


def _instances(found: Sequence[Launch]) -> list[list[_Read]]:
    """Launches of one instance together."""
    groups: dict[tuple[Any, ...], list[_Read]] = {}
    for launch in found:
        table = engine(launch.engine)
        given = tuple(_with_model(read_flags(launch.words, table), launch.engine))
        each = _Read(launch, given, LaunchFacts(launch.engine, _values(given)))
        groups.setdefault(each.settings, []).append(each)
    return list(groups.values())


def _with_model(given: list[GivenFlag], name: str) -> list[GivenFlag]:
    """Flags, where a first word that belongs to none is the model."""
    if name != "router" and given and not given[0].name:
        row = engine(name).flags["--model-path" if name == "sglang" else "--model"]
        return [replace(given[0], row=row), *given[1:]]
    return given


def _values(given: Sequence[GivenFlag]) -> dict[str, Any]:
    """The last value of each rule's flags; JSON objects are merged, the later over the earlier."""
    values: dict[str, Any] = {}
    for each in given:
        if each.row is None or each.problem or not each.row.rule:
            continue
        before, rule = values.get(each.row.rule), each.row.rule
        values[rule] = _merged(before, each.value) if isinstance(before, dict) and isinstance(each.value, dict) else each.value
    return values


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(before)
    for key, value in after.items():
        out[key] = _merged(out[key], value) if isinstance(out.get(key), dict) and isinstance(value, dict) else value
    return out


def _role(group: list[_Read], script: Script, shared: _Shared, out: str | None) -> Role:
    name = group[0].launch.engine
    lines = tuple(dict.fromkeys(each.launch.line for each in group))
    if name == "router":
        said = _unique(one for each in group for one in router_findings(each.launch, each.given, script))
        needless = tuple(dict.fromkeys(filter(None, (each.launch.needless for each in group))))
        routes = tuple(shlex.join((*each.launch.start, *_at_their_ports(each.launch.words))) for each in group if not each.launch.needless)
        return Role("router", name, lines, said, routes=routes, needless="; ".join(needless))
    facts = _facts_of(group)
    proposal = shared.propose(facts, out)
    context = Context(facts, proposal)
    serve, machines = _Serve(), []
    findings = []
    for each in group:
        own = _Serve()
        for finding, verdict in findings_of(each.launch, each.given, context, script):
            findings.append(finding)
            own.add(verdict)
        serve.join(own)
        machines.append(own)
    proposal = replace(proposal, assumed=(*proposal.assumed, *serve.defaults(name), *serve.several(facts)))
    servers = tuple(serve.server(context, machines[at : at + facts.nodes]) for at in range(0, facts.instances * facts.nodes, facts.nodes))
    several = replicated(facts, proposal, servers[0])
    return Role(facts.role, name, lines, _unique(findings), proposal, servers, replicas=several)


def _at_their_ports(words: Sequence[str]) -> Iterator[str]:
    """The words of a router's line, in which each prefill server is asked at its own port: there is none to bootstrap from here."""
    url = None
    for before, word in zip(("", *words), words, strict=False):
        if url is not None and word.isdecimal():
            if port := urlsplit(url).port:
                yield str(port)
            url = None
            continue
        url = word if before == "--prefill" else None
        yield word


class _Serve:
    """Gathers the serve command: of a launch the last value of an option counts, as on the line, and of several launches the first one's:
    the machine that comes first is the one that listens."""

    def __init__(self) -> None:
        self.options: dict[str, tuple[str, ...]] = {}
        self.variables: dict[str, str] = {}
        self.values: dict[str, dict[str, None]] = {}

    def add(self, verdict: Verdict | None) -> None:
        """Takes what a verdict adds."""
        if verdict is None:
            return
        if verdict.serve:
            self.options[verdict.serve[0]] = verdict.serve
        self.variables |= verdict.variables

    def join(self, other: _Serve) -> None:
        """Takes what another launch of the instance adds."""
        self.options, self.variables = other.options | self.options, other.variables | self.variables
        for name, value in [*other.variables.items(), *((name, " ".join(words[1:])) for name, words in other.options.items())]:
            self.values.setdefault(name, {})[value] = None

    def several(self, facts: LaunchFacts) -> list[str]:
        """What is said of several instances of the same settings."""
        if facts.instances == 1:
            return []
        own = [f"{name} {', '.join(values)}" for name, values in self.values.items() if len(values) > 1]
        return [f"{facts.instances} instances: serve is started once for each" + (f", with its own {'; '.join(own)}" if own else "")]

    def defaults(self, name: str) -> list[str]:
        """Adds where the engine listens if the line does not say; what is said of it."""
        said = []
        if name == "sglang" and "--port" not in self.options:
            self.options["--port"] = ("--port", str(SGLANG_PORT))
            said.append(f"port {SGLANG_PORT}: that of SGLang, where the line names none")
        if name == "vllm" and "--host" not in self.options:
            said.append("host 127.0.0.1: vLLM listens on all addresses where the line names none (--host 0.0.0.0, with --api-key)")
        return said

    def server(self, context: Context, machines: Sequence[_Serve]) -> Server:
        """One instance.

        Args:
            machines: what the lines of its machines say themselves; fewer than it has where one line stands for all.
        """
        facts, several = context.facts, context.facts.nodes > 1
        options = [self.options | own.options for own in machines] or [self.options]
        hosts = [(own.get("--host") or ("", ""))[1] for own in options]
        host, _, port = str(facts.values.get("rendezvous") or "").partition(":")
        port = port or str(facts.values.get("rendezvous_port") or "")
        first = hosts[0] if hosts[0] not in LOCAL else host or "HOST"
        known = [hosts[rank] if rank < len(hosts) and hosts[rank] not in LOCAL else f"{first}-{rank}" for rank in range(facts.nodes)]
        return Server(
            place_of(context.proposal),
            BOTH if facts.role == "mixed" else facts.role,
            (first, *known[1:]) if several or hosts[0] not in LOCAL else ("",),
            tuple(tuple(word for words in own.values() for word in words) for own in options),
            self.variables,
            f"{host or first}{f':{port}' if port else ''}",
        )


def _in_its_own_directory(role: Role, names: list[str], out: str | None) -> Role:
    """A role with an artifact directory of its own, where several would be built into one."""
    if role.proposal is None or (out is None and ("phase" in role.proposal.arguments or names.count(role.name) == len(names) == 1)):
        return role
    phase, alone = role.proposal.arguments.get("phase"), names.count(role.name) == 1
    place = f"{place_of(role.proposal)}-{phase or role.name}" + ("" if alone and out else f"-{'-'.join(map(str, role.lines))}")
    proposal = replace(role.proposal, arguments={**role.proposal.arguments, "out": place})
    return replace(role, proposal=proposal, servers=tuple(replace(server, artifact=place) for server in role.servers))


def _paired(roles: Sequence[Role], groups: Sequence[Sequence[_Read]]) -> list[Role]:
    """The roles, of which those that decode know those that prefill: servers of the script, else those that its routers name."""
    routed = tuple(
        flag.texts[0] for group in groups for each in group for flag in each.given
        if each.launch.engine == "router" and flag.row and flag.row.name == "--prefill" and flag.texts
    )  # fmt: skip
    servers = iter(paired([server for role in roles for server in role.servers]))
    found = []
    starts = [server for role in roles for server in role.servers if server.role == PREFILL]
    for role in roles:
        own = tuple(next(servers) for _ in role.servers)
        if role.name == DECODE and routed and not (starts and all(server.machines[0] for server in starts)):
            own = tuple(replace(server, prefill=tuple(dict.fromkeys(routed))) for server in own)
        if role.name == DECODE and role.proposal and any(f"//{HOSTS[PREFILL]}:" in url for server in own for url in server.prefill):
            role = replace(role, proposal=replace(role.proposal, assumed=(*role.proposal.assumed, NOWHERE)))
        found.append(replace(role, servers=own))
    return found


def _unique(findings: Any) -> tuple[LaunchFinding, ...]:
    return tuple({(f.name, f.given, f.kind): f for f in reversed(list(findings))}.values())[::-1]


def _role_dict(role: Role) -> dict[str, Any]:
    proposal = role.proposal
    plain: dict[str, Any] = {"name": role.name, "engine": role.engine, "lines": list(role.lines)}
    plain |= {
        "flags": [asdict(finding) for finding in role.findings],
        "build": role.build,
        "serve": role.serve,
        "router": list(role.routes),
    }
    if proposal is not None:
        plain |= {"model": proposal.model, "model_known": proposal.known, "target": proposal.target}
        plain |= {"deployment": proposal.deployment.id if proposal.deployment else None, "also": list(proposal.also)}
        plain |= {"assumed": list(proposal.assumed), "planned": proposal.planned, "problem": proposal.problem}
    return plain

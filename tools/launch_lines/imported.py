"""A launch line as it comes out: what becomes of every flag and variable, and the commands that build and serve the same here."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...graphs.errors import SpecError
from ..builder.targets import target
from .facts import Facts
from .findings import Finding, findings_of, router_findings
from .flags import Given, read_flags
from .launches import Launch, launches
from .proposal import Proposal, mixed, named, propose
from .shell import Script, read
from .tables import engine
from .verdicts import Context, Verdict

SGLANG_PORT = 30_000


@dataclass(frozen=True)
class Role:
    """One instance of what a script launches, on one machine or several.

    Attributes:
        name: "mixed", "prefill", "decode" or "router".
        lines: numbers of the lines that launch it, one a machine.
        findings: of all of them, equal ones once.
        build, serve: commands; "" for a router, and serve for a build that prefills or decodes alone, which no server takes.
        instead: of those, a server that does both with the same sizes.
    """

    name: str
    engine: str
    lines: tuple[int, ...]
    findings: tuple[Finding, ...]
    proposal: Proposal | None = None
    build: str = ""
    serve: str = ""
    instead: Role | None = None

    @property
    def served(self) -> Role:
        """What can be built and served."""
        return self.instead or self


@dataclass(frozen=True)
class Imported:
    """A script that was read.

    Attributes:
        roles: in order.
    """

    roles: tuple[Role, ...]

    @property
    def findings(self) -> list[Finding]:
        """Those of all roles, equal ones once."""
        return list({(f.name, f.given, f.status, f.why): f for role in self.roles for f in role.findings}.values())

    @property
    def commands(self) -> list[str]:
        """Build commands, then serve commands, each once."""
        served = [role.served for role in self.roles]
        return list(dict.fromkeys(word for word in (*(role.build for role in served), *(role.serve for role in served)) if word))

    def as_dict(self) -> dict[str, Any]:
        """As plain values: `flags` and `command` of the whole script, and `roles` with their own."""
        return {
            "flags": [asdict(finding) for finding in self.findings],
            "command": "\n".join(self.commands),
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
    among = _shared_rows([_facts_of(group) for group in groups if group[0].launch.engine != "router"], model, target_name)
    roles = [_role(group, script, model, target_name, out, among) for group in groups]
    names = [role.name for role in roles if role.proposal]
    if len(names) > 1 and out is None:
        roles = [_in_its_own_directory(role, names) for role in roles]
    return Imported(tuple(roles))


def _shared_rows(servers: Sequence[Facts], model: str | None, target_name: str | None) -> frozenset[str]:
    """Ids of the deployments that most servers of a script may be: prefill and decode servers of one script are one deployment."""
    counts = Counter(row.id for facts in servers for row, _ in named(facts, model, target_name).rows)
    return frozenset(name for name, count in counts.items() if count == max(counts.values()))


def _facts_of(group: Sequence[_Read]) -> Facts:
    """The facts of an instance, with how many machines and instances its launches are for."""
    facts = group[0].facts
    facts = replace(facts, nodes_seen=len({repr(each.facts.values.get("node_rank", each.facts.values.get("dp_local"))) for each in group}))
    return replace(facts, instances=max(len(group) // facts.nodes, 1))


@dataclass(frozen=True)
class _Read:
    """A launch whose words were read."""

    launch: Launch
    given: tuple[Given, ...]
    facts: Facts = field(hash=False)

    @property
    def settings(self) -> tuple[Any, ...]:
        """What is equal on all machines of an instance."""
        own = ("node_rank", "nodes", "rendezvous", "rendezvous_port", "dp_local")
        values = {name: value for name, value in self.facts.values.items() if name not in own}
        return (self.launch.engine, self.facts.role, repr(sorted(values.items(), key=lambda item: item[0])))


def _instances(found: Sequence[Launch]) -> list[list[_Read]]:
    """Launches of one instance together."""
    groups: dict[tuple[Any, ...], list[_Read]] = {}
    for launch in found:
        table = engine(launch.engine)
        given = tuple(_with_model(read_flags(launch.words, table), launch.engine))
        each = _Read(launch, given, Facts(launch.engine, _values(given)))
        groups.setdefault(each.settings, []).append(each)
    return list(groups.values())


def _with_model(given: list[Given], name: str) -> list[Given]:
    """Flags, where a first word that belongs to none is the model."""
    if name != "router" and given and not given[0].name:
        row = engine(name).flags["--model-path" if name == "sglang" else "--model"]
        return [replace(given[0], row=row), *given[1:]]
    return given


def _values(given: Sequence[Given]) -> dict[str, Any]:
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


def _role(group: list[_Read], script: Script, model: str | None, target_name: str | None, out: str | None, among: frozenset[str]) -> Role:
    name = group[0].launch.engine
    lines = tuple(dict.fromkeys(each.launch.line for each in group))
    if name == "router":
        return Role("router", name, lines, _unique(one for each in group for one in router_findings(each.launch, each.given, script)))
    facts = _facts_of(group)
    proposal = propose(facts, model, target_name, out, among)
    context = Context(facts, proposal)
    serve = _Serve()
    findings = []
    for each in group:
        own = _Serve()
        for finding, verdict in findings_of(each.launch, each.given, context, script):
            findings.append(finding)
            own.add(verdict)
        serve.join(own)
    proposal = replace(proposal, assumed=(*proposal.assumed, *serve.defaults(name), *serve.several(facts)))
    role = Role(facts.role, name, lines, _unique(findings), proposal, _build_command(proposal), serve.command(context))
    if "phase" not in proposal.arguments:
        return role
    both = mixed(facts, proposal, f"{_place(proposal)}-mixed")
    instead = Role("mixed", name, lines, (), both, _build_command(both), serve.command(Context(facts, both)))
    return replace(role, serve="", instead=instead)


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

    def several(self, facts: Facts) -> list[str]:
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

    def command(self, context: Context) -> str:
        """`npucompile serve ...`, under torchrun where there are several machines."""
        facts, proposal = context.facts, context.proposal
        place = _place(proposal)
        words = [place, *(word for words in self.options.values() for word in words)]
        start = ["npucompile", "serve"]
        if facts.nodes > 1:
            host = str(facts.values.get("rendezvous") or "HOST").partition(":")[0]
            start = ["torchrun", "--nnodes", str(facts.nodes), "--nproc-per-node", str(facts.npus_per_node())]
            start += ["--master-addr", host, "-m", "npucompile.tools.cli", "serve"]
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*settings, *(shlex.quote(word) for word in (*start, *words))])


def _place(proposal: Proposal) -> str:
    """What `serve` calls the artifact."""
    out = proposal.arguments.get("out")
    name = proposal.model.rstrip("/").rpartition("/")[2] if "/" in proposal.model else proposal.model
    phase = proposal.arguments.get("phase")
    return out or (f"{name}-{phase}" if phase else name)


def _build_command(proposal: Proposal) -> str:
    return " ".join(shlex.quote(word) for word in ("npucompile", "build", *proposal.words))


def _in_its_own_directory(role: Role, names: list[str]) -> Role:
    """A role with an artifact directory of its own, where several would be built into one."""
    if role.proposal is None or "phase" in role.proposal.arguments or names.count(role.name) == len(names) == 1:
        return role
    place = f"{_place(role.proposal)}-{role.name}-{'-'.join(map(str, role.lines))}"
    proposal = replace(role.proposal, arguments={**role.proposal.arguments, "out": place})
    serve = role.serve.replace(f"serve {shlex.quote(_place(role.proposal))}", f"serve {shlex.quote(place)}", 1)
    return replace(role, proposal=proposal, build=_build_command(proposal), serve=serve)


def _unique(findings: Any) -> tuple[Finding, ...]:
    return tuple({(f.name, f.given, f.kind): f for f in reversed(list(findings))}.values())[::-1]


def _role_dict(role: Role) -> dict[str, Any]:
    proposal = role.proposal
    plain: dict[str, Any] = {"name": role.name, "engine": role.engine, "lines": list(role.lines)}
    plain |= {"flags": [asdict(finding) for finding in role.findings], "build": role.build, "serve": role.serve}
    plain |= {"instead": _role_dict(role.instead) if role.instead else None}
    if proposal is not None:
        plain |= {"model": proposal.model, "model_known": proposal.known, "target": proposal.target}
        plain |= {"deployment": proposal.deployment.id if proposal.deployment else None, "also": list(proposal.also)}
        plain |= {"assumed": list(proposal.assumed), "planned": proposal.planned, "problem": proposal.problem}
    return plain

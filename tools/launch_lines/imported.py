"""A launch line as it comes out: what becomes of every flag and variable, and the commands that build and serve the same here."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...graphs.errors import SpecError
from ..build.targets import target
from .facts import Facts
from .flags import Given, read_flags
from .launches import Launch, launches
from .proposal import Proposal, propose
from .rules import RULES
from .shell import Script, read
from .tables import Row, engine, topics, variables
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, topic

MEANT_FOR_ENGINES = re.compile(r"(SGLANG|SGL|VLLM|HCCL|ASCEND|ACL|PYTORCH_NPU|DEEPEP|DEEP|ZBAL|ZBCCL|TASK_QUEUE|GLOO|MOONCAKE|NPU)_")
"""Variables that look like an engine's or CANN's: one of them that no table has is misspelt, or of a release that no table has."""

SGLANG_PORT = 30_000

_NEUTRAL = "it asks for what is so here in any case"


@dataclass(frozen=True)
class Finding:
    """What becomes of a flag, a variable or a word.

    Attributes:
        name: its first name, or as it was typed where it is unknown.
        given: as it was typed, with its values.
        kind: "flag", "variable" or "word".
        line: of the script.
    """

    name: str
    given: str
    status: str
    why: str
    kind: str = "flag"
    line: int = 1


@dataclass(frozen=True)
class Role:
    """One instance of what a script launches, on one machine or several.

    Attributes:
        name: "mixed", "prefill", "decode" or "router".
        lines: numbers of the lines that launch it, one a machine.
        findings: of all of them, equal ones once.
        build, serve: commands; "" for a router.
    """

    name: str
    engine: str
    lines: tuple[int, ...]
    findings: tuple[Finding, ...]
    proposal: Proposal | None = None
    build: str = ""
    serve: str = ""


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
        return list(dict.fromkeys([role.build for role in self.roles if role.build] + [role.serve for role in self.roles if role.serve]))

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
    roles = [_role(group, script, model, target_name, out) for group in _instances(found)]
    names = [role.name for role in roles if role.proposal]
    if len(names) > 1 and out is None:
        roles = [_in_its_own_directory(role, names) for role in roles]
    return Imported(tuple(roles))


@dataclass(frozen=True)
class _Read:
    """A launch whose words were read."""

    launch: Launch
    given: tuple[Given, ...]
    facts: Facts = field(hash=False)

    @property
    def settings(self) -> tuple[Any, ...]:
        """What is equal on all machines of an instance."""
        own = ("node_rank", "nodes", "rendezvous", "rendezvous_port", "dp_local", "headless")
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


def _role(group: list[_Read], script: Script, model: str | None, target_name: str | None, out: str | None) -> Role:
    name = group[0].launch.engine
    lines = tuple(dict.fromkeys(each.launch.line for each in group))
    if name == "router":
        return Role("router", name, lines, _unique(finding for each in group for finding in _router_findings(each, script)))
    facts = replace(
        group[0].facts, nodes_seen=len({repr(each.facts.values.get("node_rank", each.facts.values.get("dp_local"))) for each in group})
    )
    proposal = propose(facts, model, target_name, out)
    context = Context(facts, proposal)
    serve = _Serve()
    findings = []
    for each in group:
        findings += _launch_findings(each, context, serve, script)
    proposal = replace(proposal, assumed=(*proposal.assumed, *serve.defaults(name)))
    return Role(facts.role, name, lines, _unique(findings), proposal, _build_command(proposal), serve.command(context))


class _Serve:
    """Gathers the serve command: the last value of an option counts, as on the line."""

    def __init__(self) -> None:
        self.options: dict[str, tuple[str, ...]] = {}
        self.variables: dict[str, str] = {}

    def add(self, verdict: Verdict) -> None:
        """Takes what a verdict adds."""
        if verdict.serve:
            self.options[verdict.serve[0]] = verdict.serve
        self.variables |= verdict.variables

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
    place = f"{_place(role.proposal)}-{role.name}-{role.lines[0]}"
    proposal = replace(role.proposal, arguments={**role.proposal.arguments, "out": place})
    serve = role.serve.replace(f"serve {shlex.quote(_place(role.proposal))}", f"serve {shlex.quote(place)}", 1)
    return replace(role, proposal=proposal, build=_build_command(proposal), serve=serve)


def _launch_findings(each: _Read, context: Context, serve: _Serve, script: Script) -> list[Finding]:
    findings = _container_findings(each.launch)
    last = {id(given.row): i for i, given in enumerate(each.given) if given.row is not None}
    for i, given in enumerate(each.given):
        verdict = _verdict(given, context)
        superseded = (
            given.row is not None and last[id(given.row)] != i and not given.row.repeats and given.row.type != "json" and not given.problem
        )
        if superseded:
            verdict = Verdict(UNNECESSARY, "given again later in the line, where the last one counts")
        serve.add(verdict)
        findings.append(_finding(given, verdict, each.launch.line))
    for name, value in each.launch.variables.items():
        verdict_of = _variable_verdict(name, value, context, script, used=name in script.used)
        if verdict_of is not None:
            serve.add(verdict_of)
            findings.append(Finding(name, f"{name}={value}", verdict_of.status, verdict_of.why, "variable", each.launch.line))
    return findings


def _finding(given: Given, verdict: Verdict, line: int) -> Finding:
    name = given.row.name if given.row else given.name or given.texts[0]
    typed = " ".join((given.name, *given.texts)) if given.name else given.texts[0]
    return Finding(name, typed.strip(), verdict.status, verdict.why, "flag" if given.row or given.name else "word", line)


def _verdict(given: Given, context: Context) -> Verdict:
    row = given.row
    if row is None:
        return Verdict(REFUSED, given.problem or "a word that belongs to no flag")
    if given.problem:
        return Verdict(REFUSED, given.problem)
    if row.carry:
        return _carried(given, row)
    if row.rule:
        # A flag that is JSON may come in pieces, and says what all of them together say.
        value = context.facts.values.get(row.rule, given.value) if row.type == "json" else given.value
        return RULES[row.rule](value, context)
    if row.topic and _asks_for_nothing(given, row):
        return topic(row.off) if row.off else Verdict(UNNECESSARY, _NEUTRAL)
    return topic(row.topic)


def _asks_for_nothing(given: Given, row: Row) -> bool:
    if row.type == "switch" and given.value is False:
        return topics()[row.topic].status == REFUSED
    return bool(row.neutral) and all(text in row.neutral for text in given.texts)


def _carried(given: Given, row: Row) -> Verdict:
    command, _, option = row.carry.partition(" ")
    values = given.value if isinstance(given.value, list) else [given.value]
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    if row.values:
        unknown = [text for text in texts if text not in row.values]
        if unknown:
            return Verdict(
                REFUSED, f"{option} of {command} has nothing for {', '.join(unknown)}; it has {', '.join(sorted(set(row.values.values())))}"
            )
        texts = [row.values[text] for text in texts]
    same = texts == list(given.texts) and option in row.names
    words = tuple(word for text in texts for word in (option, text))
    return Verdict(CARRIED if same else MAPPED, f"{command} {' '.join(words)}", words)


def _variable_verdict(name: str, value: str, context: Context | None, script: Script, used: bool) -> Verdict | None:
    """What becomes of a variable; None for parts of an array."""
    if "[" in name:
        return None
    row = variables().get(name)
    if row is None:
        if used:
            return topic("script")
        near = difflib.get_close_matches(name, variables(), n=1, cutoff=0.8)
        hint = f"; the nearest is {near[0]}" if near else ""
        if MEANT_FOR_ENGINES.match(name) or near:
            return Verdict(REFUSED, f"no release of SGLang, vLLM or CANN in the tables reads {name}{hint}")
        return Verdict(UNNECESSARY, "nothing of SGLang, vLLM, CANN or npucompile reads it")
    if row.carry:
        if "$" in value or re.fullmatch(r"<[^>]*>|x+|", value):
            return Verdict(CARRIED, f"set {name} for serve as you do now; its value is not known here")
        return Verdict(CARRIED, f"set for serve: {name}={value}", variables={name: value})
    if row.rule:
        return RULES[row.rule](value, context) if context else topic("router")
    return topic(row.topic)


def _container_findings(launch: Launch) -> list[Finding]:
    """Options of what starts the engine: a container, an interpreter, a profiler."""
    return [
        Finding(word, word, *_status("container"), "word", launch.line)
        for word in dict.fromkeys(word.partition("=")[0] for word in launch.before)
        if word.startswith("-") and word not in ("-c", "-lc", "-ic", "-m", "-e", "--env")
    ]


def _router_findings(each: _Read, script: Script) -> list[Finding]:
    findings = []
    for given in each.given:
        verdict = Verdict(REFUSED, given.problem) if given.problem else topic("router")
        findings.append(_finding(given, verdict, each.launch.line))
    for name, value in each.launch.variables.items():
        verdict_of = _variable_verdict(name, value, None, script, used=name in script.used)
        if verdict_of is not None:
            findings.append(Finding(name, f"{name}={value}", verdict_of.status, verdict_of.why, "variable", each.launch.line))
    return findings


def _status(name: str) -> tuple[str, str]:
    return topics()[name].status, topics()[name].why


def _unique(findings: Any) -> tuple[Finding, ...]:
    return tuple({(f.name, f.given, f.kind): f for f in reversed(list(findings))}.values())[::-1]


def _role_dict(role: Role) -> dict[str, Any]:
    proposal = role.proposal
    plain: dict[str, Any] = {"name": role.name, "engine": role.engine, "lines": list(role.lines)}
    plain |= {"flags": [asdict(finding) for finding in role.findings], "build": role.build, "serve": role.serve}
    if proposal is not None:
        plain |= {"model": proposal.model, "model_known": proposal.known, "target": proposal.target}
        plain |= {"deployment": proposal.deployment.id if proposal.deployment else None, "also": list(proposal.also)}
        plain |= {"assumed": list(proposal.assumed), "planned": proposal.plan is not None, "problem": proposal.problem}
    return plain

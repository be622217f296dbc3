"""What becomes of each flag, variable and word of a launch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .flags import GivenFlag
from .launches import Launch
from .rules import RULES
from .shell import Script
from .tables import Row, of_topic, topics, variables
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, topic

MEANT_FOR_ENGINES = re.compile(r"(SGLANG|SGL|VLLM|HCCL|ASCEND|ACL|PYTORCH_NPU|DEEPEP|DEEP|ZBAL|ZBCCL|TASK_QUEUE|GLOO|MOONCAKE|NPU)_")
"""Variables that look like an engine's or CANN's: one of them that no table has is misspelt, or of a release that no table has."""

_NEUTRAL = "it asks for what is so here in any case"


@dataclass(frozen=True)
class LaunchFinding:
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


def findings_of(
    launch: Launch, given: Sequence[GivenFlag], context: Context, script: Script
) -> Iterator[tuple[LaunchFinding, Verdict | None]]:
    """What becomes of everything in a launch of a server, and what each adds to the serve command."""
    for found in _container_findings(launch):
        yield found, None
    last = {id(each.row): i for i, each in enumerate(given) if each.row is not None}
    for i, each in enumerate(given):
        verdict = _verdict(each, context)
        again = each.row is not None and last[id(each.row)] != i and not each.row.repeats and each.row.type != "json"
        if again and not each.problem:
            verdict = Verdict(UNNECESSARY, "given again later in the line, where the last one counts")
        yield _finding(each, verdict, launch.line), verdict
    for name, value in launch.variables.items():
        verdict_of = _variable_verdict(name, value, context, script, used=name in script.used)
        if verdict_of is not None:
            yield LaunchFinding(name, f"{name}={value}", verdict_of.status, verdict_of.why, "variable", launch.line), verdict_of


def router_findings(launch: Launch, given: Sequence[GivenFlag], script: Script) -> Iterator[LaunchFinding]:
    """What becomes of everything in a launch of a router."""
    for each in given:
        verdict = Verdict(REFUSED, each.problem) if each.problem or each.row is None else topic(each.row.topic)
        yield _finding(each, verdict, launch.line)
    for name, value in launch.variables.items():
        verdict_of = _variable_verdict(name, value, None, script, used=name in script.used)
        if verdict_of is not None:
            yield LaunchFinding(name, f"{name}={value}", verdict_of.status, verdict_of.why, "variable", launch.line)


def _finding(given: GivenFlag, verdict: Verdict, line: int) -> LaunchFinding:
    name = given.row.name if given.row else given.name or given.texts[0]
    typed = " ".join((given.name, *given.texts)) if given.name else given.texts[0]
    return LaunchFinding(name, typed.strip(), verdict.status, verdict.why, "flag" if given.row or given.name else "word", line)


def _verdict(given: GivenFlag, context: Context) -> Verdict:
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
    if row.off and given.value is False:
        return topic(row.off)
    if row.topic and _asks_for_nothing(given, row):
        return Verdict(UNNECESSARY, _NEUTRAL)
    return topic(row.topic)


def _asks_for_nothing(given: GivenFlag, row: Row) -> bool:
    if row.type == "switch" and given.value is False:
        return topics()[row.topic].status == REFUSED
    return bool(row.neutral) and all(text in row.neutral for text in given.texts)


def _carried(given: GivenFlag, row: Row) -> Verdict:
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
    """What becomes of a variable; None for parts of an array.

    Args:
        context: of a server; None for a router.
    """
    if "[" in name:
        return None
    row = variables().get(name)
    if row is None:
        others = of_topic(name)
        meant = variables() if others is None else [each for each, row in variables().items() if not row.topic]
        near = difflib.get_close_matches(name, meant, n=1, cutoff=0.8 if others is None else 0.9)
        if others is not None and not near:
            return topic(others.topic if context else "router_variables")
        if used:
            return topic("script")
        hint = f"; the nearest is {near[0]}" if near else ""
        if MEANT_FOR_ENGINES.match(name) or near:
            return Verdict(REFUSED, f"no release of SGLang, vLLM or CANN in the tables reads {name}{hint}")
        return Verdict(UNNECESSARY, "nothing of SGLang, vLLM, CANN or npucompile reads it")
    if context is None:
        return topic("router_variables")
    if row.carry:
        if "$" in value or re.fullmatch(r"<[^>]*>|x+|", value):
            return Verdict(CARRIED, f"set {name} for serve as you do now; its value is not known here")
        return Verdict(CARRIED, f"set for serve: {name}={value}", variables={name: value})
    if row.rule:
        return RULES[row.rule](value, context)
    return topic(row.topic)


def _container_findings(launch: Launch) -> list[LaunchFinding]:
    """Options of what starts the engine: a container, an interpreter, a profiler."""
    return [
        LaunchFinding(word, word, topics()["container"].status, topics()["container"].why, "word", launch.line)
        for word in dict.fromkeys(word.partition("=")[0] for word in launch.before)
        if word.startswith("-") and word not in ("-c", "-lc", "-ic", "-m", "-e", "--env")
    ]

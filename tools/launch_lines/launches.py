"""Finds the launches of servers and routers among the commands of a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from .shell import Script, ShellCommand, read

STARTS = {
    ("-m", "sglang.launch_server"): "sglang",
    ("-m", "sglang.srt.entrypoints.http_server"): "sglang",
    ("sglang", "serve"): "sglang",
    ("-m", "sglang_router.launch_router"): "router",
    ("-m", "sglang_router.launch_server"): "router",
    ("-m", "sglang.srt.disaggregation.mini_lb"): "router",
    ("-m", "sglang.srt.disaggregation.launch_lb"): "router",
    ("sglang-router", "launch"): "router",
    ("smg", "launch"): "router",
    ("-m", "vllm.entrypoints.openai.api_server"): "vllm",
    ("vllm", "serve"): "vllm",
}
"""Two words that begin a launch, the first without its directory, and the program whose flags follow."""

SHELLS = ("bash", "sh", "zsh")


@dataclass(frozen=True)
class Launch:
    """One launch of a server or a router.

    Attributes:
        engine: "sglang", "vllm" or "router".
        before: words before the launch: interpreters, containers.
        words: flags and values.
        line: number of the line that it begins in.
        variables: of its environment, as far as the script sets them.
    """

    engine: str
    before: tuple[str, ...]
    words: tuple[str, ...]
    line: int
    variables: Mapping[str, str]


def launches(script: Script) -> list[Launch]:
    """All launches of a script, in order; those that a shell or a container is given as text included."""
    found: list[Launch] = []
    for command in script.commands:
        found += _launches_of(command, script.settings)
    return found


def _launches_of(command: ShellCommand, settings: Mapping[str, str]) -> list[Launch]:
    words = command.words
    for at in range(len(words) - 1):
        first = PurePosixPath(words[at]).name
        engine = STARTS.get((first, words[at + 1])) if first else None
        if (
            engine is None
            and first == "-m"
            and words[at + 1] in ("vllm.entrypoints.cli.main", "sglang.cli.main")
            and "serve" in words[at + 2 :][:1]
        ):
            engine, words = words[at + 1].split(".")[0], (*words[: at + 2], *words[at + 3 :])
        if engine is not None:
            before = words[:at]
            return [Launch(engine, before, words[at + 2 :], command.line, {**command.variables, **_container_variables(before)})]
        if first in SHELLS and words[at + 1].startswith("-") and words[at + 1].endswith("c") and at + 2 < len(words):
            variables = {**command.variables, **_container_variables(words[:at])}
            inner = launches(read(words[at + 2], variables, settings))
            return [Launch(each.engine, (*words[:at], *each.before), each.words, command.line, each.variables) for each in inner]
    return []


def _container_variables(words: Sequence[str]) -> dict[str, str]:
    """Variables that a container or `env` is given: `-e NAME=VALUE`, `--env NAME=VALUE`, `env NAME=VALUE`."""
    pairs = {}
    for before, word in zip(("", *words), words, strict=False):
        text = word.removeprefix("--env=") if word.startswith("--env=") else word
        if before in ("-e", "--env") or text != word or (words[:1] == ("env",) and not word.startswith("-")):
            name, equals, value = text.partition("=")
            if equals:
                pairs[name] = value
    return pairs

"""Finds the launches of servers and routers among the commands of a script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

ROUTERS = re.compile(r"vllm-router|(load_balance_proxy\w*|toy_proxy_server|disagg_proxy\w*)\.py")
"""Programs that are a word alone: vLLM's router, and the proxies among the examples of vllm-ascend and vLLM."""

LAYERWISE = "a proxy for layerwise handovers asks the decode server first; here a decode server asks a prefill server itself"
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
        start: the words that begin it.
        needless: of a router, why it is not needed here.
    """

    engine: str
    before: tuple[str, ...]
    words: tuple[str, ...]
    line: int
    variables: Mapping[str, str]
    start: tuple[str, ...] = ()
    needless: str = ""


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
        taken = 2
        if ROUTERS.fullmatch(first) and words[0] != "pip":
            engine, taken = "router", 1
        if engine is not None:
            before, start = words[:at], words[at : at + taken]
            variables = {**command.variables, **_container_variables(before)}
            python = ("python",) if start[0] == "-m" or start[0].endswith(".py") else ()
            needless = LAYERWISE if "layerwise" in first else ""
            return [Launch(engine, before, words[at + taken :], command.line, variables, (*python, *start), needless)]
        if first in SHELLS and words[at + 1].startswith("-") and words[at + 1].endswith("c") and at + 2 < len(words):
            variables = {**command.variables, **_container_variables(words[:at])}
            inner = launches(read(words[at + 2], variables, settings))
            return [replace(each, before=(*words[:at], *each.before), line=command.line) for each in inner]
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

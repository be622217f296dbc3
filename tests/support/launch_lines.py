"""What becomes of one flag of a launch line, and what serve takes a printed line for."""

from __future__ import annotations

import functools
import shlex
from typing import Any
from unittest import mock

from npucompile.tools.advisor.launch_lines.imported import LaunchFinding, import_text
from npucompile.tools.builder import plan as planning
from npucompile.tools.commands import serve

# Most flags change nothing of the build, whose plan takes most of the time.
PLANNED = functools.cache(planning.plan)

LINE = (
    "sglang serve /models/Qwen3-32B-w8a8 --tp-size 4 --quantization modelslim --max-running-requests 16 --context-length 8192 --enable-lroa"
)

BASE = {
    "sglang": "sglang serve /models/Qwen3.5-397B-A17B-w8a8 --tp-size 16 --max-running-requests 32 --context-length 8192",
    "vllm": "vllm serve /models/Qwen3.5-397B-A17B-w8a8 --tensor-parallel-size 16 --max-num-seqs 32 --max-model-len 8192",
}
"""Lines of a known model on a whole node."""


def finding(engine: str, flags: str, name: str | None = None) -> LaunchFinding:
    """What becomes of the first of the flags, or of the named one, behind a line of that engine."""
    wanted = name or flags.split()[0].partition("=")[0].partition(".")[0]
    with mock.patch.object(planning, "plan", PLANNED):
        findings = import_text(f"{BASE[engine]} {flags}").findings
    return next(found for found in reversed(findings) if wanted in (found.name, found.given.split()[0]))


def parsed(line: str) -> dict[str, Any]:
    """What serve takes a line for."""
    words = shlex.split(line)
    words = words[words.index("npucompile") :]
    assert words[:2] == ["npucompile", "serve"]
    for option in ("--checkpoint", "--chat-template"):
        # Those must exist, which is another machine's.
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    return serve.command.make_context("serve", words[2:]).params

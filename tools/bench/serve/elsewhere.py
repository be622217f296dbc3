"""Loads that other projects send better, over HTTP: which command line of theirs does it against our server."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from ....graphs.errors import SpecError

VLLM = "vllm bench serve"
SGLANG = "python -m sglang.bench_serving"

BACKENDS = {
    "openai": f"{VLLM} --backend openai --endpoint /v1/completions --dataset-name random",
    "openai-chat": f"{VLLM} --backend openai-chat --endpoint /v1/chat/completions --dataset-name random",
    "sglang": f"{SGLANG} --backend sglang --dataset-name random",
}
DATASETS = {
    "generated-shared-prefix": f"{SGLANG} --backend sglang --dataset-name generated-shared-prefix",
    "trace": f"{SGLANG} --backend sglang --dataset-name mooncake --use-trace-timestamps",
}
TIMELINE = f"{VLLM} --backend openai --endpoint /v1/completions --dataset-name random --save-result --save-detailed"
SHARED_PREFIX = ("num-groups", "prompts-per-group", "system-prompt-len", "question-len", "output-len")
"""Of the options `--gsp-...`, which are those of SGLang."""


def refuse(option: str, command: str, url: str, given: Mapping[str, object]) -> None:
    """Refuses what an option asks for, with the command line that does it.

    Args:
        command: its first words, of BACKENDS, DATASETS or TIMELINE.
        given: further options of that command, by name; None leaves one out.

    Raises:
        SpecError: always.
    """
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None]
    raise SpecError(
        f"{option} is gone: this command loads the websocket of `npucompile serve` alone, and `vllm bench serve`, `sglang.bench_serving` "
        f"and guidellm load servers over HTTP, ours too; legal is: {' '.join([command, f'--base-url {url}', *words])}"
    )

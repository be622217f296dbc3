"""Loads that other projects send better, over HTTP: which command line of theirs does it against our server."""

from __future__ import annotations

from collections.abc import Collection

from ....graphs.errors import SpecError

OURS = "npucompile-ws"
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
OPTIONS = {
    "timeline": f"{VLLM} --backend openai --endpoint /v1/completions --dataset-name random --save-result --save-detailed",
    **{
        f"gsp-{name}": DATASETS["generated-shared-prefix"]
        for name in ("num-groups", "prompts-per-group", "system-prompt-len", "question-len", "output-len")
    },
}
"""Options that this command had."""


def refuse_what_others_do(backend: str, dataset: str, options: Collection[str], url: str) -> None:
    """Refuses loads over HTTP and the datasets and pages of other load generators.

    Args:
        options: those of `OPTIONS` that were given.
        url: of the server.

    Raises:
        SpecError: with the command line of another project that does it.
    """
    if backend != OURS and backend not in BACKENDS:
        raise SpecError(f"--backend is {backend!r}; legal is {OURS}; {VLLM} and others load servers over HTTP")
    named = [(f"--{option}", OPTIONS[option]) for option in options]
    named += [(f"--dataset {dataset}", DATASETS[dataset])] if dataset in DATASETS else []
    named += [(f"--backend {backend}", BACKENDS[backend])] if backend in BACKENDS else []
    if named:
        option, command = named[0]
        raise SpecError(
            f"{option} is gone: this command loads the websocket of `npucompile serve` alone, and `vllm bench serve`, "
            f"`sglang.bench_serving` and guidellm load servers over HTTP, ours too; legal is: {command} --base-url {url}"
        )

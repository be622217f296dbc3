"""vLLM's engine for the CPU, stepped in this process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

DTYPES = {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}

MAX_NUM_BATCHED_TOKENS = 2048
"""As many as llama.cpp takes in a call and OpenVINO in a step."""


def _version(version: Callable[[str], str], own: str, distribution_name: str) -> str:
    return f"{version(own)}+cpu" if distribution_name == "vllm" else version(distribution_name)


def name_distribution() -> str:
    """vLLM's version; where the wheel has another name, as those built for CPUs have, vLLM is told so, which asks for its own name."""
    version = importlib.metadata.version
    try:
        return version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    own = importlib.metadata.packages_distributions().get("vllm", [])
    if not own:
        raise ImportError("No module named 'vllm'")
    # The platform of a build is recognised by its version.
    importlib.metadata.version = partial(_version, version, own[0])
    return f"{version(own[0])} ({own[0]})"


class Vllm:
    """One engine."""

    def __init__(self) -> None:
        self.version = name_distribution()
        import vllm

        self._vllm: Any = vllm
        self._requests = 0

    def load(self, model: str, dtype: str, threads: int, max_model_len: int, max_num_seqs: int) -> str:
        """Loads a checkpoint and compiles it. The number of threads is that of the cores it is bound to, which the environment says."""
        self._engine = self._vllm.LLM(
            model,
            dtype=DTYPES[dtype],
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            # It runs a step of this size when it loads; more than this makes no step cheaper.
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, max_model_len),
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        return "torch.compile"

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Callable[[int, Sequence[int]], None]) -> None:
        """All prompts at once, as requests of the engine."""
        from vllm.sampling_params import RequestOutputKind

        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        ids = {}
        for i, prompt in enumerate(prompts):
            ids[str(self._requests)] = i
            self._engine.add_request(str(self._requests), {"prompt_token_ids": list(prompt)}, params)
            self._requests += 1
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                # Some versions add a suffix of their own.
                stream = ids[output.request_id if output.request_id in ids else output.request_id.split("-")[0]]
                emit(stream, list(output.outputs[0].token_ids))


def open_engine() -> Vllm:
    """The engine, imported."""
    return Vllm()

"""transformers' `generate`, with its default settings: one batch without padding."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

DTYPES = {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}


class Transformers:
    """One model."""

    def __init__(self) -> None:
        import torch
        import transformers

        self._torch: Any = torch
        self._library: Any = transformers
        self.version: str = transformers.__version__
        # Where torch_npu is installed without CANN its import fails, and transformers imports it where it finds it.
        probes: Any = importlib.import_module("transformers.utils.import_utils")
        find = probes._is_package_available
        probes._is_package_available = lambda name, *rest, **named: (False, "N/A") if name == "torch_npu" else find(name, *rest, **named)

    def load(self, model: str, dtype: str, threads: int, max_model_len: int, max_num_seqs: int) -> str:
        """Loads a checkpoint."""
        self._torch.set_num_threads(threads)
        self._library.utils.logging.disable_progress_bar()
        self._model = self._library.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(self._torch, DTYPES[dtype])).eval()
        # With an end-of-text id, the minimum length would forbid that token; without one it is an ordinary token.
        self._model.generation_config.eos_token_id = None
        return str(self._model.config._attn_implementation)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Callable[[int, Sequence[int]], None]) -> None:
        """One batch; every step's tokens are read where `generate` asks whether to stop."""
        torch = self._torch

        def see(ids: Any, scores: Any, **rest: Any) -> Any:
            for i, token in enumerate(ids[:, -1].tolist()):
                emit(i, [token])
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
                stopping_criteria=[see],
            )


def open_engine() -> Transformers:
    """The engine, imported."""
    return Transformers()

"""What an artifact for NPUs serves, beside what its checkpoint computes on one device, eagerly and without drafts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support import tiny

from npucompile.graphs import tree
from npucompile.graphs.types import Limits, Tree
from npucompile.models import checkpoint, registry
from npucompile.models.step import Model
from npucompile.models.variant import Variant

PAGE = 128
ROUNDINGS = 4.0
"""By how many times the difference between bfloat16 and float32 on one device a served logit may differ: ranks add in other orders."""

DENSE: dict[str, Any] = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_experts": 0, "intermediate_size": 64,
}  # fmt: skip
"""Changes to `tiny.CONFIG` and `tiny.NPU_SIZES` that make the model dense."""


def checkpoints(root: Path) -> dict[str, Path]:
    """A dense and a MoE checkpoint of random weights, and the bundled model, by name."""
    bundled = registry.find("qwen3.5-tiny").checkpoint_dir
    assert bundled is not None
    return {
        "dense": tiny.write_checkpoint(root / "dense", seed=3, agreeing=True, **tiny.NPU_SIZES | DENSE),
        "moe": tiny.write_checkpoint(root / "moe", seed=4, agreeing=True, **tiny.NPU_SIZES),
        "bundled": bundled,
    }


class OneDevice(NamedTuple):
    """A checkpoint's model on one device, in the quantised form that is served."""

    model: Model
    params: Tree

    @staticmethod
    def of(directory: Path, quantization: str, dtype: torch.dtype) -> OneDevice:
        model = registry.find(str(directory)).model
        variant = Variant.of(quantization, grouped=False, recurrent=dtype)
        model = replace(model, config=replace(model.config, variant=variant))
        return OneDevice(model, checkpoint.load(checkpoint.open_checkpoint(directory), model.params(dtype)))

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after each of these tokens, computed in one pass: [T, V] f32."""
        count, dtype = -(-len(tokens) // PAGE), next(iter(tree.flatten(self.params)))[1].dtype
        limits = Limits(PAGE, 1 + count, 2, PAGE * count)
        state = tree.map_leaves(lambda aval: torch.zeros(aval.shape, dtype=aval.dtype), self.model.state(limits, dtype))
        i32 = functools.partial(torch.tensor, dtype=torch.int32)
        inputs = {
            "tokens": i32([list(tokens)]),
            "page_table": i32([list(range(1, 1 + count))]),
            "num_computed_tokens": i32([0]),
            "query_lens": i32([len(tokens)]),
            "state_slots_in": i32([1]),
            "state_slots_out": i32([[1]]),
        }
        config, family = self.model.config, self.model.family
        hidden, _, _ = family.forward(config, self.params, state, inputs)
        logits: torch.Tensor = family.head(config, self.params, hidden).float()
        return logits


class Agreement(NamedTuple):
    """How served tokens compare with one device's.

    Attributes:
        decided: for each token, whether the best one's margin exceeds the rounding, so that it had to be served.
        wrong: (position among the served tokens, token, the one that it had to be).
    """

    decided: tuple[bool, ...]
    wrong: tuple[tuple[int, int, int], ...]


def compare(directory: Path, quantization: str, prompt: Sequence[int], served: Sequence[int]) -> Agreement:
    """Compares greedy tokens with one device's, each after the tokens that were served before it."""
    fine, coarse = _both(directory, quantization)
    tokens = [*prompt, *served[:-1]]
    logits, rounded = (device.logits(tokens)[len(prompt) - 1 :] for device in (fine, coarse))
    slack = ROUNDINGS * (logits - rounded).abs().amax(-1)
    best = logits.topk(2).values
    decided = best[:, 0] - best[:, 1] > slack
    right = logits.argmax(-1)
    wrong = [
        (i, token, int(right[i]))
        for i, token in enumerate(served)
        # A token within the rounding of the best is as good as the best.
        if float(best[i, 0] - logits[i, token]) > float(slack[i])
    ]
    return Agreement(tuple(decided.tolist()), tuple(wrong))


@functools.lru_cache(maxsize=2)
def _both(directory: Path, quantization: str) -> tuple[OneDevice, OneDevice]:
    return OneDevice.of(directory, quantization, torch.float32), OneDevice.of(directory, quantization, torch.bfloat16)

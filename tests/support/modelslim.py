"""Checkpoints that ModelSlim wrote, by its own arithmetic: matrices as floats, and a transformers model that rounds what they read."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

FIXTURES = Path(__file__).parents[1] / "models" / "quant" / "fixtures"
NAMES = tuple(sorted(path.parent.name for path in FIXTURES.glob("*/config.json")))
LATENT = "../fixtures_latent/latent_w8a8"
"""One of a model with latent attention and a draft head, made with changes to ModelSlim."""
ROW_PARALLEL = ("o_proj", "mlp.down_proj")
"""Ends of the names of matrices whose contraction ranks share, where experts are not split."""

Tensors = dict[str, torch.Tensor]


@functools.cache
def tensors(name: str) -> Tensors:
    """All tensors of a fixture."""
    return {key: value for file in sorted((FIXTURES / name).glob("*.safetensors")) for key, value in load_file(file).items()}


@functools.cache
def types(name: str, decodes: bool = False) -> dict[str, str]:
    """The type of each matrix, by its name without `.weight`; of one with both kinds of scales the one of that phase."""
    values = json.loads((FIXTURES / name / "quant_model_description.json").read_text())
    mixed = "W8A8" if decodes else "W8A8_DYNAMIC"
    return {key.removesuffix(".weight"): mixed if kind == "W8A8_MIX" else kind for key, kind in values.items() if key.endswith(".weight")}


def integers(stored: Tensors, matrix: str, kind: str) -> torch.Tensor:
    """The values [N, K] of a matrix; of an int4 one, row 2p is in the low half of packed row p and row 2p + 1 in the high."""
    weight = stored[f"{matrix}.weight"]
    if kind != "W4A8_DYNAMIC":
        return weight.float()
    halves = [((weight.int() & 15) ^ 8) - 8, weight.int() >> 4]
    return torch.stack(halves, 1).flatten(0, 1).float()


def dequantised(name: str, matrix: str, decodes: bool = False) -> torch.Tensor:
    """A matrix [N, K] in float32; of a static one in units of its activations' scale."""
    stored, kind = tensors(name), types(name, decodes)[matrix]
    if kind == "FLOAT":
        return stored[f"{matrix}.weight"].float()
    values = integers(stored, matrix, kind)
    if kind == "W8A8":
        return values * stored[f"{matrix}.deq_scale"][:, None]
    scale = stored[f"{matrix}.weight_scale"].float()
    second = stored.get(f"{matrix}.weight_scale_second")
    if second is None:
        return values * scale
    # Kernels hold the scales of groups in float16.
    grouped = (scale * second).half().float()
    return values * grouped.repeat_interleave(values.shape[1] // grouped.shape[1], 1)


class Linear(torch.nn.Module):
    """A matrix of a fixture, with its activations rounded as its type says.

    Args:
        parts: over how many ranks a row-parallel contraction is split; each rounds its own activations.
        decodes: whether the model only decodes.
    """

    def __init__(self, name: str, matrix: str, parts: int, decodes: bool) -> None:
        super().__init__()
        stored, self.kind = tensors(name), types(name, decodes)[matrix]
        self.matrix, self.parts = dequantised(name, matrix, decodes), parts if matrix.endswith(ROW_PARALLEL) else 1
        bias = stored.get(f"{matrix}.bias")
        self.bias = bias.float() if bias is not None else torch.zeros(len(self.matrix))
        static = ("input_scale", "input_offset", "quant_bias", "deq_scale") if self.kind == "W8A8" else ()
        self.static = {kind: stored[f"{matrix}.{kind}"].float() for kind in static}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "FLOAT":
            return x @ self.matrix.t() + self.bias
        if self.static:
            rounded = (torch.round(x / self.static["input_scale"]) + self.static["input_offset"]).clamp(-128, 127)
            return rounded @ self.matrix.t() + self.static["quant_bias"] * self.static["deq_scale"]
        chunks = x.unflatten(-1, (self.parts, -1))
        scale = chunks.abs().amax(-1, keepdim=True) / 127
        return (torch.round(chunks / scale.clamp(min=1e-20)) * scale).flatten(-2) @ self.matrix.t() + self.bias


class Experts(torch.nn.Module):
    """The experts of a layer, one at a time."""

    def __init__(self, linear: Callable[[str], Linear], prefix: str, count: int) -> None:
        super().__init__()
        self.experts = [[linear(f"{prefix}.{i}.{part}_proj") for part in ("gate", "up", "down")] for i in range(count)]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, (gate, up, down) in enumerate(self.experts):
            weight = (share * (chosen == i)).sum(-1, keepdim=True)
            out += weight * down(torch.nn.functional.silu(gate(x)) * up(x))
        return out


class Biased(torch.nn.Module):
    """A norm and what smoothing adds to its output."""

    def __init__(self, norm: torch.nn.Module, bias: torch.Tensor) -> None:
        super().__init__()
        self.norm, self.bias = norm, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.bias


class CachedRounded:
    """An attention layer whose keys and values are rounded by the scales of the fixture, a number for each head's channel."""

    def __init__(self, name: str, layer: str) -> None:
        self.scales = [tensors(name)[f"{layer}.{part}_proj.kv_cache_scale"].float() for part in "kv"]

    def __call__(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = []
        for x, scale in zip((key, value), self.scales, strict=True):
            step = scale.view(1, x.shape[1], 1, x.shape[-1])
            rounded.append(torch.round(x / step).clamp(-128, 127) * step)
        return eager_attention_forward(module, query, *rounded, *args, **kwargs)


def _round_caches(name: str, model: Any) -> None:
    caches = {i: CachedRounded(name, f"model.layers.{i}.self_attn") for i in range(model.config.num_hidden_layers)}
    ALL_ATTENTION_FUNCTIONS.register(name, lambda module, *args, **kwargs: caches[module.layer_idx](module, *args, **kwargs))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, eager_mask)
    model.config._attn_implementation = name


@functools.cache
@torch.no_grad()
def reference(name: str, parts: int, decodes: bool) -> Any:
    """The model in transformers, float32, all of whose matrices are those of the fixture."""
    values = json.loads((FIXTURES / name / "config.json").read_text())
    config = AutoConfig.for_model(**values)
    config._attn_implementation = config._experts_implementation = "eager"
    model, stored = AutoModelForCausalLM.from_config(config).eval().float(), tensors(name)

    def linear(matrix: str) -> Linear:
        return Linear(name, matrix, parts, decodes)

    for module_name, module in list(model.named_modules()):
        parent, _, leaf = module_name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(module, torch.nn.Linear):
            setattr(owner, leaf, linear(module_name))
        elif leaf == "experts":
            setattr(owner, leaf, Experts(linear, module_name, config.num_experts))
        elif f"{module_name}.weight" in stored:
            module.weight.copy_(stored[f"{module_name}.weight"].float())
            if f"{module_name}.bias" in stored:
                setattr(owner, leaf, Biased(module, stored[f"{module_name}.bias"]))
    if any(tensor.endswith("kv_cache_scale") for tensor in stored):
        _round_caches(name, model)
    return model


@torch.no_grad()
def logits(name: str, ids: list[int], parts: int = 1, decodes: bool = False) -> torch.Tensor:
    """Logits of the reference after every token: n ids -> [n, V] float32."""
    result: torch.Tensor = reference(name, parts, decodes)(torch.tensor([ids])).logits[0]
    return result

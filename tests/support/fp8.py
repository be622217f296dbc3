"""Checkpoints in FP8 as they are published, with a scale for each block or channel, of random models; the arithmetic is numpy's."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from support import oracle

from npucompile.graphs import tree
from npucompile.models.params import Param
from npucompile.models.quant.description import canonical

BLOCK, LARGEST = 128, 448.0
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}

# Neither rows nor columns fill blocks; ranks that share heads, channels or experts begin inside one.
SIZES: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 200,
    "num_attention_heads": 4,
    "q_lora_rank": 136,
    "kv_lora_rank": 140,
    "qk_nope_head_dim": 42,
    "qk_rope_head_dim": 6,
    "v_head_dim": 38,
    "intermediate_size": 272,
    "moe_intermediate_size": 144,
}
MODELS: dict[str, dict[str, Any]] = {
    "v3": oracle.latent(3, **SIZES),
    "glm": oracle.latent(4, **{**SIZES, **oracle.GLM, "index_topk_freq": 2, "index_skip_topk_offset": 1}),
    "v32": oracle.latent(2, **{**SIZES, **oracle.SPARSE, "rope_parameters": oracle.LATENT_YARN, "max_position_embeddings": 128}),
}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it for the schemes FP8_DYNAMIC, FP8_BLOCK and FP8."""
    common = {"num_bits": 8, "type": "float", "symmetric": True, "actorder": None, "block_structure": None, "group_size": None}
    activations = {"strategy": "token"} if strategy == "channel" else {"strategy": "group", "group_size": BLOCK}
    if strategy == "tensor":
        activations = {"strategy": "tensor", "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": strategy, "dynamic": False, "observer": "minmax", "observer_kwargs": {}, **weights},
        "input_activations": {**common, "dynamic": True, "observer": None, **activations},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}, "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp\\.gate$"], "quantization_status": "compressed", "global_compression_ratio": None,
    }  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How the matrices of a checkpoint are stored.

    Attributes:
        config: its `quantization_config`.
        suffix: what the names of scales have behind those of values.
        dtype: of the scales; float8_e8m0fnu: powers of two, each in a byte (`scale_fmt` "ue8m0").
        channel: whether output channels have a scale each, in place of blocks.
        whole: shape of the one scale of a matrix, beside which is one of its activations; None where blocks or channels have one.
        spelt: (part of a name as the publisher has it, as transformers has it).
    """

    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    suffix: str = "_scale_inv"
    dtype: torch.dtype = torch.float32
    channel: bool = False
    whole: tuple[int, ...] | None = None
    spelt: tuple[tuple[str, str], ...] = ()


MINIMAX = (
    ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"), ("block_sparse_moe", "mlp"),
    (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
)  # fmt: skip
FORMS = {
    "v32": Form(dtype=torch.float8_e8m0fnu),
    "glm4": Form(compressed("channel"), "_scale", torch.bfloat16, channel=True),
    "glm4-blocks": Form(compressed("block", block_structure=[BLOCK, BLOCK]), "_scale"),
    "llama": Form(compressed("tensor"), "_scale", torch.bfloat16, whole=(1,)),
    "llama-autofp8": Form({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "_scale", whole=()),
    "minimax": Form({**CONFIG, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
                    spelt=MINIMAX),
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm4", "glm4-blocks"), oracle.grouped(3, **{**SIZES, **oracle.GLM4})),
    **dict.fromkeys(
        ("llama", "llama-autofp8"), oracle.plain(3, **{**oracle.LLAMA, "vocab_size": 98, "hidden_size": 201, "num_key_value_heads": 1})
    ),
    "minimax": oracle.plain(
        2,
        **{
            **oracle.MINIMAX,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 20,
            "hidden_size": 200,
            "intermediate_size": 144,
        },
    ),
}
"""Models of other families, which are read in the same way."""
STAYS = ("eh_proj", "weights_proj", "embed_tokens", "lm_head", "shared_head.head", "mlp.gate")
"""Ends of the names of matrices that are published in bfloat16."""


def values_of_bytes() -> np.ndarray:
    """What the bytes 0 to 126 stand for in E4M3: a bias of 7, no infinities, and 127 is no number."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def rounded(values: np.ndarray) -> np.ndarray:
    """The bytes of the nearest E4M3 values, the even ones of two."""
    table, size = values_of_bytes(), np.abs(values).astype(np.float64)
    above = np.searchsorted(table, size).clip(1, 126)
    below = above - 1
    middle = (table[below] + table[above]) / 2
    nearest = np.where((size > middle) | ((size == middle) & (above % 2 == 0)), above, below)
    return (nearest + 128 * np.signbit(values)).astype(np.uint8)


def quantised(matrix: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [N, K] in FP8, scales of blocks, and the floats that they stand for."""
    floats = matrix.float().numpy()
    rows, columns = floats.shape if form.whole is not None else (1, floats.shape[1]) if form.channel else (BLOCK, BLOCK)
    blocks = -(-floats.shape[0] // rows), -(-floats.shape[1] // columns)
    scales, codes = np.empty(blocks, np.float32), np.empty(floats.shape, np.uint8)
    table, stands = values_of_bytes().astype(np.float32), np.empty(floats.shape, np.float32)
    for i, j in np.ndindex(*blocks):
        place = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale = np.abs(floats[place]).max() / LARGEST
        exact = 2.0 ** np.ceil(np.log2(scale)) if form.dtype == torch.float8_e8m0fnu else scale
        scales[i, j] = torch.tensor(exact, dtype=torch.float32).to(form.dtype).float()
        codes[place] = rounded(floats[place] / scales[i, j])
        stands[place] = np.where(codes[place] > 127, -1, 1) * table[codes[place] & 127] * scales[i, j]
    stored = torch.from_numpy(scales).to(form.dtype).reshape(scales.shape if form.whole is None else form.whole)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), stored, torch.from_numpy(stands)


@dataclass(frozen=True)
class Published:
    """A random model as it would be published.

    Attributes:
        random: the model with its draft head; transformers' has the weights that the tensors stand for.
        tensors: of the checkpoint, by name.
        floats: what they stand for, by the names that parameters have, in which experts are fused.
    """

    random: oracle.Oracle
    tensors: Mapping[str, torch.Tensor]
    floats: Mapping[str, torch.Tensor]

    def param(self, param: Param) -> torch.Tensor:
        """A parameter made of the floats."""
        return param.source.join(*(self.floats[name] for name in param.source.names)).to(param.aval.dtype)


@functools.cache
def published(name: str) -> Published:
    """One of MODELS or OTHERS; layers behind the last are the draft head, with copies of the embedding and of the head."""
    random, form = oracle.build((MODELS | OTHERS)[name]), FORMS.get(name, Form())
    drafts = hasattr(random.model.config, "num_nextn_predict_layers")
    random = oracle.with_head(random) if drafts else random
    config = random.model.config
    params = oracle.declared(random.model)
    behind = f"model.layers.{len(config.layer_kinds)}."
    tensors: dict[str, torch.Tensor] = {}
    floats: dict[str, torch.Tensor] = {}
    for source, weight in oracle.split(params, random.weights).items():
        parts = [_stored(each, matrix, form) for each, matrix in _apart(source, weight)]
        tensors |= {key: tensor for stored, _ in parts for key, tensor in stored.items()}
        floats[source] = torch.cat([stands for _, stands in parts]).view(weight.shape)
    with torch.no_grad():
        for key, parameter in random.theirs.state_dict().items():
            parameter.copy_(floats[canonical(key)])
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    tensors |= {behind + copy: tensors[own].clone() for copy, own in copies.items() if drafts}
    for theirs, ours in form.spelt:
        tensors = {key.replace(ours, theirs): tensor for key, tensor in tensors.items()}
    return Published(replace(random, weights={}), tensors, floats)


def _apart(source: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A tensor, or the matrices of each expert, in the order in which they lie in the fused one."""
    prefix, _, fused = source.rpartition(".")
    if not prefix.endswith(".experts"):
        return [(source, weight)]
    names = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    return [
        (f"{prefix}.{expert}.{part}.weight", rows)
        for expert, matrix in enumerate(weight)
        for part, rows in zip(names, matrix.chunk(len(names)), strict=True)
    ]


def _stored(name: str, weight: torch.Tensor, form: Form) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    if name.endswith("e_score_correction_bias"):
        return {name: weight.float()}, weight.float()
    if weight.dim() != 2 or name.removesuffix(".weight").endswith(STAYS):
        plain = weight.bfloat16().contiguous()
        return {name: plain}, plain.float()
    values, scales, stands = quantised(weight, form)
    static = {} if form.whole is None else {name.removesuffix("weight") + "input_scale": torch.full(form.whole, 0.37, dtype=form.dtype)}
    return {name: values, name + form.suffix: scales, **static}, stands


def write(directory: Path, name: str, **config: Any) -> Published:
    """Writes one of MODELS or OTHERS in two files: matrices in the first, and their scales and all else in the second.

    Args:
        config: changes to its config.json.
    """
    made = published(name)
    directory.mkdir(parents=True, exist_ok=True)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    places = {key: files[tensor.dtype != torch.float8_e4m3fn] for key, tensor in made.tensors.items()}
    for file in files:
        save_file({key: tensor for key, tensor in made.tensors.items() if places[key] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    heads = {"num_nextn_predict_layers": 1} if made.random.head else {}
    form = {"quantization_config": FORMS.get(name, Form()).config}
    values = {**made.random.values, **heads, **form, "torch_dtype": "bfloat16", **config}
    (directory / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return made


def write_floats(directory: Path, made: Published, dtype: torch.dtype) -> None:
    """Writes the floats that a checkpoint stands for."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in made.floats.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**made.random.values, "num_nextn_predict_layers": 1}))


def flat(made: Published, params: Any) -> dict[str, torch.Tensor]:
    """All parameters of a tree, made of the floats."""
    return {path: made.param(param) for path, param in tree.flatten(params)}

"""Checkpoints as ModelSlim's QuaRot folds them (msmodelslim@3de0a3c, model/glm_5/quarot.py and `ascendv1_save_postprocess`)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import oracle

READ = ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj", "gate_proj", "up_proj", "gate_up_proj", "mlp.gate")
"""Ends of the names of matrices that read the stream behind a norm."""
WRITTEN = ("o_proj", "down_proj")
"""Of those that write it."""


def fold(tensors: dict[str, torch.Tensor], layers: int, seed: int = 5) -> dict[str, torch.Tensor]:
    """The same model with a stream that is turned by a random orthogonal matrix; its draft head is the layer behind the others.

    Args:
        tensors: of a checkpoint, in float32.
    """
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    M, behind = tensors["model.norm.weight"].shape[0], f"model.layers.{layers}."
    Q = torch.linalg.qr(torch.randn(M, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    exact[behind + "embed_tokens.weight"] = exact["model.embed_tokens.weight"]
    exact[behind + "shared_head.head.weight"] = exact["lm_head.weight"]
    turned = {"rot.weight": Q.T @ torch.diag(exact["model.norm.weight"]) @ Q}
    # A norm's weights go to the columns of what reads it, and are ones after that.
    norms = {"lm_head": "model.norm", behind + "shared_head.head": behind + "shared_head.norm"}
    for name, tensor in exact.items():
        matrix = name.removesuffix(".weight")
        part = matrix.partition(".layers.")[2].partition(".")[0]
        norm = norms.get(matrix, f"model.layers.{part}." + ("post_attention_layernorm" if ".mlp." in name else "input_layernorm"))
        if matrix == behind + "eh_proj":
            both = torch.cat([exact[behind + "enorm.weight"], exact[behind + "hnorm.weight"]])
            turned[name] = Q.T @ (tensor * both) @ torch.block_diag(Q, Q)
        elif matrix in norms or matrix.endswith(READ):
            turned[name] = (tensor * exact[norm + ".weight"]) @ Q
        elif matrix.endswith(WRITTEN):
            turned[name] = Q.T @ tensor
        elif matrix.endswith("embed_tokens"):
            turned[name] = tensor @ Q
        elif matrix.endswith(("_layernorm", "model.norm", "enorm", "hnorm", "shared_head.norm")) and ".self_attn." not in name:
            turned[name] = torch.ones_like(tensor)
        else:
            turned[name] = tensor
    return {name: tensor.float().contiguous() for name, tensor in turned.items()}


def write(directory: Path, random: oracle.Oracle, folded: bool = True, alike: bool = True) -> Path:
    """A checkpoint of a model with a draft head, folded or as it is; its matrices are float.

    Args:
        alike: whether the draft head's last norm has the weights of the model's.
    """
    layers = len(random.model.config.layer_kinds)
    tensors = oracle.split(random.model.family.abstract_params(random.model.config, torch.float32), random.weights)
    if alike:
        tensors[f"model.layers.{layers}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors = fold(tensors, layers) if folded else {name: tensor.contiguous() for name, tensor in tensors.items()}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**random.values, "num_nextn_predict_layers": 1}))
    if folded:
        kinds = {name: "FLOAT" for name in tensors if name != "rot.weight"}
        said = {"version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", "group_size": 0, "is_rot_used": True}
        said["optional"] = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
        (directory / "quant_model_description.json").write_text(json.dumps({**kinds, **said}))
    save_file(tensors, directory / "model.safetensors")
    return directory

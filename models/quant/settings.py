"""Which settings of a quantised checkpoint are known, and with which values: others may change arithmetic, which nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...graphs.errors import CheckpointError

BLOCK = 128
"""Rows and columns of a block of FP8: `weight_block_size` of published checkpoints (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md)."""

Legal = Sequence[Any] | None
"""Values that a setting may have, None among them where it may be absent; or None: any value, since no result depends on it."""

Known = Mapping[str, Legal]

_ABSENT: Legal = (None,)
_OF_TENSORS: Known = {"block_structure": _ABSENT, "observer": None, "observer_kwargs": None, "scale_dtype": None, "zp_dtype": None}

INT8_WEIGHTS: Known = {
    "num_bits": (8,),
    "type": ("int",),
    "strategy": ("channel",),
    "symmetric": (True,),
    "dynamic": (None, False),
    "group_size": (None, -1),
    "actorder": (None, "weight", "static"),
    **_OF_TENSORS,
}
INT8_ACTIVATIONS: Known = {
    "num_bits": (8,),
    "type": ("int",),
    "strategy": ("token",),
    "symmetric": (True,),
    "dynamic": (True,),
    "group_size": _ABSENT,
    "actorder": _ABSENT,
    **_OF_TENSORS,
}
FLOAT8_WEIGHTS: Known = {
    **INT8_WEIGHTS,
    "type": ("float",),
    "strategy": ("channel", "block", "tensor"),
    # Files of 2025 write both sides as one text.
    "block_structure": (None, [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"),
}
FLOAT8_ACTIVATIONS: Known = {
    **INT8_ACTIVATIONS,
    "type": ("float",),
    "strategy": ("token", "group", "tensor"),
    "dynamic": (True, None, False),
    "group_size": (None, -1, BLOCK),
}
"""Of activations that would be rounded, by scales of their own or static ones; beside weights that are read as floats they are not."""

INT4_WEIGHTS: Known = {
    "actorder": (None, "weight", "static"),
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "dynamic": (None, False),
    "strategy": None,
    "group_size": None,
    **_OF_TENSORS,
}
GROUP: Known = {"targets": None, "weights": None, "input_activations": None, "output_activations": _ABSENT, "format": None}
"""An entry of `config_groups` (QuantizationScheme of compressed-tensors 0.20.0); weights and activations have tables of their own."""

COMPRESSED: Known = {
    "quant_method": None,
    "config_groups": None,
    "ignore": None,
    "format": None,
    "version": None,
    "global_compression_ratio": None,
    "run_compressed": None,
    "use_optimized_inference": None,
    # Files of 2024 say "frozen" of matrices that are stored in integers, too.
    "quantization_status": None,
    "kv_cache_scheme": _ABSENT,
    "dequantize": (None, False),
    "transform_config": (None, {}, {"config_groups": {}}),
    "sparsity_config": None,
}
"""`quantization_config` of compressed-tensors 0.20.0, with what transformers 5.23 adds."""

SPARSITY: Known = {
    "format": ("dense",),
    **dict.fromkeys(("global_sparsity", "sparsity_structure", "registry_requires_subclass", "targets", "ignore")),
}
"""`sparsity_config` where it is not empty: of matrices that are stored whole."""

FP8: Known = {
    "quant_method": None,
    # The second is MiniMax's.
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    # Without blocks a matrix has one scale (AutoFP8).
    "weight_block_size": (None, [BLOCK, BLOCK]),
    "activation_scheme": ("dynamic", "static"),
    "dequantize": None,
    # Which matrices are FP8 is read from their tensors, as is the dtype of scales.
    "modules_to_not_convert": None,
    "modules_to_convert": None,
    "ignored_layers": None,
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
}
"""`quantization_config` of method fp8 (FineGrainedFP8Config of transformers 5.23)."""

DESCRIPTION: Known = {
    "version": None,
    "model_quant_type": None,
    "group_size": None,
    "optional": None,
    "metadata": None,
    "kv_quant_type": (None, "C8"),
    "kv_cache_type": (None, "C8"),
    "fa_quant_type": _ABSENT,
    "reduce_quant_type": _ABSENT,
    # Of GLM-5 and DeepSeek V3.2, whose descriptions also say it of each layer.
    "indexer_quant_type": (None, "INT8_DYNAMIC"),
    # Of GLM-5, whose draft head then turns hidden states by the tensor `rot.weight`.
    "is_rot_used": (None, False, True),
    # How weights were rounded, of which the tensors are the result (older versions).
    **dict.fromkeys(
        ("w_bit", "a_bit", "w_sym", "dev_type", "fraction", "act_method", "co_sparse", "anti_method", "disable_level", "do_smooth",
         "use_sigma", "sigma_factor", "is_lowbit", "mm_tensor", "open_outlier", "is_dynamic", "pdmix")
    ),
}  # fmt: skip
"""Entries of ModelSlim's description that are of no tensor (26.1.0, save/ascendv1.py; the last ones of its version without a number)."""

METADATA: Known = {"quarot": (None, {})}
"""`metadata` of a description: of rotations those of activations, which a step computes."""

OPTIONAL: Known = {"quarot": None}
"""`optional` of a description: of rotations those that are folded into the weights."""

_REASONS = {
    "actorder": "groups of columns in another order are not read",
    "kv_cache_scheme": "a quantised cache is not read here",
    "transform_config": "rotations of activations are not computed here",
    "output_activations": "products are not rounded here",
    "fa_quant_type": "int8 attention is not read here",
    "indexer_quant_type": "keys of indexers are rounded to int8 or not",
    "reduce_quant_type": "sums of ranks are not rounded here",
    "quarot": "rotations of activations are not computed here",
}


def check(where: str, values: Mapping[str, Any], known: Known) -> None:
    """Refuses a setting that is not known, or has another value than the legal ones.

    Raises:
        CheckpointError: naming it.
    """
    for name, legal in known.items():
        if legal is not None and values.get(name) not in legal:
            why = f": {_REASONS[name]}" if name in _REASONS else ""
            raise CheckpointError(f"{where}: {name} is {values.get(name)!r}{why}; legal is {_spelled(legal)}")
    for name, value in values.items():
        if name not in known and value is not None:
            raise CheckpointError(f"{where}: {name} is {value!r}, a setting that is not known here; known are {', '.join(known)}")


def _spelled(legal: Sequence[Any]) -> str:
    """Absent and empty ones are alike."""
    values = [repr(value) for value in legal if value or value is False]
    return " or ".join([*values, "null"] if len(values) < len(legal) and None in legal else values)

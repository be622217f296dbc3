"""Decides the format of cached keys and values."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...graphs import tree
from ...graphs.errors import SpecError
from ...graphs.types import Limits
from ...models.quant.formats import FLOAT, INT8, INT8_STATIC, Formats
from ...models.step import Model
from .choices import KV_CACHE_DTYPES

AUTO, BFLOAT16, INTEGERS = KV_CACHE_DTYPES
_LAYERS = "?*"
"""Every attention layer that has a name: those of a draft head have none, and cache floats."""


def choose_kv_cache(requested: str, formats: Formats, dtype: torch.dtype) -> Formats:
    """The formats with that of the cache: "auto" is what the checkpoint has, else floats; "int8" takes its scales where it has them.

    Args:
        formats: of the checkpoint, or of a scheme.
        dtype: that the model computes in.

    Raises:
        SpecError: there is no such format, or floats of another dtype than the model's are asked for.
    """
    if requested not in KV_CACHE_DTYPES:
        raise SpecError(f"kv_cache_dtype is {requested!r}; legal are {', '.join(KV_CACHE_DTYPES)}")
    if requested == BFLOAT16:
        if dtype != torch.bfloat16:
            raise SpecError(f"--kv-cache-dtype {requested}: the model computes in {dtype} and caches no others; legal are auto and int8")
        return replace(formats, kv_cache=())
    if requested == INTEGERS:
        static = tuple(rule for rule in formats.kv_cache if rule[1] == INT8_STATIC)
        return replace(formats, kv_cache=(*static, (_LAYERS, INT8)))
    return formats


def check_kv_cache(model: Model, limits: Limits, dtype: torch.dtype) -> None:
    """Refuses a cache of int8 for layers that have no operator for one.

    Raises:
        SpecError: no layer caches keys and values of heads.
    """
    if not any(form != FLOAT for _, form in model.config.variant.formats.kv_cache):
        return
    if not any(aval.dtype == torch.int8 for _, aval in tree.flatten(model.state(limits, dtype))):
        raise SpecError(
            f"--kv-cache-dtype {INTEGERS}: {model.name} caches no keys and values of heads but latents, of which fused attention takes no "
            "int8 in row-major pages (Ascend/op-plugin@517f2e7, npu_fused_infer_attention_score: none beside query_rope); legal are auto, "
            "bfloat16"
        )


def note(formats: Formats) -> str | None:
    """What the cache of a plan is, where it is not of floats."""
    forms = {form for _, form in formats.kv_cache} - {FLOAT}
    if not forms:
        return None
    scales = "scales of the checkpoint, one a head's channel" if INT8_STATIC in forms else "one scale a token and head, beside the pages"
    return f"keys and values are cached as int8, {scales}"

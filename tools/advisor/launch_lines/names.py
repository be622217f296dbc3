"""Which model the name of a checkpoint is of: a preset, another published name of one, or none; and what a name says of forms."""

from __future__ import annotations

import re

from ....models import registry
from ....models.presets import NAMES

_HUB = re.compile(r"models--.+?--([^/]+)/snapshots/[^/]+$")
"""A checkpoint in the cache of Hugging Face's hub."""

_BREAKS = re.compile(r"[^a-z0-9.]+")
_SCHEME = re.compile(r"(?<![a-z0-9])(w[48]a8|w4a16)(?![0-9])")
_READ = re.compile(
    r"(?:-(?:quantized\.)?(?:w8a8|w4a8|w4a16)(?:-?c8)?(?:-dynamic)?(?:-[0-9])?|-fp8(?:-dynamic|-block)?|-bf16|-(?:float)?mtp|-quarot|-ascend|-modelslim)*"
)
"""What a name may say behind that of the model: forms that builds read, and who wrote them."""

_DRAFTS, _LORA = "a draft head, which --draft-model of build names beside its model", "an adapter; merge it into the checkpoint"
_NUMBERS = "no form of weights that builds read: legal are floats, int8 and int4 of ModelSlim and compressed-tensors, and FP8"
_UNREAD = {
    r"awq|gptq|gguf|ggml|i?q[1-8]-(?:k|[01s]|[a-z]{2,3})(?:-[a-z]+)?|auto-?round|exl[23]|hqq|aqlm|mlx|bnb": _NUMBERS,
    r"nv-?fp4|mx-?fp[48]|fp4|nf4|int4|w4a4|w4afp8|w8a16|fp8-kv|[2-8]-?bits?": _NUMBERS,
    r"eagle-?3?|nextn|medusa|dflash|speculators?": _DRAFTS,
    r"lora|adapters?": _LORA,
}
"""Words that say a form which no build reads, and what is said of it."""


def preset_of(path: str) -> str | None:
    """The preset that a checkpoint's name is of; None where it is of another model: words that are not known may say anything."""
    text = _text(path)
    for preset in registry.presets():
        for name in (preset, *NAMES.get(preset, ())):
            known = _BREAKS.sub("-", name.lower())
            if text.startswith(known) and _READ.fullmatch(text[len(known) :]):
                return preset
    return None


def unread_form(path: str) -> str | None:
    """Why a checkpoint cannot be built, where its name says so: the word, and what is legal."""
    for pattern, why in _UNREAD.items():
        if match := re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", _text(path)):
            return f"the name of {path} says {match[0]}, which is {why}"
    return None


def named_scheme(path: str) -> tuple[str | None, str]:
    """Scheme that the name of a checkpoint says, and the word that says it."""
    match = _SCHEME.search(path.lower())
    return (match[1], match[1]) if match else (None, "")


def _text(path: str) -> str:
    path = path.rstrip("/")
    hub = _HUB.search(path)
    return _BREAKS.sub("-", (hub[1] if hub else path.rpartition("/")[2]).lower())

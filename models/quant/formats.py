"""Which format each matrix of a model is stored in: rules over the names of a checkpoint's tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ...graphs.errors import CheckpointError, SpecError

FLOAT = "float"
W8A8, W8A8_DYNAMIC, W4A8_DYNAMIC, W4A16 = "w8a8", "w8a8_dynamic", "w4a8_dynamic", "w4a16"

INT8, INT8_STATIC = "int8", "int8_static"
KV_CACHES = {
    FLOAT: "the dtype that the model computes in",
    INT8: "int8, one scale a token and head, of latents one each 128 channels of a token",
    INT8_STATIC: "int8, one scale a head's channel, which the checkpoint has (ModelSlim's C8)",
}
"""Formats of the keys and values that a layer caches: name -> what it is."""
INDEXERS = "*.indexer"
"""All indexers, whose keys have a format of their own."""

FORMATS = {
    FLOAT: "the dtype that the model computes in",
    W8A8: "int8, one scale an output channel; activations int8 by one scale and offset that a calibration found",
    W8A8_DYNAMIC: "int8, one scale an output channel; activations int8, one scale a token",
    W4A8_DYNAMIC: "int4, one scale an output channel or a group of its weights; activations int8, one scale a token",
    W4A16: "int4, one scale an output channel or a group of its weights; activations stay what they are",
}
"""Formats of a matrix: name -> what it is. The names are ModelSlim's, in lower case."""

UNROUNDED = (FLOAT, W4A16)
"""Formats whose products read activations as they are; those of the others read them in int8."""

INT4 = (W4A8_DYNAMIC, W4A16)
"""Formats of int4, whose scales may be of groups of weights."""


@dataclass(frozen=True)
class Formats:
    """The format of each matrix, by rules of which the first that matches decides; what none matches is float.

    Attributes:
        rules: (pattern, format): a pattern is a shell's, over the name of a matrix in a checkpoint without `.weight`, as in
            `model.layers.3.self_attn.q_proj`; experts of a layer are one matrix, `model.layers.3.mlp.experts.gate_up_proj`.
        stored: whether the checkpoint has the integers; else matrices are quantised when they are loaded.
        group: weights of an output channel that share an int4 scale; 0: all.
        biased: patterns of matrices and norms to whose output a bias is added that the model does not have: smoothing that shifts
            activations leaves it.
        kv_cache: (pattern, format): a pattern over the names of attention layers, as `model.layers.3.self_attn`, and of their indexers,
            as `model.layers.3.self_attn.indexer`; what none matches caches floats.
        sent_back: format of what experts on other ranks send back where they got int8, one of FLOAT and INT8.
        rotated: whether weights are folded so that hidden states are rotated, and a draft head turns those it is given (`mtp.merged`).
    """

    rules: tuple[tuple[str, str], ...] = ()
    stored: bool = False
    group: int = 0
    biased: tuple[str, ...] = ()
    kv_cache: tuple[tuple[str, str], ...] = ()
    sent_back: str = FLOAT
    rotated: bool = False

    def __post_init__(self) -> None:
        for pattern, form in self.rules:
            if form not in FORMATS:
                raise SpecError(f"{pattern}: the format is {form!r}; legal are {', '.join(FORMATS)}")
        for pattern, form in self.kv_cache:
            if form not in KV_CACHES:
                raise SpecError(f"{pattern}: the format of its cache is {form!r}; legal are {', '.join(KV_CACHES)}")

    def of_cache(self, attention: str) -> str:
        """The format of the keys and values of an attention layer, or of an indexer's keys, by its name in a checkpoint; "" names none."""
        return _format(self.kv_cache, attention)

    def of(self, names: Iterable[str]) -> str:
        """The format of a matrix that is made of those tensors.

        Raises:
            CheckpointError: they have different formats.
        """
        found = {name: _format(self.rules, matrix_name(name)) for name in names}
        if len(set(found.values())) > 1:
            each = ", ".join(f"{name} is {form}" for name, form in found.items())
            raise CheckpointError(f"{each}; they are multiplied as one matrix and must have one format")
        return next(iter(found.values()), FLOAT)

    def agree(self, names: Iterable[str]) -> bool:
        """Whether all those tensors have one format."""
        return len({_format(self.rules, matrix_name(name)) for name in names}) == 1

    def has_bias(self, names: Iterable[str]) -> bool:
        """Whether a bias is added to what those tensors make.

        Raises:
            CheckpointError: some have one and others not.
        """
        found = {name: _matches(self.biased, matrix_name(name)) for name in names}
        if len(set(found.values())) > 1:
            each = ", ".join(f"{name} has {'a' if biased else 'no'} bias" for name, biased in found.items())
            raise CheckpointError(f"{each}; they are multiplied as one matrix, and all or none must have one")
        return any(found.values())

    @staticmethod
    def of_fields(fields: Mapping[str, Any]) -> Formats:
        """What `as_fields` gave; float for none."""
        rules = tuple((str(pattern), str(form)) for pattern, form in fields.get("rules", ()))
        biased = tuple(str(pattern) for pattern in fields.get("biased", ()))
        caches = tuple((str(pattern), str(form)) for pattern, form in fields.get("kv_cache", ()))
        sent_back = str(fields.get("sent_back", FLOAT))
        stored, group, rotated = bool(fields.get("stored", False)), int(fields.get("group", 0)), bool(fields.get("rotated", False))
        return Formats(rules, stored, group, biased, caches, sent_back, rotated)

    def as_fields(self) -> dict[str, Any]:
        """As plain lists and values."""
        return {
            "rules": [list(rule) for rule in self.rules],
            "stored": self.stored,
            "group": self.group,
            "biased": list(self.biased),
            "kv_cache": [list(rule) for rule in self.kv_cache],
            **({} if self.sent_back == FLOAT else {"sent_back": self.sent_back}),
            **({"rotated": True} if self.rotated else {}),
        }

    @property
    def quantises(self) -> bool:
        """Whether any matrix may have a format that is not float."""
        return any(form != FLOAT for _, form in self.rules)

    @property
    def rounds(self) -> bool:
        """Whether any matrix or cache may have a format that is not float."""
        return self.quantises or any(form != FLOAT for _, form in self.kv_cache)

    def floats_first(self, *patterns: str) -> Formats:
        """The same, where matrices of these patterns stay float."""
        return replace(self, rules=(*((pattern, FLOAT) for pattern in patterns), *self.rules))


PLAIN = Formats()
"""Every matrix is float."""


def matrix_name(name: str) -> str:
    """The name of a tensor's matrix: without `.weight`."""
    return name.removesuffix(".weight")


def sibling(name: str, kind: str) -> str:
    """The name of the tensor of that kind, such as `weight_scale`, that belongs to a matrix."""
    return f"{matrix_name(name)}.{kind}"


@functools.lru_cache(maxsize=65_536)
def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@functools.lru_cache(maxsize=65_536)
def _format(rules: tuple[tuple[str, str], ...], name: str) -> str:
    return next((form for pattern, form in rules if fnmatchcase(name, pattern)), FLOAT)

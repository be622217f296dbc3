"""A small vocabulary for drafts: the first rows of the output head once more, which a draft reads in place of the whole head.

A head is read once for every draft, and is most of what a draft reads. Ids of a byte-pair encoding are in the order of its merges, so the
first ones are those of frequent tokens. A token outside is never drafted and always sampled, so no output changes, only how many drafts
are accepted: FR-Spec (arXiv:2502.14856), which ranks tokens by a corpus. EAGLE-3 heads have a vocabulary of their own (eagle3.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from ..graphs.types import Aval, Leaf
from .params import Param, Source
from .variant import Variant

KEY = "draft_head"
"""Key of the rows in the tree of parameters."""


class HeadSizes(Protocol):
    """Fields of a model's configuration that are read here."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def variant(self) -> Variant: ...


def param(cfg: HeadSizes, dtype: torch.dtype, names: tuple[str, ...], instead: tuple[str, ...]) -> dict[str, Param]:
    """The rows [N, M] under KEY; nothing where drafts are of the whole vocabulary.

    Args:
        names, instead: of the head, as in `Source`.
    """
    if not (rows := cfg.variant.draft_vocab):
        return {}
    shape = (rows, cfg.hidden_size)
    return {KEY: Param(Aval(shape, dtype, ("vocab", None)), Source(names, (shape,), instead=instead, first_rows=True), role="column")}


def size(cfg: HeadSizes) -> int:
    """Ids that may be drafted: the first ones."""
    return cfg.variant.draft_vocab or cfg.vocab_size


def recorded(params: Iterable[Leaf]) -> int:
    """`Variant.draft_vocab` of a model that has these parameters; 0 where it has no such rows. Integers lie [M, N]."""
    rows = (leaf.aval for leaf in params if KEY in leaf.path.split("."))
    return next((aval.shape[aval.axes.index("vocab")] for aval in rows if "vocab" in aval.axes), 0)


def small(cfg: HeadSizes, tp: int) -> int:
    """`Variant.draft_vocab` of a small model that stands for one (shrink.py): half of its vocabulary, where the large one has a part."""
    return cfg.vocab_size // (2 * tp) * tp if cfg.variant.draft_vocab else 0

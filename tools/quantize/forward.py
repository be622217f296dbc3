"""Runs a model over windows of tokens in eager torch, from empty state: what calibrations and perplexities need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...graphs import tree
from ...graphs.errors import SpecError
from ...graphs.steps.inputs import LAYER_INPUTS
from ...graphs.steps.prefill import PREFILL
from ...graphs.steps.table import StepInputs
from ...graphs.types import Limits, Tree
from ...models import checkpoint, registry
from ...models.quant.description import formats_in
from ...models.quant.formats import FLOAT, PLAIN, Formats
from ...models.step import Model
from ...server.text.tokenizer import TextTokenizer


def in_formats(model: Model, formats: Formats) -> Model:
    """The model with its matrices and caches in those formats, for one device."""
    experts = model.config.num_experts > 0 and any(form != FLOAT and "experts" in pattern for pattern, form in formats.rules)
    variant = replace(model.config.variant, formats=formats, grouped=experts)
    return replace(model, config=replace(model.config, variant=variant))


def loaded(source: registry.ModelSource, dtype: torch.dtype, formats: Formats | None = None) -> tuple[Model, Tree]:
    """A model without its draft head, and its parameters.

    Args:
        dtype: that it computes in.
        formats: of its matrices; None for those of the checkpoint.

    Raises:
        SpecError: the model has no weights.
        CheckpointError: the checkpoint does not fit it.
    """
    if source.checkpoint_dir is None:
        raise SpecError(f"{source.name} has no weights; legal is a checkpoint directory or a bundled model")
    model = in_formats(source.model, formats or formats_in(source.checkpoint_dir) or PLAIN)
    return model, checkpoint.load(checkpoint.open_checkpoint(source.checkpoint_dir), model.params(dtype))


def token_ids(source: registry.ModelSource, text: str) -> torch.Tensor:
    """The tokens of a text: [T] int32.

    Raises:
        SpecError: the model has no tokenizer.
    """
    if source.tokenizer is None:
        raise SpecError(f"{source.name} has no tokenizer.json, which text needs; legal is a checkpoint directory with one")
    return torch.tensor(TextTokenizer.load(source.tokenizer).encode(text), dtype=torch.int32)


def windows(tokens: torch.Tensor, length: int, overlap: int = 0) -> Iterator[torch.Tensor]:
    """Consecutive windows [1, Q] of tokens [T], Q at most `length`; neighbours share `overlap` tokens."""
    for begin in range(0, max(1, len(tokens) - overlap), length - overlap):
        yield tokens[None, begin : begin + length]


@torch.inference_mode()
def logits(model: Model, params: Tree, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits [B, Q, V] of tokens [B, Q] int32, whose rows begin with nothing before them."""
    rows, length = tokens.shape
    limits = Limits(page_size=1, num_pages=rows * length + 1, num_slots=rows + 1, max_model_len=length)
    inputs: dict[str, Any] = StepInputs(PREFILL.bucket(rows, length), limits).padding(LAYER_INPUTS)
    inputs["query_lens"].fill_(length)
    inputs["page_table"].copy_(torch.arange(1, rows * length + 1).view(rows, length))
    inputs["state_slots_in"].copy_(torch.arange(1, rows + 1))
    inputs["state_slots_out"].copy_(inputs["state_slots_in"][:, None])
    inputs["tokens"].copy_(tokens)
    state = tree.map_leaves(lambda aval: torch.zeros(aval.shape, dtype=aval.dtype), model.state(limits, dtype))
    hidden, _, _ = model.family.forward(model.config, params, state, inputs)
    result: torch.Tensor = model.family.head(model.config, params, hidden)
    return result.view(rows, length, -1)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        SpecError: it is not UTF-8, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: {error}") from None
    if not text.strip():
        raise SpecError(f"{path} is empty; legal is a file with text")
    return text

"""What a model family offers, in words and types: pure functions over trees of tensors, one module a family."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from ..graphs.types import Limits, Tree


class Seen(NamedTuple):
    """What a forward pass saw beside its result.

    Attributes:
        features: [T, ...] for the draft head, laid out as the stream (rows.py): the final hidden states for a multi-token-prediction
            head, those of several layers side by side for an EAGLE-3 head.
        routers: router logits [T, E] of each MoE layer.
    """

    features: torch.Tensor
    routers: list[torch.Tensor]


class Family(Protocol):
    """A module of this folder. Those whose models draft also have the last three.

    Attributes:
        FAMILY: its name.
        MODEL_TYPES: values of `model_type` in config.json that it serves.
        DRAFT: key of the draft head in the trees of parameters and of state; absent from them in models without one.
    """

    FAMILY: str
    MODEL_TYPES: tuple[str, ...]
    DRAFT: str

    def abstract_params(self, cfg: Any, dtype: torch.dtype) -> Tree:
        """Tree of Param."""
        ...

    def abstract_state(self, cfg: Any, limits: Limits, dtype: torch.dtype) -> Tree:
        """Tree of Aval."""
        ...

    def forward(self, cfg: Any, params: Tree, state: Tree, inputs: Tree) -> tuple[torch.Tensor, Tree, Seen]:
        """Hidden states [T, M] after the final norm, the new state, and what else was seen."""
        ...

    def head(self, cfg: Any, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of hidden states [T, M]."""
        ...

    def draft_take(self, cfg: Any, params: Tree, state: Tree, inputs: Tree, hidden: torch.Tensor, *, first: bool) -> tuple[Tree, Tree]:
        """The draft head takes in tokens [B, Q], each the one after what `hidden` saw: its cache has them after.

        The first time in a step `hidden` is `Seen.features` of the model's pass; then it is what `draft` returned. `params` are the
        model's without `layers`, `state` is the draft head's part.

        Returns:
            what `draft` reads of each token, a tree of whole tensors, [T, width] each, and the new state.
        """
        ...

    def draft(self, cfg: Any, params: Tree, state: Tree, inputs: Tree, taken: Tree) -> torch.Tensor:
        """The draft head on tokens that it took in: its hidden states, as many rows as `taken` has, laid out as the stream.

        Apart from taking in, so that of all tokens of a step only the last of each row goes through the whole head.
        """
        ...

    def draft_head(self, cfg: Any, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of the draft head's hidden states, over the model's vocabulary."""
        ...

"""Turns a model into the program of one bucket: run the layers, pick the rows that speak, sample."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..graphs import ops
from ..graphs.layout import constrain
from ..graphs.types import Bucket, Limits, Program, Tree
from .batch import abstract_inputs
from .params import avals


@dataclass(frozen=True)
class Model:
    """A family's functions with one configuration.

    Attributes:
        name: what users call it.
        family: module of this folder that offers abstract_params, abstract_state, forward, head (and draft).
        config: that family's configuration.
    """

    name: str
    family: ModuleType
    config: Any

    def params(self, dtype: torch.dtype) -> Tree:
        """Tree of Param that the programs read; the draft head's are left out while nothing drafts."""
        tree: dict[str, Any] = dict(self.family.abstract_params(self.config, dtype))
        tree.pop("mtp", None)
        return tree

    def state(self, limits: Limits, dtype: torch.dtype) -> Tree:
        """Tree of Aval of the programs' state pools."""
        tree: dict[str, Any] = dict(self.family.abstract_state(self.config, limits, dtype))
        tree.pop("mtp", None)
        return tree


def program(model: Model, bucket: Bucket, limits: Limits, dtype: torch.dtype) -> Program:
    """The program of a bucket: `(params, state, inputs) -> ({"tokens": [B, W] i32, "logits": [B, W, V] f32}, state)`.

    Decode speaks after every token (W = Q), prefill after each row's last valid one (W = 1).
    """

    def forward(params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        hidden, new_state, _ = model.family.forward(model.config, params, state, inputs)
        if bucket.kind == "prefill":
            hidden = ops.last_rows(hidden, inputs["lengths"])
        logits = model.family.head(model.config, params, hidden).view(*inputs["uniform"].shape, -1)
        logits = constrain(logits, None, None, None)
        sampling = (inputs[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniform"))
        return {"tokens": ops.sample(logits, *sampling), "logits": logits}, new_state

    return Program(
        f"{model.name}/{bucket.name}",
        bucket,
        forward,
        avals(model.params(dtype)),
        model.state(limits, dtype),
        abstract_inputs(bucket, limits),
    )



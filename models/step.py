"""Turns a model into the program of one bucket: run the layers, pick the rows that speak, sample."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..graphs import ops
from ..graphs.layout import constrain, ways
from ..graphs.region import all_to_all, shard_map
from ..graphs.types import Bucket, Limits, Program, Tree
from . import rows
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

    def __reduce__(self) -> tuple[Any, ...]:
        # Modules do not cross to other processes; their names do.
        return _remade, (self.name, self.family.__name__.rpartition(".")[2], self.config)

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


def _remade(name: str, family: str, config: Any) -> Model:
    return Model(name, importlib.import_module(f".{family}", __package__), config)


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "uniform")


def program(model: Model, bucket: Bucket, limits: Limits, dtype: torch.dtype, *, emit_logits: bool = True) -> Program:
    """The program of a bucket: `(params, state, inputs) -> ({"tokens": [B, W] i32, "logits": [B, W, V] f32}, state)`.

    Decode speaks after every token (W = Q), prefill after each row's last valid one (W = 1).

    Args:
        emit_logits: logits are among the outputs; without them no device ever holds those of the whole vocabulary for all rows.
    """

    def forward(params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        hidden, new_state, _ = model.family.forward(model.config, params, state, inputs)
        hidden = rows.whole(hidden, bucket.tokens)
        if bucket.kind == "prefill":
            hidden = ops.last_rows(hidden, inputs["lengths"])
        logits = model.family.head(model.config, params, hidden)
        B, W = inputs["uniform"].shape
        if not emit_logits and B % ways("vocab") == 0:
            return {"tokens": _sample_shares(logits, inputs)}, new_state
        logits = constrain(logits, None, None).view(B, W, -1).float()
        tokens = ops.sample(logits, *(inputs[name] for name in SAMPLING))
        return {"tokens": tokens, **({"logits": logits} if emit_logits else {})}, new_state

    return Program(
        f"{model.name}/{bucket.name}",
        bucket,
        forward,
        avals(model.params(dtype)),
        model.state(limits, dtype),
        abstract_inputs(bucket, limits),
    )


def _sample_shares(logits: torch.Tensor, inputs: Tree) -> torch.Tensor:
    """Tokens [B, W] of logits [B*W, V] split over the vocabulary: each device gets all logits of its share of the requests.

    That moves as many bytes as a device holds; gathering the vocabulary on every device would move as many as all hold.
    """
    shares = shard_map(lambda x: all_to_all(x, "vocab"), [(logits, (None, "vocab"))], ("sampled_rows", None))
    mine = {name: constrain(inputs[name], "sampled_rows", *(None,) * (inputs[name].dim() - 1)) for name in SAMPLING}
    logits = shares.view(*inputs["uniform"].shape, -1).float()
    return constrain(ops.sample(logits, *mine.values()), None, None)

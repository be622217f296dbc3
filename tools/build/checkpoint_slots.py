"""State slots beyond those of requests in flight, for the states after prefixes that a server keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...graphs import tree
from ...graphs.errors import SpecError
from ...graphs.types import Limits
from ...models.step import Model

if TYPE_CHECKING:
    from .targets import Target


def with_checkpoint_slots(limits: Limits, asked: int | None, model: Model, target: Target, published: bool) -> Limits:
    """The limits with slots for checkpoints (runtime/scheduler/checkpoints.py).

    By default there is one for each request in flight, on this machine; a deployment has those that its shared prefix needs, and memory
    of NPUs is otherwise planned by whoever builds for them. Slots of requests that are not in flight serve too.

    Args:
        limits: with the slots that a deployment needs, if any.
        asked: how many; None leaves the choice to this function.
        published: whether the limits are a deployment's.

    Raises:
        SpecError: slots for a model without recurrent states.
    """
    needed, plain = limits.checkpoint_slots, replace(limits, num_slots=limits.num_slots - limits.checkpoint_slots, checkpoint_slots=0)
    if not has_recurrent_states(model, limits):
        if asked:
            raise SpecError(f"--checkpoint-slots {asked}: {model.name} has no recurrent states, whose prefixes need pages only; legal is 0")
        return plain
    default = needed if published else limits.num_request_slots - 1 if target.local else 0
    count = default if asked is None else asked
    return replace(plain, num_slots=plain.num_slots + count, checkpoint_slots=count)


def has_recurrent_states(model: Model, limits: Limits) -> bool:
    """Whether any pool of the model has a slot a state."""
    return any(aval.axes[0] in ("slots", "first_slots") for _, aval in tree.flatten(model.state(limits, torch.float32)))

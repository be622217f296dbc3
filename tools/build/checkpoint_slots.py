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

    By default there is one for each request in flight, on this machine; a deployment's pools are those that it published, and memory of
    NPUs is planned by whoever builds for them. Slots of requests that are not in flight serve too.

    Args:
        asked: how many; None leaves the choice to this function.
        published: whether the limits are a deployment's.

    Raises:
        SpecError: slots for a model without recurrent states.
    """
    if not has_recurrent_states(model, limits):
        if asked:
            raise SpecError(f"--checkpoint-slots {asked}: {model.name} has no recurrent states, whose prefixes need pages only; legal is 0")
        return limits
    count = (limits.num_request_slots - 1 if target.local and not published else 0) if asked is None else asked
    return replace(limits, num_slots=limits.num_slots + count, checkpoint_slots=count)


def has_recurrent_states(model: Model, limits: Limits) -> bool:
    """Whether any pool of the model has a slot a state."""
    return any(aval.axes[0] in ("slots", "first_slots") for _, aval in tree.flatten(model.state(limits, torch.float32)))

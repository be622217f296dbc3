"""Values that all layers of a step share: flat tokens, rotary angles, and where each row's state lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree

from ..graphs import ops
from ..graphs.types import Tree
from .rotary import Rotary


@dataclass(frozen=True)
class Batch:
    """Operands of every layer besides its weights and state.

    Attributes:
        size, q_len: B and Q.
        tokens: [T] ids.
        cos, sin: [T, R/2] f32 rotary angles.
        page_table, num_computed_tokens, query_lens, state_slots_in, state_slots_out: as in graphs/steps/; in decode those
            of the candidates.
    """

    size: int
    q_len: int
    tokens: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    page_table: torch.Tensor
    num_computed_tokens: torch.Tensor
    query_lens: torch.Tensor
    state_slots_in: torch.Tensor
    state_slots_out: torch.Tensor

    @staticmethod
    def of(inputs: Tree, rotary: Rotary) -> Batch:
        """The batch of a step whose layers read `inputs` (LAYER_INPUTS, PICTURE_INPUTS)."""
        B, Q = inputs["tokens"].shape
        cos, sin = rotary.angles(_positions(inputs, Q))
        names = ("page_table", "num_computed_tokens", "query_lens", "state_slots_in", "state_slots_out")
        return Batch(B, Q, inputs["tokens"].reshape(-1), cos, sin, **{name: inputs[name] for name in names})


def _positions(inputs: Tree, q_len: int) -> torch.Tensor:
    """[T], or [T, 3] of a chunk that may have pictures."""
    if "positions" in inputs:
        positions: torch.Tensor = inputs["positions"].flatten(0, 1)
        return positions
    start, offsets = inputs["num_computed_tokens"], inputs.get("candidate_offsets", inputs.get("position_offsets"))
    on_one_axis: torch.Tensor = ops.positions(start, q_len) if offsets is None else (start[:, None] + offsets).reshape(-1)
    return on_one_axis


_TENSORS = ("tokens", "cos", "sin", "page_table", "num_computed_tokens", "query_lens", "state_slots_in", "state_slots_out")

# A batch is an operand of a layer's body: its tensors are leaves, and its sizes are static.
pytree.register_pytree_node(
    Batch,
    lambda batch: ([getattr(batch, name) for name in _TENSORS], (batch.size, batch.q_len)),
    lambda leaves, sizes: Batch(*sizes, *leaves),
    serialized_type_name="npucompile.models.batch.Batch",
)

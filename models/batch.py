"""Values that all layers of a step share: flat tokens, rotary angles, and where each row's state lies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree

from ..graphs import ops
from ..graphs.spmd.layout import constrain
from ..graphs.types import Tree
from . import context_parallel
from .rotary import Rotary


class Queries(Protocol):
    """The rows of attention that the queries of a step are: how many, of how many tokens; rotary angles of each token; and where each
    row's keys lie, the position of its first query and its valid queries."""

    @property
    def size(self) -> int: ...
    @property
    def q_len(self) -> int: ...
    @property
    def cos(self) -> torch.Tensor: ...
    @property
    def sin(self) -> torch.Tensor: ...
    @property
    def page_table(self) -> torch.Tensor: ...
    @property
    def num_computed_tokens(self) -> torch.Tensor: ...
    @property
    def query_lens(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Sliced:
    """Slices of a step, split over a group's devices, as rows of attention; `order` and `inverse` [T] are those of context_parallel.py."""

    size: int
    q_len: int
    order: torch.Tensor
    inverse: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    page_table: torch.Tensor
    num_computed_tokens: torch.Tensor
    query_lens: torch.Tensor

    @staticmethod
    def of(batch: Batch) -> Sliced:
        """The slices of a batch. One without a valid token has no position beyond the page table, whose keys a kernel would look up."""
        size, q_len, device = batch.size, batch.q_len, batch.tokens.device
        each = q_len // (2 * context_parallel.shares(q_len))
        rows, first = context_parallel.slices(size, q_len, device)
        rest = batch.query_lens.index_select(0, rows) - first
        start = torch.where(rest > 0, batch.num_computed_tokens.index_select(0, rows) + first, 0)
        split = (constrain(x, context_parallel.AXIS, None) for x in (batch.cos, batch.sin, batch.page_table.index_select(0, rows)))
        per_row = (constrain(x, context_parallel.AXIS) for x in (start, rest.clamp(min=0, max=each)))
        there, back = (places(size, q_len, device) for places in (context_parallel.order, context_parallel.inverse))
        return Sliced(rows.shape[0], each, there, back, *split, *per_row)


@dataclass(frozen=True)
class Batch:
    """Operands of every layer besides its weights and state.

    Attributes:
        size, q_len: B and Q.
        tokens: [T] ids.
        cos, sin: [T, R/2] f32 rotary angles.
        page_table, num_computed_tokens, query_lens, state_slots_in, state_slots_out: as in graphs/steps/; in decode those
            of the candidates.
        sliced: what a device has of it where devices share its tokens (context_parallel.py), which then are in the order of the stream;
            None where each has all.
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
    sliced: Sliced | None = None

    @staticmethod
    def of(inputs: Tree, rotary: Rotary) -> Batch:
        """The batch of a step whose layers read `inputs` (LAYER_INPUTS, PICTURE_INPUTS)."""
        B, Q = inputs["tokens"].shape
        cos, sin = rotary.angles(_positions(inputs, Q))
        names = ("page_table", "num_computed_tokens", "query_lens", "state_slots_in", "state_slots_out")
        batch = Batch(B, Q, context_parallel.ordered(inputs["tokens"]), cos, sin, **{name: inputs[name] for name in names})
        return batch if context_parallel.shares(Q) == 1 else replace(batch, sliced=Sliced.of(batch))

    @property
    def queries(self) -> Queries:
        """The rows of attention that the step's queries are."""
        return self.sliced or self

    def slots(self, page_size: int) -> torch.Tensor:
        """Where each token's keys lie in paged pools, [T]."""
        slots: torch.Tensor = ops.slot_mapping(self.num_computed_tokens, self.query_lens, self.page_table, page_size, self.q_len)
        return slots if self.sliced is None else slots.index_select(0, self.sliced.order)


def _positions(inputs: Tree, q_len: int) -> torch.Tensor:
    """[T], or [T, 3] of a chunk that may have pictures."""
    if "positions" in inputs:
        return context_parallel.ordered(inputs["positions"])
    start, offsets = inputs["num_computed_tokens"], inputs.get("candidate_offsets", inputs.get("position_offsets"))
    on_one_axis: torch.Tensor = ops.positions(start, q_len) if offsets is None else (start[:, None] + offsets).reshape(-1)
    return context_parallel.ordered(on_one_axis.view(-1, q_len)) if context_parallel.shares(q_len) > 1 else on_one_axis


_SIZES = ("size", "q_len")
_TENSORS = ("tokens", "cos", "sin", "page_table", "num_computed_tokens", "query_lens", "state_slots_in", "state_slots_out")
_OF_SLICES = ("order", "inverse", "cos", "sin", "page_table", "num_computed_tokens", "query_lens")


def _register(record: type, tensors: tuple[str, ...], *, more: str = "") -> None:
    """A batch is an operand of a layer's body: its tensors are leaves, and its sizes are static."""

    def flatten(value: Any) -> tuple[list[Any], tuple[int, ...]]:
        rest = [getattr(value, more)] if more and getattr(value, more) is not None else []
        return [*(getattr(value, name) for name in tensors), *rest], tuple(getattr(value, name) for name in _SIZES)

    pytree.register_pytree_node(
        record, flatten, lambda leaves, sizes: record(*sizes, *leaves), serialized_type_name=f"npucompile.models.batch.{record.__name__}"
    )


_register(Batch, _TENSORS, more="sliced")
_register(Sliced, _OF_SLICES)

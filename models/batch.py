"""Turns the inputs of a step into what every layer of it shares: flat tokens, rotary angles and where state lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree

from ..graphs import ops
from ..graphs.types import Aval, Bucket, Limits, Tree


def abstract_inputs(bucket: Bucket, limits: Limits) -> dict[str, Aval]:
    """Inputs of a bucket's graph, as the runtime packs them.

    - tokens [B, Q] i32: ids, left-aligned; padding holds 0.
    - starts [B] i32: tokens of the row's request that are in the cache already.
    - lengths [B] i32: valid tokens of the row; 0 is a row of padding.
    - page_table [B, N] i32: the request's pages; unused entries hold the null page 0.
    - read_slots [B] i32: state slot to start from; not read where starts is 0.
    - write_slots [B, W] i32: state slots to fill; W is Q in decode (one after every token), 1 in prefill (after the last).
    - temperature, top_p, min_p [B] f32, top_k [B] i32, uniform [B, W] f32: sampling, as in `graphs.ops.sample`.
    """
    B, Q, i32, f32 = bucket.batch, bucket.q_len, torch.int32, torch.float32
    W = Q if bucket.kind == "decode" else 1
    return {
        "tokens": Aval((B, Q), i32),
        "starts": Aval((B,), i32),
        "lengths": Aval((B,), i32),
        "page_table": Aval((B, limits.pages_per_request), i32),
        "read_slots": Aval((B,), i32),
        "write_slots": Aval((B, W), i32),
        "temperature": Aval((B,), f32),
        "top_k": Aval((B,), i32),
        "top_p": Aval((B,), f32),
        "min_p": Aval((B,), f32),
        "uniform": Aval((B, W), f32),
    }


@dataclass(frozen=True)
class Batch:
    """What all layers of a step read besides their weights and state.

    Attributes:
        size, q_len: B and Q.
        tokens: [T] ids.
        cos, sin: [T, R/2] f32 rotary angles.
        page_table, starts, lengths, read_slots, write_slots: as in abstract_inputs.
    """

    size: int
    q_len: int
    tokens: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    page_table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor

    @staticmethod
    def of(inputs: Tree, rotary_dim: int, rope_theta: float) -> Batch:
        """Derives the shared values from a step's inputs."""
        B, Q = inputs["tokens"].shape
        cos, sin = ops.rope_angles(ops.positions(inputs["starts"], Q), rotary_dim, rope_theta)
        names = ("page_table", "starts", "lengths", "read_slots", "write_slots")
        return Batch(B, Q, inputs["tokens"].reshape(-1), cos, sin, **{name: inputs[name] for name in names})


_TENSORS = ("tokens", "cos", "sin", "page_table", "starts", "lengths", "read_slots", "write_slots")

# A batch is an operand of a layer's body: its tensors are leaves, its sizes are part of what the body is.
pytree.register_pytree_node(
    Batch,
    lambda batch: ([getattr(batch, name) for name in _TENSORS], (batch.size, batch.q_len)),
    lambda leaves, sizes: Batch(*sizes, *leaves),
    serialized_type_name="npucompile.models.batch.Batch",
)

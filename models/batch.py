"""Turns the inputs of a step into what every layer of it shares: flat tokens, rotary angles and where state lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree

from ..graphs import ops
from ..graphs.types import Aval, Bucket, Limits, Tree


def abstract_inputs(bucket: Bucket, limits: Limits, *, logprobs: bool = False) -> dict[str, Aval]:
    """Inputs of a bucket's graph, as the runtime packs them.

    Of both kinds:

    - seats [B] i32: where the device keeps what the request's next step starts from (seats.py); 0 is a row of padding.
    - page_table [B, N] i32: the request's pages; unused entries hold the null page 0.
    - write_slots [B, W] i32: state slots to fill. Decode: W = Q, all slots of the request in the same order at every step, one after
      every token. Prefill: W = 1, after the last token.
    - temperature, top_p, min_p [B] f32, top_k [B] i32: sampling, as in `graphs.ops.sample`.
    - logprobs [B] i32, where log probabilities are among the outputs: 1 where a row wants them.

    Prefill:

    - tokens [B, Q] i32: ids, left-aligned; padding holds 0.
    - starts [B] i32: tokens of the row's request that are in the cache already.
    - lengths [B] i32: valid tokens of the row; 0 is a row of padding.
    - read_slots [B] i32: state slot to start from; not read where starts is 0.
    - next_tokens [B] i32, where drafts are made: the known token after the row's last one; -1 where that one is sampled.
    - uniform [B, 1] f32: random number of the token that is sampled.

    Decode, which reads tokens, starts and the state slot from the request's seat:

    - drafts [B] i32: how many of the row's drafts are verified, 0 to Q-1.
    - base [B] i32: the smallest position at which the row can start.
    - uniform [B, 2Q-1] f32: random numbers of the tokens that are sampled after positions base, base + 1, ...
    """
    B, Q, i32, f32 = bucket.batch, bucket.q_len, torch.int32, torch.float32
    decode = bucket.kind == "decode"
    shared = {
        "seats": Aval((B,), i32),
        "page_table": Aval((B, limits.pages_per_request), i32),
        "write_slots": Aval((B, Q if decode else 1), i32),
        "temperature": Aval((B,), f32),
        "top_k": Aval((B,), i32),
        "top_p": Aval((B,), f32),
        "min_p": Aval((B,), f32),
        **({"logprobs": Aval((B,), i32)} if logprobs else {}),
    }
    if decode:
        return {"drafts": Aval((B,), i32), "base": Aval((B,), i32), **shared, "uniform": Aval((B, 2 * Q - 1), f32)}
    return {
        "tokens": Aval((B, Q), i32),
        "starts": Aval((B,), i32),
        "lengths": Aval((B,), i32),
        "read_slots": Aval((B,), i32),
        **({"next_tokens": Aval((B,), i32)} if limits.drafts else {}),
        **shared,
        "uniform": Aval((B, 1), f32),
    }


@dataclass(frozen=True)
class Batch:
    """What all layers of a step read besides their weights and state.

    Attributes:
        size, q_len: B and Q.
        tokens: [T] ids.
        cos, sin: [T, R/2] f32 rotary angles.
        page_table, starts, lengths, read_slots, write_slots: as prefill's in abstract_inputs; in decode of the candidates.
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

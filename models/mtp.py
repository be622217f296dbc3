"""What multi-token-prediction heads have in common: how they begin and how they end, around the mixer of their one layer."""

from __future__ import annotations

import torch

from ..graphs import ops
from ..graphs.types import Aval, Tree
from . import decoder, norms, sequence_parallel
from .batch import Batch
from .params import Param, Source, norm

ROTATION = "rotation"
"""Key of the matrix [M, M] by which the head of a rotated model turns hidden states before their norm (ModelSlim's `rot.weight`).

The weights of a rotated model's final norm are folded into its output head, Q turning the stream: what the head is given is x Q, not
(w * x) Q. The matrix is transposed Q, diag(w), Q, so that it gives the latter; a norm follows, so it cannot be folded away."""


def params(
    cfg: decoder.DecoderSizes, dtype: torch.dtype, names: tuple[str, str, str], fc: str, layer: Tree, unread: tuple[str, ...] = ()
) -> dict[str, Tree]:
    """Parameters of a head.

    Args:
        names: in checkpoints, of its norms of embeddings, of hidden states and at its end.
        fc: name of the tensor [M, 2M] that joins both.
        layer: parameters of its layer.
        unread: tensors of the head in checkpoints that no parameter reads.
    """
    M = cfg.hidden_size
    embedding, hidden, final = (norm(name, M, dtype, cfg.norm_offset) for name in names)
    joining = Param(Aval((M, 2 * M), dtype), Source((fc,), ((M, 2 * M),), unread=unread))
    return {"norm_embedding": embedding, "norm_hidden": hidden, "fc": joining, "layer": layer, "norm": final}


def merged(
    cfg: decoder.DecoderSizes, head: Tree, embed: Tree, batch: Batch, inputs: Tree, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's residual stream, of a token and the hidden state before it, each under a norm of its own; and its layer's input.

    Args:
        head: weights `norm_embedding`, `norm_hidden`, `fc` [M, 2M], whose first half is the token's, `layer`, and may be ROTATION.
        embed: the model's table of embeddings [V, M].
        batch: of the tokens.
        inputs: that the batch is of.
        hidden: [T, M], laid out as the residual stream (sequence_parallel.py).

    Returns:
        stream and its norm, each [T, M], whole on every device.
    """
    eps, offset = cfg.rms_norm_eps, cfg.norm_offset
    token = norms.rms_norm(sequence_parallel.embed_with_pictures(batch.tokens, embed, inputs), head["norm_embedding"], eps, offset)
    hidden = ops.linear(hidden, head[ROTATION]) if ROTATION in head else hidden
    hidden = norms.rms_norm(hidden, head["norm_hidden"], eps, offset)
    stream = sequence_parallel.whole(ops.linear(torch.cat([token, hidden], -1), head["fc"]), batch.size * batch.q_len)
    return stream, norms.rms_norm(stream, head["layer"]["input_norm"], eps, offset)


def finished(cfg: decoder.DecoderSizes, head: Tree, batch: Batch, mixed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """The head's hidden states: the rest of its layer, and its norm.

    Args:
        mixed: the mixer's output [T, M], laid out as the residual stream.
        stream: what `merged` returned of these tokens, [T, M], whole on every device.

    Returns:
        [T, M], laid out as the residual stream.
    """
    return decoder.after_mixer(cfg, head["layer"], batch.size * batch.q_len, mixed, sequence_parallel.spread(stream), head["norm"])[0]

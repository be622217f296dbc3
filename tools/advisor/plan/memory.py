"""Memory of a rank, by kind, from the configuration of a model."""

from __future__ import annotations

from .prefill import expert_layer_bytes, weights_bytes
from .products import attention_weights
from .system import PlannedServing, System


def fixed_bytes(system: System) -> dict[str, float]:
    """Bytes of a rank that requests do not change: "weights", "embeddings and head", "draft head"."""
    shape, layout = system.shape, system.layout
    head = shape.hidden * shape.vocab * 2.0 / (layout.tp if layout.head_in_group else layout.ranks)
    return {
        "weights": weights_bytes(system),
        "embeddings and head": shape.hidden * shape.vocab * 2.0 / layout.tp + head,
        "draft head": _draft_bytes(system),
    }


def token_bytes(system: System) -> float:
    """Bytes of a rank's caches for one token, the draft head's included."""
    shape = system.shape
    drafts = 1 if system.drafts and shape.draft is not None else 0
    if shape.latent is not None:
        entry = 2.0 * (shape.latent.kv_rank + shape.latent.rope) + (2.0 * shape.indexer.dim * shape.indexer.share if shape.indexer else 0.0)
        return (shape.full_layers + drafts) * entry
    each = 4.0 * max(shape.kv_heads / system.layout.tp, 1.0) * shape.head_dim
    own = 4.0 * max(shape.draft.kv_heads / system.layout.tp, 1.0) * shape.draft.head_dim if drafts and shape.draft else 0.0
    return shape.full_layers * each + own


def request_bytes(system: System) -> float:
    """Bytes of a rank's recurrent states of one request."""
    shape = system.shape
    if shape.linear is None:
        return 0.0
    state = shape.linear.value_heads * shape.linear.key_dim * shape.linear.value_dim * 2.0 / system.layout.tp
    return shape.linear_layers * state * (1 + system.candidates)


def pool_tokens(system: System, serving: PlannedServing) -> float:
    """Tokens that a group's caches hold; 0 or less where weights and states alone exceed the memory."""
    free = serving.memory_fraction * system.machine.npu.usable_hbm_bytes - sum(fixed_bytes(system).values())
    free -= serving.max_running * request_bytes(system)
    tokens = free / token_bytes(system)
    return min(tokens, serving.max_tokens) if serving.max_tokens else tokens


def _draft_bytes(system: System) -> float:
    shape, draft, layout = system.shape, system.shape.draft, system.layout
    if draft is None or not system.drafts:
        return 0.0
    h = shape.hidden
    if draft.kind == "mtp":
        nbytes = system.scheme.draft
        layer = attention_weights(shape, layout.tp)[0] * nbytes + 2.0 * h * h * nbytes
        if shape.experts:
            return layer + expert_layer_bytes(system, nbytes, nbytes)
        return layer + 3.0 * h * draft.width / layout.tp * nbytes
    projections = draft.head_dim * (3.0 * draft.heads / layout.tp + 4 * max(draft.kv_heads / layout.tp, 1.0)) * h
    return 2.0 * (projections + (3.0 * h * (draft.width + h) + h * draft.vocab) / layout.tp)

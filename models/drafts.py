"""Drafting with any draft head: write a step's accepted tokens to its cache, then draft token by token from the last one."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from ..graphs.ir.block import block
from ..graphs.types import Limits, Tree
from . import context_parallel, sequence_parallel
from .family import DraftHead
from .sampling import best

_OF_CHUNKS = ("positions", "picture_rows", "picture_pool", "candidate_offsets")
"""What a chunk of a prompt has that may have pictures, or several candidates, and no draft (PICTURE_INPUTS)."""

Extended = tuple[Tree, Tree, Tree]
"""Result of writing tokens to the head's cache: what the head drafts from, of each row's last token; where that token lies, as
`num_computed_tokens` and `query_lens` [B]; and the new pools."""


def draft(
    head: DraftHead[Any],
    cfg: Any,
    limits: Limits,
    params: Tree,
    state: Tree,
    step: Tree,
    features: torch.Tensor,
    counts: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, Tree]:
    """Drafts `count` tokens after the last of each row's accepted tokens.

    First all tokens of the step are written to the head's cache, each with the model's features of the token before it; for the accepted
    ones the cache then holds what it would hold had nothing been drafted. From the last one of each row the head drafts a token, which
    is written after the head's own hidden state, and so on; the next step overwrites what drafts leave in the cache.

    Args:
        head: draft head of the model's family.
        params, state: of the whole model.
        step: `tokens` [B, Q], in each column the token that follows that column's token of the model's pass, and `picture_rows` likewise;
            page_table, starts, state_slots_in, state_slots_out and positions as in that pass.
        features: `Intermediates.features` of that pass, [T, ...].
        counts: [B] accepted tokens of each row; 0 in a row of padding.

    Returns:
        drafts [B, count] i32 and the new state.
    """
    tokens, step = step["tokens"], {name: value for name, value in step.items() if name != "tokens"}
    weights = {name: value for name, value in params.items() if name != "layers"}
    pools = {head.key: state[head.key]}
    # Nothing is computed between the calls: each run of nodes there would be one more body to convert.
    inputs = {**step, "tokens": tokens, "query_lens": counts}
    # What is drafted is text.
    step = {name: value for name, value in step.items() if name not in _OF_CHUNKS}
    rows, place, pools = block("extend_draft_cache", _extend_accepted, (head, cfg), weights, pools, inputs, features)
    if not count:
        return torch.empty((counts.shape[0], 0), dtype=torch.int32, device=counts.device), {**state, **pools}
    token, hidden, passed = block("draft", _draft, (head, cfg), weights, pools, {**step, **place}, rows)
    drafts, kind, step = [token], "draft_own" if passed else "draft", {**step, **passed}
    for _ in range(1, count):
        rows, place, pools = block(
            "extend_draft_cache_own", _extend_drafted, (head, cfg, limits), weights, pools, {**step, **place}, token, hidden
        )
        token, hidden, _ = block(kind, _draft, (head, cfg), weights, pools, {**step, **place}, rows)
        drafts.append(token)
    return torch.stack(drafts, 1), {**state, **pools}


def _extend_accepted(head: DraftHead[Any], cfg: Any, weights: Tree, pools: Tree, step: Tree, features: torch.Tensor) -> Extended:
    """Writes all accepted tokens of a step."""
    rows, pools = head.extend_cache(cfg, weights, pools, step, features, first=True)
    live = (step["query_lens"] > 0).to(torch.int32)
    rows = pytree.tree_map(lambda x: context_parallel.last_rows(x, step["query_lens"]), rows)
    return rows, {"num_computed_tokens": step["num_computed_tokens"] + step["query_lens"] - live, "query_lens": live}, pools


def _extend_drafted(
    head: DraftHead[Any], cfg: Any, limits: Limits, weights: Tree, pools: Tree, step: Tree, token: torch.Tensor, hidden: torch.Tensor
) -> Extended:
    """Writes the token drafted after the one at `step`."""
    # Beyond the longest context the page table has no entry, and no step can verify the draft.
    following = step["num_computed_tokens"] + 1
    query_lens = ((step["query_lens"] > 0) & (following < limits.max_model_len)).to(torch.int32)
    place = {"num_computed_tokens": following.clamp(max=limits.max_model_len - 1), "query_lens": query_lens}
    rows, pools = head.extend_cache(cfg, weights, pools, {**step, **place, "tokens": token[:, None]}, hidden, first=False)
    return rows, place, pools


def _draft(head: DraftHead[Any], cfg: Any, weights: Tree, pools: Tree, step: Tree, rows: Tree) -> tuple[torch.Tensor, torch.Tensor, Tree]:
    """The token [B] after the last one written, the hidden states that its logits are computed from, and what later drafts read too."""
    # Of `tokens` only the shape is read here, one a row: the id went in when the token was written.
    drafted = head.draft(cfg, weights, pools, {**step, "tokens": step["num_computed_tokens"][:, None]}, rows)
    hidden, passed = drafted if isinstance(drafted, tuple) else (drafted, {})
    logits = head.logits(cfg, weights, sequence_parallel.whole(hidden, step["num_computed_tokens"].shape[0]))
    token = best(logits, head.vocab_size(cfg) if head.vocab_size else cfg.vocab_size)
    return (head.model_ids(cfg, weights, token) if head.model_ids else token), hidden, passed

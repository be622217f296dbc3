"""Turns the tokens a step decided on into drafts of the next ones: the draft head takes them in, then drafts token by token."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from ..graphs import ops
from ..graphs.ir.block import block
from ..graphs.types import Limits, Tree
from . import sequence_parallel
from .family import DraftHead
from .sampling import best

Taken = tuple[Tree, Tree, Tree]
"""What taking tokens in gives: what the head reads of each row's last one, its `starts` and `lengths` [B], and the new pools."""


def draft(
    head: DraftHead[Any], cfg: Any, limits: Limits, params: Tree, state: Tree, step: Tree, features: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, Tree]:
    """Drafts k tokens after the last of each row's tokens that count.

    First the head takes in all tokens of the step with what the model saw before each: for every token that counts, its cache then
    holds what it would hold had nothing been drafted. From the last one of each row it drafts a token, takes that in after its own
    hidden state, and so on; the next step replaces what drafts leave in the cache.

    Args:
        head: of the model's family.
        params, state: of the whole model.
        step: `tokens` [B, Q], column t the one that follows the token of column t of the model's pass; page_table, starts, read_slots
            and write_slots as in that pass.
        features: `Intermediates.features` of that pass, [T, ...].
        counts: [B] tokens of each row that count; 0 is a row of padding.

    Returns:
        drafts [B, k] i32 and the new state.
    """
    tokens, step = step["tokens"], {name: value for name, value in step.items() if name != "tokens"}
    weights = {name: value for name, value in params.items() if name != "layers"}
    pools = {head.key: state[head.key]}
    # Nothing is computed between the calls: each run of nodes there would be one more body to convert.
    taken, at, pools = block("draft_take", _take, (head, cfg), weights, pools, {**step, "tokens": tokens, "lengths": counts}, features)
    token, hidden = block("draft", _draft, (head, cfg), weights, pools, {**step, **at}, taken)
    found = [token]
    for _ in range(1, limits.drafts):
        taken, at, pools = block("draft_take_own", _take_own, (head, cfg, limits), weights, pools, {**step, **at}, token, hidden)
        token, hidden = block("draft", _draft, (head, cfg), weights, pools, {**step, **at}, taken)
        found.append(token)
    return torch.stack(found, 1), {**state, **pools}


def _take(head: DraftHead[Any], cfg: Any, weights: Tree, pools: Tree, step: Tree, features: torch.Tensor) -> Taken:
    """Takes in all tokens of a step that count."""
    taken, pools = head.extend_cache(cfg, weights, pools, step, features, first=True)
    live = (step["lengths"] > 0).to(torch.int32)
    taken = pytree.tree_map(lambda x: ops.last_rows(x, step["lengths"]), taken)
    return taken, {"starts": step["starts"] + step["lengths"] - live, "lengths": live}, pools


def _take_own(
    head: DraftHead[Any], cfg: Any, limits: Limits, weights: Tree, pools: Tree, at: Tree, token: torch.Tensor, hidden: torch.Tensor
) -> Taken:
    """Takes in the token drafted after the one at `at`."""
    # Beyond the longest context there is no place for a key, nor anyone to read the draft.
    following = at["starts"] + 1
    lengths = ((at["lengths"] > 0) & (following < limits.max_model_len)).to(torch.int32)
    one = {"starts": following.clamp(max=limits.max_model_len - 1), "lengths": lengths}
    taken, pools = head.extend_cache(cfg, weights, pools, {**at, **one, "tokens": token[:, None]}, hidden, first=False)
    return taken, one, pools


def _draft(head: DraftHead[Any], cfg: Any, weights: Tree, pools: Tree, at: Tree, taken: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """The token after the last one taken in [B], and the hidden states it was made of."""
    # Its id went in when it was taken; the shape says that there is one a row.
    hidden = head.draft(cfg, weights, pools, {**at, "tokens": at["starts"][:, None]}, taken)
    return best(head.logits(cfg, weights, sequence_parallel.whole(hidden, at["starts"].shape[0]))), hidden

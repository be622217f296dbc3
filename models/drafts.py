"""Turns the tokens a step decided on into drafts of the next ones: the draft head's pass over them, then token by token."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ..graphs import ops
from ..graphs.block import block
from ..graphs.types import Limits, Tree
from . import rows
from .speak import best

Pass = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tree]
"""What a pass gives: the draft [B], the head's hidden states [B, M] that it was made of, its position [B], and the new pools."""


def draft(
    family: ModuleType, cfg: Any, limits: Limits, params: Tree, state: Tree, step: Tree, features: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, Tree]:
    """Drafts k tokens after the last of each row's tokens that count.

    The first pass takes in all tokens of the step with what the model saw before each: for every token that counts, the draft head's
    cache then holds what it would hold had nothing been drafted. Each further pass takes in one draft, after the head's own hidden
    state; the next step replaces what that leaves in the cache.

    Args:
        family: of the model (family.py).
        params, state: of the whole model.
        step: `tokens` [B, Q], column t the one that follows the token of column t of the model's pass; page_table, starts, read_slots
            and write_slots as in that pass.
        features: `Seen.features` of that pass, [T, ...].
        counts: [B] tokens of each row that count; 0 is a row of padding.

    Returns:
        drafts [B, k] i32 and the new state.
    """
    weights = {name: value for name, value in params.items() if name != "layers"}
    pools = {family.DRAFT: state[family.DRAFT]}
    # Nothing is computed between the calls: each run of nodes there would be one more body to convert.
    token, hidden, at, pools = block("draft_first", _first, (family, cfg), weights, pools, step, features, counts)
    found = [token]
    for _ in range(1, limits.drafts):
        token, hidden, at, pools = block("draft_next", _next, (family, cfg, limits), weights, pools, step, counts, token, hidden, at)
        found.append(token)
    return torch.stack(found, 1), {**state, **pools}


def _first(family: ModuleType, cfg: Any, weights: Tree, pools: Tree, step: Tree, features: torch.Tensor, counts: torch.Tensor) -> Pass:
    """The pass over the step's tokens: its draft is the one after each row's last token that counts."""
    hidden, pools = family.draft(cfg, weights, pools, {**step, "lengths": counts}, features)
    hidden = ops.last_rows(rows.whole(hidden, step["tokens"].numel()), counts)
    return best(family.draft_head(cfg, weights, hidden)), hidden, step["starts"] + counts, pools


def _next(
    family: ModuleType,
    cfg: Any,
    limits: Limits,
    weights: Tree,
    pools: Tree,
    step: Tree,
    counts: torch.Tensor,
    token: torch.Tensor,
    hidden: torch.Tensor,
    at: torch.Tensor,
) -> Pass:
    """The pass over what the one before gave."""
    # Beyond the longest context there is no place for a key, nor anyone to read the draft.
    lengths = ((counts > 0) & (at < limits.max_model_len)).to(torch.int32)
    one = {**step, "tokens": token[:, None], "starts": at.clamp(max=limits.max_model_len - 1), "lengths": lengths}
    hidden, pools = family.draft(cfg, weights, pools, one, rows.spread(hidden), first=False)
    hidden = rows.whole(hidden, token.numel())
    return best(family.draft_head(cfg, weights, hidden)), hidden, at + 1, pools

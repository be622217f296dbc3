"""Drafts from many positions of a text at once, by another way than decode steps: each position is a request of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npucompile.graphs import tree
from npucompile.graphs.steps.inputs import LAYER_INPUTS
from npucompile.graphs.steps.prefill import PREFILL
from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Limits, Tree
from npucompile.models import decoder, hybrid


@dataclass(frozen=True)
class StepArguments:
    """Empty state and inputs, except the tokens, of a step over sequences from their first token on."""

    state: Tree
    inputs: dict[str, torch.Tensor]


def fresh_step(cfg: hybrid.Config, rows: int, length: int, spare_pages: int = 0) -> StepArguments:
    """Row b owns state slot b+1 and the pages (of one token each) b*length+1 .. (b+1)*length.

    Args:
        spare_pages: pages that no row owns, after those.
    """
    limits = Limits(page_size=1, num_pages=rows * length + 1 + spare_pages, num_slots=rows + 1, max_model_len=length)
    avals = hybrid.abstract_state(cfg, limits, torch.float32)
    inputs = StepInputs(PREFILL.bucket(rows, length), limits).padding(LAYER_INPUTS)
    inputs["query_lens"].fill_(length)
    inputs["page_table"].copy_(torch.arange(1, rows * length + 1).view(rows, length))
    inputs["state_slots_in"].copy_(torch.arange(1, rows + 1))
    inputs["state_slots_out"].copy_(inputs["state_slots_in"][:, None])
    return StepArguments(tree.map_leaves(lambda aval: torch.zeros(aval.shape, dtype=aval.dtype), avals), inputs)


@dataclass(frozen=True)
class Recursion:
    """The draft head's outputs over texts [B, Q+1].

    Attributes:
        target: [B, Q, V] the model's own logits; row p predicts token p+1.
        first: [B, Q, V] logits of the first draft; row p, from hidden state p and token p+1, predicts token p+2.
        deeper: [B, R, V] for each further draft: at base position p it predicts token p+3, p+4, ...
    """

    target: torch.Tensor
    first: torch.Tensor
    deeper: tuple[torch.Tensor, ...]


def unroll(cfg: hybrid.Config, params: Tree, texts: torch.Tensor, bases: torch.Tensor, *, own_tokens: bool, depth: int) -> Recursion:
    """Drafts from many positions of a text at once, each exactly as in a decode step at that position.

    The first draft runs over the whole text and fills the head's key-value pages with entries made from the model's hidden
    states. Every base position is then a request of its own: it shares the pages before it, and writes the key-value entries of its
    deeper drafts, computed from the head's own hidden states, to pages of its own.

    Args:
        texts: int64 [B, Q+1].
        bases: int64 [B, R] positions p; deeper drafts start from the first draft's hidden state at p.
        own_tokens: feed each deeper draft the previous draft's best token, as in serving, instead of the text's token.
    """
    rows, length, count = texts.shape[0], texts.shape[1] - 1, bases.shape[1]
    requests, extra = rows * count, depth - 1
    step = fresh_step(cfg, rows, length, requests * extra)
    ids = texts.to(torch.int32)
    with torch.no_grad():
        hidden, state, _ = hybrid.forward(cfg, params, step.state, {**step.inputs, "tokens": ids[:, :-1]})
        target = decoder.head(cfg, params, hidden).view(rows, length, -1)
    inputs = {**step.inputs, "tokens": ids[:, 1:]}
    taken, state = hybrid.extend_draft_cache(cfg, params, state, inputs, hidden, first=True)
    ahead = hybrid.draft(cfg, params, state, inputs, taken)
    first = decoder.head(cfg, params, ahead).view(rows, length, -1)

    flat = (torch.arange(rows)[:, None] * length + bases).flatten()
    ahead, logits = ahead[flat], first.flatten(0, 1)[flat]
    own_pages = rows * length + 1 + torch.arange(requests * extra, dtype=torch.int32).view(requests, extra)
    table = torch.nn.functional.pad(step.inputs["page_table"].repeat_interleave(count, 0), (0, extra))
    table.scatter_(1, bases.reshape(-1, 1) + 1 + torch.arange(extra), own_pages)
    slots = torch.zeros(requests, dtype=torch.int32)
    inputs = {"page_table": table, "query_lens": slots + 1, "state_slots_in": slots, "state_slots_out": slots[:, None]}
    deeper = []
    for j in range(extra):
        fed = logits.argmax(-1) if own_tokens else texts.gather(1, (bases + 2 + j).clamp(max=length)).flatten()
        inputs |= {"tokens": fed.to(torch.int32)[:, None], "num_computed_tokens": (bases.flatten() + 1 + j).to(torch.int32)}
        taken, state = hybrid.extend_draft_cache(cfg, params, state, inputs, ahead, first=False)
        ahead = hybrid.draft(cfg, params, state, inputs, taken)
        logits = decoder.head(cfg, params, ahead)
        deeper.append(logits.view(rows, count, -1))
    return Recursion(target, first, tuple(deeper))

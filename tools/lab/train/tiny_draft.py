"""Training loss and acceptance of the draft head, from unrolled drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....graphs import tree
from ....graphs.types import Tree
from ....models import decoder, hybrid
from .tiny_model import fresh_step

DEPTH = 3
"""Draft tokens per step, k."""


@torch.no_grad()
def continue_texts(
    cfg: hybrid.Config, params: Tree, prompts: torch.Tensor, length: int, temperature: float, generator: torch.Generator
) -> torch.Tensor:
    """Extends prompts token by token through prefill and decode steps, as a server would.

    Args:
        prompts: int64 [B, Q].
        length: tokens to add to each.
        temperature: 0 is greedy.
        generator: draws the samples.

    Returns:
        int64 [B, Q + length].
    """
    rows, width = prompts.shape
    step = fresh_step(cfg, rows, width + length)
    texts, ids, state, start = prompts, prompts, step.state, 0
    for _ in range(length):
        inputs = {**step.inputs, "tokens": ids.to(torch.int32)}
        inputs["num_computed_tokens"] = torch.full_like(step.inputs["num_computed_tokens"], start)
        inputs["query_lens"] = torch.full_like(step.inputs["query_lens"], ids.shape[1])
        hidden, state, _ = hybrid.forward(cfg, params, state, inputs)
        logits = decoder.head(cfg, params, hidden.view(rows, ids.shape[1], -1)[:, -1])
        start += ids.shape[1]
        if temperature:
            ids = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        else:
            ids = logits.argmax(-1, keepdim=True)
        texts = torch.cat((texts, ids), 1)
    return texts


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


def unroll(
    cfg: hybrid.Config, params: Tree, texts: torch.Tensor, bases: torch.Tensor, *, own_tokens: bool, depth: int = DEPTH
) -> Recursion:
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


def draft_losses(cfg: hybrid.Config, params: Tree, texts: torch.Tensor, bases: torch.Tensor) -> list[torch.Tensor]:
    """Cross entropy of each draft against the model's output: half its distribution, half its best token.

    Args:
        texts: int64 [B, Q+1].
        bases: int64 [B, R], at most Q - 1 - DEPTH.
    """
    out = unroll(cfg, params, texts, bases, own_tokens=False)

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        label = torch.softmax(target, -1) * 0.5
        label.scatter_add_(-1, target.argmax(-1, keepdim=True), torch.full_like(target[..., :1], 0.5))
        return -(label * torch.log_softmax(logits, -1)).sum(-1).mean()

    losses = [loss(out.first[:, :-1], out.target[:, 1:])]
    for j, logits in enumerate(out.deeper):
        at = (bases + 2 + j)[..., None].expand(-1, -1, out.target.shape[-1])
        losses.append(loss(logits, out.target.gather(1, at)))
    return losses


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a reference loop of draft and verify under greedy decoding.

    Attributes:
        mean_tokens: tokens emitted per verification step, including the bonus token.
        rates: share of steps in which the first 1, 2, ... drafts were all accepted.
        steps: verification steps counted.
    """

    mean_tokens: float
    rates: tuple[float, ...]
    steps: int


@torch.no_grad()
def acceptance(cfg: hybrid.Config, params: Tree, texts: torch.Tensor, prompt: int) -> Acceptance:
    """Walks greedy texts as a speculative decoder does: drafts DEPTH tokens, accepts the agreeing prefix and one token more.

    Args:
        texts: int64 [B, Q+1], the model's own greedy continuations.
        prompt: leading tokens of each text that belong to the prompt.
    """
    length = texts.shape[1] - 1
    bases = torch.arange(prompt - 1, length - DEPTH).expand(texts.shape[0], -1)
    out = unroll(cfg, params, texts, bases, own_tokens=True)
    first = out.first.gather(1, bases[..., None].expand(-1, -1, out.first.shape[-1]))
    drafts = torch.stack([logits.argmax(-1) for logits in (first, *out.deeper)], -1)
    truth = torch.stack([texts.gather(1, bases + 2 + j) for j in range(DEPTH)], -1)
    agreed = (drafts == truth).cumprod(-1).sum(-1)
    counts: list[int] = []
    for row in agreed.tolist():
        at = 0
        while at < len(row):
            counts.append(row[at])
            at += row[at] + 1
    rates = tuple(sum(count > j for count in counts) / len(counts) for j in range(DEPTH))
    return Acceptance(1 + sum(counts) / len(counts), rates, len(counts))


@torch.no_grad()
def agreement(cfg: hybrid.Config, params: Tree, texts: torch.Tensor) -> float:
    """Share of positions of given texts [B, Q+1] at which the first draft is the model's own best token."""
    out = unroll(cfg, params, texts, torch.zeros(texts.shape[0], 1, dtype=torch.int64), own_tokens=False, depth=1)
    return (out.first[:, :-1].argmax(-1) == out.target[:, 1:].argmax(-1)).float().mean().item()


def random_bases(rows: int, length: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [rows, count] positions whose DEPTH drafts all have a target within `length` tokens."""
    return torch.randint(0, length - 1 - DEPTH, (rows, count), generator=generator)


def rounded(params: Tree) -> Tree:
    """The parameters as the exported file holds them: rounded to bf16, in f32."""
    return tree.map_leaves(lambda leaf: leaf.detach().to(torch.bfloat16).float(), params)

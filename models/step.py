"""The program of one bucket, for any model: run the layers, sample, verify drafts, draft, and save where the next step starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..graphs import ops
from ..graphs.errors import SpecError
from ..graphs.steps.inputs import LAYER_INPUTS, PICTURE_INPUTS
from ..graphs.steps.kind import tokens_told
from ..graphs.steps.table import StepInputs, kind_of
from ..graphs.types import PICTURE_ROWS, Aval, Bucket, Limits, Program, Tree
from . import context_parallel, draft_vocabulary, drafts, request_slots, sequence_parallel
from .expert_placement import ExpertPlacement, placed
from .family import Family
from .head_padding import PaddedHeads, widened, with_real_sources
from .padding import padded
from .params import avals
from .quant.declare import stored
from .sampling import sample_tokens, score_tokens

PICTURES = "picture_pool"
"""Key of the pool of rows of pictures in the state of programs that take them."""


@dataclass(frozen=True)
class Model:
    """A family's functions with one configuration.

    Attributes:
        name: what users call it.
        family: its functions.
        config: that family's configuration.
        drafting: its programs draft, so its parameters and state include the draft head's.
        tower: configuration of the family's vision tower, in the variant that its encode programs have it in; None without pictures.
        placement: of physical experts, where the variant has some; None places them by default.
    """

    name: str
    family: Family[Any]
    config: Any
    drafting: bool = False
    tower: Any = None
    placement: ExpertPlacement | None = None

    @cached_property
    def has_draft_head(self) -> bool:
        """Whether its programs can draft."""
        return self.family.draft_key in self.family.abstract_params(self.config, torch.float32)

    def params(self, dtype: torch.dtype) -> Tree:
        """Tree of Param that the programs read."""
        return placed(stored(self.matrices(dtype), self.config.variant), self.config.variant, self.placement)

    def matrices(self, dtype: torch.dtype) -> Tree:
        """The same before matrices are replaced by the tensors that their formats store them in."""
        declared = self._used(self.family.abstract_params(self.wide, dtype))
        real = {name: with_real_sources(value, self._heads(name)) for name, value in declared.items()}
        return padded(real, self.config.variant)

    @property
    def wide(self) -> Any:
        """The configuration that programs are built from: with padded numbers of heads, where ranks do not share them evenly."""
        return widened(self.config)

    def _heads(self, key: str) -> tuple[PaddedHeads, ...]:
        """The padding of heads in a part of the tree of parameters; a draft head of its own has its own."""
        config = getattr(self.config, "draft", self.config) if key == self.family.draft_key else self.config
        heads: tuple[PaddedHeads, ...] = config.variant.heads
        return heads

    def state(self, limits: Limits, dtype: torch.dtype) -> Tree:
        """Tree of Aval of the programs' state: the family's pools, and the request slots."""
        pools = {**self._used(self.family.abstract_state(self.wide, limits, dtype)), "request_slots": request_slots.state(limits)}
        if limits.picture_rows:
            # A page of one row of one head: what writes pages writes it.
            shape, axes = (limits.picture_rows, 1, 1, self.config.hidden_size), (PICTURE_ROWS, None, None, None)
            pools[PICTURES] = Aval(shape, dtype, axes)
        return pools

    def _used(self, tree: Tree) -> dict[str, Any]:
        return {name: value for name, value in tree.items() if self.drafting or name not in (self.family.draft_key, draft_vocabulary.KEY)}


@dataclass(frozen=True)
class _StepFunctions:
    """The forward functions of one bucket; the arguments are those of `program`."""

    model: Model
    bucket: Bucket
    limits: Limits
    emit_logits: bool
    max_logprobs: int

    def decode(self, params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        """Samples after each row's last token and the first Q-1 of its drafts, accepts drafts that equal what was sampled, and drafts as
        many again. Without any the draft head's cache gets the token nevertheless, so that a wider step goes on from there."""
        Q = self.bucket.q_len
        unread = self.limits.drafts + 1 - Q
        start = request_slots.read(state["request_slots"], inputs, self.limits, Q)
        step = {**inputs, **start.inputs()}
        if unread:
            step["state_slots_out"] = inputs["state_slots_out"][:, :Q]
        hidden, state, features, told = self._forward(params, state, step)
        hidden = sequence_parallel.whole(hidden, self.bucket.tokens)
        sampled = self._sample(params, hidden, inputs, request_slots.uniforms(inputs, start.num_computed_tokens, Q, self.limits))
        counts = ops.accept(sampled["tokens"], start.tokens, start.query_lens)
        accepted = (counts - 1).clamp(min=0)
        # What follows a token that could not be sampled is never used, but is computed, and every lookup must find a row.
        tokens = sampled["tokens"].clamp(min=0)
        last = tokens.gather(1, accepted[:, None].to(torch.int64))
        drafted, state = self._draft(params, state, {**step, "tokens": tokens}, features, counts, Q - 1)
        undrafted = [last.expand(-1, unread)] if unread else []
        # A row whose context is full samples nothing, and its request slot stays as it is.
        advanced = torch.where(counts > 0, inputs["request_slots"], 0)
        following = start.num_computed_tokens + counts
        pool = request_slots.write(
            state["request_slots"], advanced, following, accepted, last, *drafted.values(), *undrafted, *start.offsets
        )
        return {**sampled, "counts": counts, **drafted, **told}, {**state, "request_slots": pool}

    def prefill(self, params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        """Computes a chunk of each row's prompt; what is sampled and drafted means something after a prompt's last chunk only."""
        outputs, state, _ = self._chunk(params, state, inputs)
        return outputs, state

    def score(self, params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        """The same; what it returns of what is sampled it returns of each token that follows one of the chunk."""
        outputs, state, hidden = self._chunk(params, state, inputs)
        following, count = self._next_tokens(inputs, outputs["tokens"][:, 0]), self.model.config.vocab_size
        logits = self.model.family.head(self.model.wide, params, context_parallel.in_rows(hidden, self.bucket.batch))
        how = {"emit_logits": self.emit_logits, "max_logprobs": self.max_logprobs, "vocab_size": count}
        return outputs | score_tokens(logits, following, inputs["logprobs"], outputs.get("drafts", following), **how), state

    def _chunk(self, params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree, torch.Tensor]:
        """Outputs and state of a prefill step, and the hidden states of all its tokens in the order of the stream."""
        query_lens = inputs["query_lens"]
        inputs, behind, offsets = self._pictures(state, inputs)
        hidden, state, features, told = self._forward(params, state, inputs)
        hidden = sequence_parallel.whole(hidden, self.bucket.tokens)
        sampled = self._sample(params, context_parallel.last_rows(hidden, query_lens), inputs, inputs["uniform"])
        tokens = sampled["tokens"].clamp(min=0)
        last = tokens[:, 0]
        step = {**inputs, **behind, "tokens": self._next_tokens(inputs, last)} if self.limits.drafts else inputs
        drafted, state = self._draft(params, state, step, features, query_lens, self.limits.drafts)
        following = inputs["num_computed_tokens"] + query_lens
        accepted = torch.zeros(query_lens.shape, dtype=torch.int32, device=query_lens.device)
        values = (tokens, *drafted.values(), *offsets)
        pool = request_slots.write(state["request_slots"], inputs["request_slots"], following, accepted, *values)
        return {**sampled, **drafted, **told}, {**state, "request_slots": pool}, hidden

    def _pictures(self, state: Tree, inputs: Tree) -> tuple[Tree, Tree, list[torch.Tensor]]:
        """A chunk's inputs with rows of pictures in the places of its tokens; what is other in the places of the tokens behind each; and
        what is added to indices of tokens behind the chunk, for request slots (`DecodeStart.offsets`). Without pictures all as it is."""
        if not self.limits.picture_rows:
            return inputs, {}, []
        rows, times = inputs["picture_rows"], inputs["positions"][..., 0]
        # The last token of a prompt is text, which has one position on all axes.
        query_lens = inputs["query_lens"][:, None]
        last = times.gather(1, (query_lens - 1).clamp(min=0).to(torch.int64))
        offsets = last + 1 - (inputs["num_computed_tokens"][:, None] + query_lens)
        inputs = {**inputs, "picture_rows": rows[:, :-1], "picture_pool": state[PICTURES].flatten(0, 2)}
        places = torch.arange(self.limits.drafts + 1, dtype=torch.int32, device=offsets.device)
        behind = [offsets, offsets + places] if self.limits.drafts else [offsets]
        return inputs, {"picture_rows": rows[:, 1:], "position_offsets": offsets}, behind

    def _forward(self, params: Tree, state: Tree, step: Tree) -> tuple[torch.Tensor, Tree, torch.Tensor, dict[str, Any]]:
        """Hidden states, the new state, the features for the draft head, and `{"experts": [B, Q/n, L, X]}` of L layers and every nth token,
        or nothing where the variant tells none."""
        names = [*LAYER_INPUTS, *(name for name in PICTURE_INPUTS if name in step)]
        family, cfg = self.model.family, self.model.wide
        hidden, state, (features, _, _, chosen) = family.forward(cfg, params, state, {name: step[name] for name in names})
        if not chosen:
            return hidden, state, features, {}
        # Behind all that layers exchange, and before what else is gathered.
        B, tokens, told = self.bucket.batch, self.bucket.tokens, tokens_told(self.bucket.q_len)
        experts = sequence_parallel.whole(sequence_parallel.behind(torch.cat(list(chosen), 1), hidden, "tokens"), tokens)
        ordered = sequence_parallel.behind(hidden, experts)
        features = ordered if features is hidden else sequence_parallel.behind(features, experts)
        return ordered, state, features, {"experts": experts.view(B, told, -1, experts.shape[1])[:, :, 0].reshape(B, told, len(chosen), -1)}

    def _sample(self, params: Tree, hidden: torch.Tensor, inputs: Tree, uniform: torch.Tensor) -> dict[str, Any]:
        logits = self.model.family.head(self.model.wide, params, hidden)
        count = self.model.config.vocab_size
        return sample_tokens(logits, inputs, uniform, emit_logits=self.emit_logits, max_logprobs=self.max_logprobs, vocab_size=count)

    def _draft(
        self, params: Tree, state: Tree, step: Tree, features: torch.Tensor, counts: torch.Tensor, count: int
    ) -> tuple[dict[str, Any], Tree]:
        """`{"drafts": [B, count]}`, or nothing where nothing is drafted."""
        head = self.model.family.draft_head
        if head is None or not self.limits.drafts:
            return {}, state
        names = ("tokens", "page_table", "num_computed_tokens", "state_slots_in", "state_slots_out")
        inputs = {name: step[name] for name in (*names, *PICTURE_INPUTS) if name in step}
        tokens, state = drafts.draft(head, self.model.wide, self.limits, params, state, inputs, features, counts, count)
        return {"drafts": tokens} if count else {}, state

    def _next_tokens(self, inputs: Tree, sampled: torch.Tensor) -> torch.Tensor:
        """The token after each of the chunk's: [B, Q]."""
        tokens, num_computed_tokens, Q = inputs["tokens"], inputs["num_computed_tokens"], self.bucket.q_len
        after_chunk = torch.where(inputs["next_tokens"] < 0, sampled, inputs["next_tokens"])
        is_last = ops.positions(num_computed_tokens, Q).view(-1, Q) == (num_computed_tokens + inputs["query_lens"] - 1)[:, None]
        return torch.where(is_last, after_chunk[:, None], torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1))


def program(
    model: Model, bucket: Bucket, limits: Limits, dtype: torch.dtype, *, emit_logits: bool = True, max_logprobs: int = 0
) -> Program:
    """The program of a bucket: `(params, state, inputs) -> (outputs, state)`; its inputs are those of graphs/steps/.

    Outputs: `tokens` [B, W] i32, sampled after every candidate (decode, W = Q) or after the row's last valid token (prefill, W = 1; score,
    W = Q, behind the prompt's own);
    in decode `counts` [B] i32, how many of them are accepted; with drafts `drafts` i32, the tokens drafted after those, [B, Q-1] in decode
    and [B, k] in others; the log probabilities and logits of `sample_tokens`; and `experts` [B, Q/n, L, X] i32, those of every nth
    token (graphs/steps/kind.py, `tokens_told`) in each of L layers, if `Variant.tells_experts`.

    Args:
        limits: `limits.drafts` is k; a decode bucket takes up to k + 1 tokens a request.
        emit_logits: logits are among the outputs; without them no device ever holds those of the whole vocabulary for all rows.
        max_logprobs: for how many of the most likely tokens log probabilities are returned; with 0 none are.

    Raises:
        SpecError: a decode bucket of more tokens a request, a score bucket without log probabilities, drafts of a model without a draft
            head, or pictures of one without a tower.
    """
    if kind_of(bucket).decodes and bucket.q_len > limits.drafts + 1:
        legal = f"legal is q_len 1 to {limits.drafts + 1}: the last token and its drafts"
        raise SpecError(f"{bucket.name} with {limits.drafts} drafts; {legal}")
    if kind_of(bucket).wide and not max_logprobs:
        raise SpecError(f"{bucket.name}, which gives log probabilities of prompts, and max_logprobs is 0; legal is at least 1")
    if limits.drafts and not model.has_draft_head:
        raise SpecError(f"{limits.drafts} drafts a step, and {model.name} has no draft head; legal is 0")
    if limits.picture_rows and model.family.tower is None:
        raise SpecError(f"{limits.picture_rows} rows of pictures, and {model.family.name} has no vision tower; legal is 0")
    model = replace(model, drafting=limits.drafts > 0)
    step = _StepFunctions(model, bucket, limits, emit_logits, max_logprobs)
    inputs = StepInputs(bucket, limits, logprobs=max_logprobs > 0).avals()
    forward = getattr(step, bucket.kind)
    return Program(f"{model.name}/{bucket.name}", bucket, forward, avals(model.params(dtype)), model.state(limits, dtype), inputs)


def sampling(model: Model, bucket: Bucket, limits: Limits, dtype: torch.dtype, *, max_logprobs: int = 0) -> Program:
    """What `program` does with hidden states that it samples after, alone: what kinds of answers cost is told without the layers.

    Those states are its input `hidden` [B*W, M], besides the bucket's own; it has no state.
    """
    step, inputs = _StepFunctions(model, bucket, limits, False, max_logprobs), StepInputs(bucket, limits, logprobs=max_logprobs > 0).avals()
    width = bucket.q_len if kind_of(bucket).decodes else 1
    inputs["hidden"] = Aval((bucket.batch * width, model.config.hidden_size), dtype)

    def forward(params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        return step._sample(params, inputs["hidden"], inputs, inputs["uniform"][:, :width]), state

    return Program(f"{model.name}/{bucket.name}/sampling", bucket, forward, avals(model.params(dtype)), {}, inputs)

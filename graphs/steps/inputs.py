"""What one input of a step is, and the inputs that all steps of requests have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..types import WORD_BITS, Bucket, Limits

I32, F32 = torch.int32, torch.float32


@dataclass(frozen=True)
class StepInput:
    """One input of a step.

    Attributes:
        name: name of the leaf.
        dims: its dimensions, letters of `StepKind.sizes`.
        dtype: element type.
        doc: what it holds.
        padding: value in rows of padding, and in the unused part of a live row.
        needs: "drafts", "logprobs", "bitmasks", "adjustments" or "pictures" for an input that only graphs which draft, which return log
            probabilities, or which take bitmasks, adjustments of logits or pictures have.
        other: what proofs put in padding in place of that where numbers have no NaN: nothing reads it. None leaves it.
        row: the attribute of a row (runtime/steps/rows.py) that it is filled from; behind a `*` where that is a sequence, which is stored
            left-aligned. Inputs of the same attribute get its items. "" where the packer has a rule for several inputs together.
    """

    name: str
    dims: str
    dtype: torch.dtype
    doc: str
    padding: float = 0
    needs: str = ""
    row: str = ""
    other: int | None = None


MAX_RANKED = 1024
"""How many of a row's most likely tokens the graph of an NPU ranks (graphs/ops/sample.py).

A larger top_k, of a vocabulary with more, is refused (runtime/scheduler/admission.py). Where top_p without top_k would keep tokens beyond
those, which takes a flat distribution, the token is `UNDECIDED`. As many as CANN's own sampling operator ranks: `ks_max` of
torch_npu.npu_top_k_top_p_sample.
"""

UNDECIDED = -1
"""In place of a sampled token: the graph cannot tell which one the request asks for, and the request fails."""

NON_FINITE = -2
"""In place of a sampled token: the row's largest logit is no finite number, and the request fails."""

AXES = 3
"""Axes of positions where there are pictures: time, row and column."""

OPTIONAL_ROWS = {"bitmask": ("bitmask_rows",), "seen": ("seen_rows",), "adjustments": ("bias_rows", "penalty_rows")}
"""The inputs whose first rows alone are sent, in the order of the leaves, and the inputs that say how many of them rows have."""

LAYER_INPUTS = ("tokens", "page_table", "num_computed_tokens", "query_lens", "state_slots_in", "state_slots_out")
"""The inputs that a model's layers read. Of these, a decode step finds all but page_table and state_slots_out in the request slots."""

PICTURE_INPUTS = ("positions", "picture_rows", "picture_pool", "position_offsets", "candidate_offsets")
"""What they read besides in a graph that takes pictures: positions [B, Q, 3] and rows [B, Q] of a chunk, and the pool [R, M] that these are
of; where there are no positions, what is added to indices of tokens to give them, [B, 1], and [B, Q] where rows have candidates."""

_FILTERS = "sampling.filters"


def request_inputs(slots: str, uniforms: str) -> tuple[StepInput, ...]:
    """The inputs that steps of requests have behind their own, in the order of a graph's leaves.

    Args:
        slots, uniforms: attributes of rows with the state slots that are written and the random numbers.
    """
    return (
        StepInput("request_slots", "B", I32, "request slot; 0, the null slot, in a row of padding", row="request_slot"),
        StepInput("page_table", "BN", I32, "the request's pages in order of position; others hold the null page 0", row="*pages"),
        # In decode all slots of the request, in the same order at every step; a step writes as many of the first as it has tokens.
        StepInput("state_slots_out", "BL", I32, "state slots to write: after each token (decode), or the last one (prefill)", row=slots),
        StepInput("temperature", "B", F32, "sampling, as in graphs.ops.sample; 0 is greedy", row=_FILTERS),
        StepInput("top_k", "B", I32, "sampling; 0 keeps all tokens", row=_FILTERS),
        StepInput("top_p", "B", F32, "sampling; 1 keeps all tokens", padding=1, row=_FILTERS),
        StepInput("min_p", "B", F32, "sampling; 0 keeps all tokens", row=_FILTERS),
        StepInput("logprobs", "B", I32, "1 where the row wants log probabilities", needs="logprobs", row="logprobs"),
        # In decode of the tokens that are sampled after positions base, base + 1, ..., in prefill of the one that is sampled.
        StepInput("uniform", "BU", F32, "random numbers in [0, 1)", row=uniforms),
        StepInput("bitmask_rows", "B", I32, "which bitmask its tokens are sampled under, from 1; 0 is none", needs="bitmasks"),
        StepInput("bias_rows", "B", I32, "which adjustment is added to its logits first, from 1; 0 is none", needs="adjustments"),
        StepInput("penalty_rows", "B", I32, "which adjustment is added to them last, from 1; 0 is none", needs="adjustments"),
        StepInput("seen_rows", "B", I32, "which of `seen` is the row's, from 1; 0 is none", needs="adjustments"),
        StepInput("repetition_penalty", "B", F32, "factor of seen tokens, as in graphs.ops.adjust_logits", 1, needs="adjustments"),
        # Last, so that a step need not send what no row of it has; the longest at the end.
        StepInput("bitmask", "CWM", I32, "a bit a token that may be sampled, as in graphs.ops.mask_logits", needs="bitmasks"),
        StepInput("seen", "AWS", I32, "a bit a token of prompt and output, as in graphs.ops.adjust_logits", needs="adjustments"),
        StepInput("adjustments", "AWV", F32, "what is added to each token's logit, as in graphs.ops.adjust_logits", needs="adjustments"),
    )


def request_sizes(bucket: Bucket, limits: Limits, sampled: int, ahead: int) -> dict[str, int]:
    """Sizes of steps of requests: B, Q and N (graphs/types.py), X axes of positions, P tokens with the one that follows, W tokens sampled
    per row, L state slots and U random numbers per row, C bitmasks of M words a token, A adjustments of V logits, with sets of S words.

    Args:
        sampled: W, tokens sampled per row.
        ahead: how many tokens a row may be further than the host knows.
    """
    B, Q, C, A = bucket.batch, bucket.q_len, limits.bitmasks, limits.logit_adjustments
    sizes = {"B": B, "Q": Q, "N": limits.pages_per_request, "X": AXES, "P": Q + 1, "W": sampled, "L": ahead + 1, "U": ahead + sampled}
    sizes |= {"C": min(C, B), "M": limits.bitmask_words}
    # No row has more than two adjustments.
    return sizes | {"A": min(A, 2 * B), "V": limits.adjusted_tokens, "S": -(-limits.adjusted_tokens // WORD_BITS)}

"""The inputs of a step: name, shape, dtype, padding value and meaning of each, for whoever traces, packs or tests a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .types import WORD_BITS, Aval, Bucket, Limits


@dataclass(frozen=True)
class StepInput:
    """One input of a step.

    Attributes:
        name: name of the leaf.
        dims: its dimensions, letters of `StepInputs.sizes`.
        dtype: element type.
        doc: what it holds.
        padding: value in rows of padding, and in the unused part of a live row.
        kind: the kind of bucket that has it; "" for both kinds.
        needs: "drafts", "logprobs", "bitmasks", "adjustments" or "pictures" for an input that only graphs which draft, which return log
            probabilities, or which take bitmasks, adjustments of logits or pictures have.
    """

    name: str
    dims: str
    dtype: torch.dtype
    doc: str
    padding: float = 0
    kind: str = ""
    needs: str = ""


_I32, _F32 = torch.int32, torch.float32

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

STEP_INPUTS = (
    StepInput("tokens", "BQ", _I32, "token ids, left-aligned", kind="prefill"),
    StepInput("num_computed_tokens", "B", _I32, "tokens of the row's request that are in the cache already", kind="prefill"),
    StepInput("query_lens", "B", _I32, "valid tokens of the row; 0 in a row of padding", kind="prefill"),
    StepInput("state_slots_in", "B", _I32, "state slot to start from; not read where starts is 0", kind="prefill"),
    StepInput("next_tokens", "B", _I32, "prompt token after the row's last one; -1 where it is sampled", -1, "prefill", "drafts"),
    StepInput("positions", "BQX", _I32, "position of each token in time, row and column", kind="prefill", needs="pictures"),
    # Of one token more than the chunk has: what follows its last one.
    StepInput("picture_rows", "BP", _I32, "row of a picture in the token's place; 0 is none", kind="prefill", needs="pictures"),
    StepInput("drafts", "B", _I32, "how many of the row's drafts are verified, 0 to Q-1", kind="decode"),
    StepInput("base", "B", _I32, "smallest position at which the row can start, for all the host knows", kind="decode"),
    StepInput("request_slots", "B", _I32, "request slot (models/request_slots.py); 0, the null slot, in a row of padding"),
    StepInput("page_table", "BN", _I32, "the request's pages in order of position; unused entries hold the null page 0"),
    # In decode all slots of the request, in the same order at every step; a step writes as many of the first as it has tokens.
    StepInput("state_slots_out", "BL", _I32, "state slots to write: one after each token (decode), or one after the last (prefill)"),
    StepInput("temperature", "B", _F32, "sampling, as in graphs.ops.sample; 0 is greedy"),
    StepInput("top_k", "B", _I32, "sampling; 0 keeps all tokens"),
    StepInput("top_p", "B", _F32, "sampling; 1 keeps all tokens", padding=1),
    StepInput("min_p", "B", _F32, "sampling; 0 keeps all tokens"),
    StepInput("logprobs", "B", _I32, "1 where the row wants log probabilities", needs="logprobs"),
    # In decode of the tokens that are sampled after positions base, base + 1, ..., in prefill of the one that is sampled.
    StepInput("uniform", "BU", _F32, "random numbers in [0, 1)"),
    StepInput("bitmask_rows", "B", _I32, "which bitmask the row's tokens are sampled under, from 1; 0 is none", needs="bitmasks"),
    StepInput("bias_rows", "B", _I32, "which adjustment is added to the row's logits first, from 1; 0 is none", needs="adjustments"),
    StepInput("penalty_rows", "B", _I32, "which adjustment is added to them last, from 1; 0 is none", needs="adjustments"),
    StepInput("seen_rows", "B", _I32, "which of `seen` is the row's, from 1; 0 is none", needs="adjustments"),
    StepInput("repetition_penalty", "B", _F32, "factor of seen tokens, as in graphs.ops.adjust_logits", 1, needs="adjustments"),
    # Last, so that a step need not send what no row of it has; the longest at the end.
    StepInput("bitmask", "CWM", _I32, "a bit a token that may be sampled, as in graphs.ops.mask_logits", needs="bitmasks"),
    StepInput("seen", "AWS", _I32, "a bit a token of prompt and output, as in graphs.ops.adjust_logits", needs="adjustments"),
    StepInput("adjustments", "AWV", _F32, "what is added to the logit of each token, as in graphs.ops.adjust_logits", needs="adjustments"),
)
"""All inputs, in the order of a graph's leaves."""

LEAST_CHUNK = 4
"""Tokens a row, with padding, of a prefill step whose sizes are values. Graphs take a token off and compilers know sizes of 1 apart."""

PADDING = {field.name: field.padding for field in STEP_INPUTS}
"""Value of each input in rows of padding."""

OPTIONAL_ROWS = {"bitmask": ("bitmask_rows",), "seen": ("seen_rows",), "adjustments": ("bias_rows", "penalty_rows")}
"""The inputs whose first rows alone are sent, in the order of the leaves, and the inputs that say how many of them rows have."""

LAYER_INPUTS = ("tokens", "page_table", "num_computed_tokens", "query_lens", "state_slots_in", "state_slots_out")
"""The inputs that a model's layers read. Of these, a decode step finds all but page_table and state_slots_out in the request slots."""

PICTURE_INPUTS = ("positions", "picture_rows", "picture_pool", "position_offsets", "candidate_offsets")
"""What they read besides in a graph that takes pictures: positions [B, Q, 3] and rows [B, Q] of a chunk, and the pool [R, M] that these are
of; where there are no positions, what is added to indices of tokens to give them, [B, 1], and [B, Q] where rows have candidates."""


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one bucket's graph, as abstract values or as tensors in which every row is padding.

    Attributes:
        logprobs: the graph returns log probabilities.
    """

    bucket: Bucket
    limits: Limits
    logprobs: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """B, Q and N (graphs/types.py), X axes of positions, P tokens with the one that follows, W tokens sampled per row, L state slots
        and U random numbers per row, C bitmasks of M words a token, and A adjustments of V logits, with as many sets of S words."""
        B, Q, W, limits = self.bucket.batch, self.bucket.q_len, write_width(self.bucket), self.limits
        masks = {"C": min(limits.bitmasks, B), "M": limits.bitmask_words}
        # No row has more than two.
        masks |= {"A": min(limits.logit_adjustments, 2 * B), "V": limits.adjusted_tokens, "S": -(-limits.adjusted_tokens // WORD_BITS)}
        # Of the steps of a request the one before may have been of any width.
        ahead = max(limits.drafts, Q - 1) if self.bucket.kind == "decode" else 0
        return {"B": B, "Q": Q, "N": limits.pages_per_request, "X": AXES, "P": Q + 1, "W": W, "L": ahead + 1, "U": ahead + W, **masks}

    def shapes(self, names: Sequence[str] = ()) -> list[tuple[StepInput, tuple[int, ...]]]:
        """The graph's inputs, or those of these names whether the graph has them or not, each with its shape."""
        sizes = self.sizes
        fields = (field for field in STEP_INPUTS if (field.name in names if names else self._has(field)))
        return [(field, tuple(sizes[letter] for letter in field.dims)) for field in fields]

    def avals(self) -> dict[str, Aval]:
        """The abstract inputs that the graph is traced with."""
        return {field.name: Aval(shape, field.dtype) for field, shape in self.shapes()}

    def padding(self, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """New tensors in which every row is padding, of the inputs that `shapes` gives."""
        return {field.name: torch.full(shape, field.padding, dtype=field.dtype) for field, shape in self.shapes(names)}

    def _has(self, field: StepInput) -> bool:
        limits = self.limits
        offered = {"": True, "drafts": limits.drafts > 0, "logprobs": self.logprobs, "bitmasks": limits.bitmasks > 0}
        offered |= {"adjustments": limits.logit_adjustments > 0, "pictures": limits.picture_rows > 0}
        return field.kind in ("", self.bucket.kind) and offered[field.needs]


def write_width(bucket: Bucket) -> int:
    """W: tokens sampled per row, and states written."""
    return bucket.q_len if bucket.kind == "decode" else 1

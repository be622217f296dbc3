"""How a deployment stores a model's parameters and state: copies of key-value heads, quantised formats, dtype of recurrent state."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from ..graphs.ops.fused_experts import FEWEST_TOKENS, takes
from .head_padding import PaddedHeads
from .quant.formats import PLAIN as PLAIN_FORMATS
from .quant.formats import W4A8_DYNAMIC, Formats

MOST_DISPATCHED = 512
"""Tokens of one dispatch: the most that NPUs' operators take (npu_moe_distribute_dispatch_v2 of Ascend/op-plugin, 04f7867).

Each dispatch reads the weights of all experts that any token chose and waits for all devices, so prefill takes as few as it can; their
second full-mesh algorithm takes 256 tokens, which a device decodes fewer of in any published deployment. The exchange window grows with
the tokens: 4.6 GiB for 512 of them, 512 experts and a width of 4096, twice; a build whose ranks lack that memory takes smaller parts."""


@dataclass(frozen=True)
class Variant:
    """How parameters and state are stored. Apart from rounding, where it quantises, it never changes what a model computes.

    Attributes:
        kv_repeat: adjacent copies of each key-value head, so that each of more devices than heads has one.
        draft_kv_repeat: the same of a draft head that has a number of key-value heads of its own.
        formats: which matrices are stored in other formats than float.
        grouped: whether float experts are stored as grouped products read them, [E, M, 2, F], and not as a checkpoint has them,
            [E, 2, F, M]. Quantised experts are always.
        shards: (logical axis, number of ranks that it is split over) of axes that products contract: a rank rounds its own part of the
            activations of a quantised matrix, and one device that stands for all ranks rounds the same parts.
        heads: heads that are padded where ranks do not share them evenly (head_padding.py).
        draft_heads: the same of a draft head that has heads of its own.
        padded: (logical axis, number of ranks that share it) of axes that are padded where ranks do not share them evenly (padding.py).
        recurrent: dtype of the recurrent state pools.
        draft_vocab: how many tokens, the first ones, may be drafted (draft_vocabulary.py); 0 for all.
        one_window: whether the pools of convolution inputs keep all inputs of a step in a request's first slot (ops/causal_conv.py).
        split_at_once: whether one operation each takes apart the projection of an attention layer (ops/attention_heads.py), whose queries
            then lie beside their gates, and projection and convolution of a gated DeltaNet layer (ops/delta_split.py, delta_heads.py).
        most_dispatched: most tokens that a device dispatches to the experts' devices at once. 0 never dispatches.
        dispatches_in_parts: whether more tokens take several dispatches; else they are gathered.
        in_flight: parts that are on their way at once: with 2 a part is dispatched before the rows of the one before are sent back.
        fused_experts: whether what is dispatched takes one operation there and back, where `fuses` says so.
        physical_experts: of a layer, in places that data say (expert_placement.py); 0 where they are the model's as they stand.
        expert_ranks: devices that physical experts are spread over.
        tells_experts: whether steps return which experts each token chose.
        sliced: whether the devices of a group share the tokens of prompts in attention, and not its heads (context_parallel.py).
    """

    kv_repeat: int = 1
    formats: Formats = PLAIN_FORMATS
    grouped: bool = False
    shards: tuple[tuple[str, int], ...] = ()
    recurrent: torch.dtype = torch.float32
    most_dispatched: int = MOST_DISPATCHED
    dispatches_in_parts: bool = False
    in_flight: int = 1
    one_window: bool = False
    split_at_once: bool = False
    fused_experts: bool = False
    draft_kv_repeat: int = 1
    padded: tuple[tuple[str, int], ...] = ()
    heads: tuple[PaddedHeads, ...] = ()
    draft_heads: tuple[PaddedHeads, ...] = ()
    draft_vocab: int = 0
    physical_experts: int = 0
    expert_ranks: int = 1
    tells_experts: bool = False
    sliced: bool = False

    def parts(self, axis: str | None) -> int:
        """Into how many parts a contraction along a logical axis is split."""
        return dict(self.shards).get(axis or "", 1)

    def fuses(self, tokens: int) -> bool:
        """Whether the experts of that many tokens of a device are one operation, or one for each part that is dispatched."""
        if not self.fused_experts or not self.most_dispatched:
            return False
        if tokens > self.most_dispatched and not self.dispatches_in_parts:
            return False
        return min(tokens, tokens % self.most_dispatched or self.most_dispatched) >= FEWEST_TOKENS


def with_packages(variant: Variant, backend: str, packages: Collection[str]) -> Variant:
    """A variant with what the operators of packages take in graphs of that backend.

    Those of vllm-ascend for captured graphs keep all inputs of a convolution in one slot, and take projections of all heads apart.
    """
    captured = backend == "aclgraph" and "vllm-ascend" in packages
    return replace(variant, one_window=captured, split_at_once=captured)


def with_fused_experts(variant: Variant, backend: str, chip: str, packages: Collection[str], sizes: tuple[int, int], ranks: int) -> Variant:
    """A variant whose experts are one operation if the platform has one for them.

    Args:
        chip: by CANN's name.
        sizes: M and F of an expert.
        ranks: that experts are spread over.
    """
    captured = backend == "aclgraph" and chip == "ascend910_93" and "vllm-ascend" in packages
    int4 = not variant.formats.group and any(form == W4A8_DYNAMIC for _, form in variant.formats.rules)
    return replace(variant, fused_experts=captured and int4 and takes(*sizes, ranks))


PLAIN = Variant()
"""Parameters as a checkpoint stores them."""


def fewer_bytes_in_parts(rounded: bool, experts_per_token: int, devices: int) -> bool:
    """Whether several dispatches of many tokens move fewer bytes than to gather them all and reduce-scatter the result.

    Of each bfloat16 token, a row (of int8 where experts read int8) goes to each of its experts, and one comes back; a gather and a
    reduce-scatter move it to and from every device.
    """
    sent, value = (1 if rounded else 2), 2
    return experts_per_token * (sent + value) < devices * 2 * value

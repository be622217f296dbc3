"""How a deployment stores a model's parameters and state: copies of key-value heads, quantised formats, dtype of recurrent state."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from .quant.formats import PLAIN as PLAIN_FORMATS
from .quant.formats import Formats

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
        formats: which matrices are stored in other formats than float.
        grouped: whether float experts are stored as grouped products read them, [E, M, 2, F], and not as a checkpoint has them,
            [E, 2, F, M]. Quantised experts are always.
        shards: (logical axis, number of ranks that it is split over) of axes that products contract: a rank rounds its own part of the
            activations of a quantised matrix, and one device that stands for all ranks rounds the same parts.
        recurrent: dtype of the recurrent state pools.
        one_window: whether the pools of convolution inputs keep all inputs of a step in a request's first slot (ops/causal_conv.py).
        projections_apart: whether a gated DeltaNet layer multiplies by each part of its projection, which is taken apart when it is loaded.
        most_dispatched: most tokens that a device dispatches to the experts' devices at once. 0 never dispatches.
        dispatches_in_parts: whether more tokens take several dispatches; else they are gathered.
    """

    kv_repeat: int = 1
    formats: Formats = PLAIN_FORMATS
    grouped: bool = False
    shards: tuple[tuple[str, int], ...] = ()
    recurrent: torch.dtype = torch.float32
    most_dispatched: int = MOST_DISPATCHED
    dispatches_in_parts: bool = False
    one_window: bool = False
    projections_apart: bool = False

    def parts(self, axis: str | None) -> int:
        """Into how many parts a contraction along a logical axis is split."""
        return dict(self.shards).get(axis or "", 1)


def with_packages(variant: Variant, backend: str, packages: Collection[str]) -> Variant:
    """A variant with what the operators of packages take in graphs of that backend.

    Those of vllm-ascend for captured graphs keep all inputs of a convolution in one slot, and read projections that lie side by side: one
    product each costs less than one for all and a copy of each part.
    """
    captured = backend == "aclgraph" and "vllm-ascend" in packages
    return replace(variant, one_window=captured, projections_apart=captured)


PLAIN = Variant()
"""Parameters as a checkpoint stores them."""


def fewer_bytes_in_parts(quantised: bool, experts_per_token: int, devices: int) -> bool:
    """Whether several dispatches of many tokens move fewer bytes than to gather them all and reduce-scatter the result.

    Of each bfloat16 token, a row (of int8 where experts are quantised) goes to each of its experts, and one comes back; a gather and a
    reduce-scatter move it to and from every device.
    """
    sent, value = (1 if quantised else 2), 2
    return experts_per_token * (sent + value) < devices * 2 * value

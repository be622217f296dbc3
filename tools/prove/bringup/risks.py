"""The documented assumptions that a rung can refute: short names of the rows and risks of docs/on-hardware.md."""

from __future__ import annotations

from collections.abc import Mapping

from ....lowering.ascend.emulator.ge_ops_common import GeOp

ASSUMPTIONS: Mapping[str, str] = {
    "compiles": "GE has compiled none of our graphs",
    "kernels": "no kernel has run",
    "measurements": "no number has been measured",
    "memory": "memory plans are estimates",
    "communicators": "HCCL has joined no communicator for us",
    "device": "the device itself",
    "nz-weights": "NZ weights",
    "aiv-mode": "AIV mode in a graph",
    "ge-cache": "GE's cache",
    "derived-values": "derived values",
    "toolchain": "the release of CANN",
    "architecture": "aarch64",
    "attention": "Attention over pages.",
    "lengths": "Length conventions.",
    "partial-rotary": "Partial rotary.",
    "delta-rule": "Recurrent gated delta rule.",
    "delta-rule-prefill": "Prefill of the delta rule.",
    "causal-convolution": "Causal convolution.",
    "expert-exchange": "Expert dispatch and combine.",
    "grouped-products": "Grouped products.",
    "gating": "Gating.",
    "int8": "Int8 outputs.",
    "kv-writes": "KV writes.",
    "write-after-read": "Write after read.",
    "one-session": "One session, many graphs.",
    "alternation": "Changing buckets over the same buffers.",
    "capture": "Captured graphs.",
    "packages": "Operator packages.",
}
"""Short name -> its heading in docs/on-hardware.md."""

_BY_TYPE: Mapping[str, str] = {
    "FusedInferAttentionScore": "lengths",
    "RecurrentGatedDeltaRule": "delta-rule",
    "ScatterPaKvCache": "kv-writes",
    "ScatterNdUpdate": "kv-writes",
    "GroupedMatmul": "grouped-products",
    "GroupedMatmulSwigluQuantV2": "grouped-products",
    "MoeInitRoutingV3": "expert-exchange",
    "MoeFinalizeRoutingV2": "expert-exchange",
    "MoeDistributeDispatchV2": "expert-exchange",
    "MoeDistributeCombineV2": "expert-exchange",
    "MoeGatingTopKSoftmaxV2": "gating",
    "RotaryMul": "partial-rotary",
    "QuantBatchMatmulV3": "int8",
    "DynamicQuant": "int8",
    "AddRmsNormDynamicQuant": "int8",
    "DequantSwigluQuant": "int8",
    "SwiGlu": "int8",
}
ORDER = (
    "FusedInferAttentionScore", "RecurrentGatedDeltaRule", "ScatterPaKvCache", "ScatterNdUpdate", "GroupedMatmul",
    "GroupedMatmulSwigluQuantV2", "DequantSwigluQuant", "MoeGatingTopKSoftmaxV2", "MoeInitRoutingV3", "MoeFinalizeRoutingV2",
    "QuantBatchMatmulV3", "DynamicQuant", "AddRmsNormDynamicQuant",
)  # fmt: skip
"""Types of operators in the order of risk; all others come after them."""

_REFUSALS: Mapping[str, str] = {
    "FusedInferAttentionScore": "attention",
    "MoeDistributeDispatchV2": "expert-exchange",
    "MoeDistributeCombineV2": "expert-exchange",
    "GroupedMatmul": "grouped-products",
    "GroupedMatmulSwigluQuantV2": "grouped-products",
    "RecurrentGatedDeltaRule": "delta-rule",
}
"""Types that a build checks against the table; what a device refuses of them, the table has wrong."""


def of_refusal(op: GeOp) -> str:
    """The assumption that is wrong where a device refuses to compile or to run an operator."""
    return _REFUSALS.get(op.type, "compiles")


def of_wrong_result(op: GeOp, in_nz: bool) -> str:
    """The assumption that is wrong where an operator computes other values than its CPU kernel.

    Args:
        in_nz: it is wrong only with its weight in NZ.
    """
    return "nz-weights" if in_nz else _BY_TYPE.get(op.type, "kernels")

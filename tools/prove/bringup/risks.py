"""The documented assumptions that a rung can refute: short names of the rows and risks of docs/on-hardware.md."""

from __future__ import annotations

from collections.abc import Mapping

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
    "handovers": "Handovers.",
}
"""Short name -> its heading in docs/on-hardware.md."""

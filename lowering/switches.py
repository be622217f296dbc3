"""Switches for a device on which something fails: what may be off where an artifact runs, without another build."""

from __future__ import annotations

from collections.abc import Mapping

NZ, AIV, RUN_AHEAD, BUCKETS, OVERLAP, CAPTURE, KERNELS = "nz", "aiv", "run-ahead", "buckets", "overlap", "capture", "kernels"
SWITCHES: Mapping[str, str] = {
    NZ: "weights are row-major (ND) wherever a kernel takes them so",
    AIV: "HCCL_OP_EXPANSION_MODE is not set",
    RUN_AHEAD: "a step is launched when the one before it has been read",
    BUCKETS: "of each kind the largest bucket alone is started",
    OVERLAP: "operators of a graph run one after the other, where others would run beside exchanges of experts",
    CAPTURE: "operators are launched one by one, where graphs would be captured",
    KERNELS: "GE takes CANN's own kernels where it would compile them online, or the other way round",
}
"""What is done instead, by switch."""

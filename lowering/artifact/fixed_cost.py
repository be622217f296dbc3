"""What a step of an artifact costs whatever its size, in tokens."""

from __future__ import annotations

from ...graphs.steps.prefill import PREFILL
from .. import isa
from ..machines import NPUS
from .manifest import Manifest
from .shards import local_signature

FLOPS_PER_BYTE = {chip: round(npu.bf16_ops_per_s / npu.hbm_bytes_per_s) for chip, npu in NPUS.items()}
"""Operations that a machine computes while it reads a byte of its memory, by chip: nameplate bfloat16 products over nameplate bandwidth."""

CPU_FLOPS_PER_BYTE = {"bf16": 12, "f32": 7}
TILED_FLOPS_PER_BYTE = {**CPU_FLOPS_PER_BYTE, "bf16": 70}
"""The same of CPUs, the latter with AMX, measured on two cores by dtype of the products.

bf16: 0.75 B parameters (1.505 GB, 1.05 GFLOP a token). With AMX steps of 32 tokens take 90 ms and of 512 take 450, which is a fixed part
of 99 tokens; this says 101. By themselves products reach 2 TFLOP/s there and reads 30 GB/s. With bfloat16 dot products alone they take 300
and 4,274 ms, which is 17 tokens; this says 17. Of other machines without AMX, steps say about 9 operations (Zen 4) and 20 (Zen 5). f32:
the bundled model (20.8 MB, 4.7 MFLOP a token) with AVX-512. Steps of 32 tokens take 3.43 ms and of 128 take 10.53, which is 28 tokens;
this says 31.
"""

_INT8 = ("w8a8", "w8a8-all", "w4a8")
"""Quantizations whose products are of int8, which every machine here computes twice as fast."""


def fixed_tokens(manifest: Manifest, tiles: bool | None = None) -> int:
    """How many tokens take as long to compute as a rank's parameters take to read: the fixed part of a step's cost; at least 1.

    That is bytes of parameters x operations a byte (the machine's) / operations a token (the largest graph's, without those on cached
    tokens). All that the graph takes count, also a table of embeddings of which a step reads few rows, and experts that no token chooses.
    Launches and messages between ranks do not count.

    Args:
        tiles: whether the CPU that serves has AMX; None asks this one. Of other platforms it says nothing.
    """
    entry = max(manifest.graphs, key=lambda entry: (entry.bucket.kind == PREFILL.name, entry.bucket.tokens))
    # Builds before there was a count of cached_flops take attention over a full context for a token's own cost.
    flops = entry.cost["flops"] - entry.cost.get("cached_flops", 0)
    params = sum(leaf.aval.nbytes for leaf in local_signature(manifest, entry).params)
    return max(round(params * balance(manifest, tiles) * entry.bucket.tokens / flops), 1)


def balance(manifest: Manifest, tiles: bool | None = None) -> float:
    """Operations that the artifact's machine computes while it reads a byte, in the dtype of its products."""
    chip = manifest.platform.get("chip", "")
    if tiles is None:
        tiles = isa.has("amx")
    cpu = TILED_FLOPS_PER_BYTE if tiles else CPU_FLOPS_PER_BYTE
    bf16_or_own = FLOPS_PER_BYTE[chip] if chip else cpu[manifest.dtype]
    return bf16_or_own * (2 if manifest.quantization in _INT8 else 1)

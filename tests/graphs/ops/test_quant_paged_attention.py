"""graphs/ops/quant_paged_attention.py and quant_cache_write.py: int8 pages stand for integers times their scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs import ops
from npucompile.graphs.primitive import TABLE
from npucompile.lowering.ascend.emulator.kernels_attention import npu_fused_infer_attention_score
from npucompile.lowering.ascend.emulator.npu_reference import KERNELS

P, G, D, H = 4, 2, 8, 4


def pools(pages: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    cached = {name: torch.randint(-127, 128, (pages, P, G, D), generator=generator, dtype=torch.int8) for name in ("k", "v")}
    return cached | {f"{name}_scale": torch.rand(pages, G, P, generator=generator) / 64 for name in ("k", "v")}

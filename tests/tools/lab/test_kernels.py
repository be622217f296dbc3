"""tools/lab/kernels.py: every kernel that is measured runs, beside torch's and a read of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.tools.bench.stats import Spread
from npucompile.tools.lab import kernels
from npucompile.tools.progress import Progress


@pytest.mark.long
def test_every_kernel_is_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHAPES", ((64, 256),))
    monkeypatch.setattr(kernels, "ROWS", (1, 33))
    monkeypatch.setattr(kernels, "ATTENTIONS", ((1, 20, 1), (2, 32, 32)))
    monkeypatch.setattr(kernels, "WORKING_SET_BYTES", 2**20)
    monkeypatch.setattr(kernels, "TOKENS", (1, 5))
    monkeypatch.setattr(kernels, "EXPERTS", {"bf16": 4, "int4": 9})
    monkeypatch.setattr(kernels, "EXPERT", (128, 256))
    products, experts, states = kernels.kernels(tmp_path, 1, Progress(quiet=True))
    assert [row["what"] for row in products.rows] == [f"{kind} {M} x 64 x 256" for M in (1, 33) for kind in ("bf16", "int8", "int4")]
    assert [row["what"] for row in experts.rows] == [f"{kind} experts, {T} tokens" for kind in ("bf16", "int4") for T in (1, 5)]
    assert [str(row["what"]).split(",")[0] for row in states.rows] == ["attention"] * 2 + ["delta rule"] * 3
    for row in (*products.rows, *experts.rows, *states.rows):
        for key in ("own_us", "of_memory"):
            spread = row[key]
            assert isinstance(spread, Spread)
            assert spread.median > 0

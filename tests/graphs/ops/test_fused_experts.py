"""graphs/ops/fused_experts.py: what the kernel takes, and the memory that it needs."""

from __future__ import annotations

import pytest

from npucompile.graphs.ops.fused_experts import MOST_RANKS, takes, window_bytes, workspace_bytes

MIB = 2**20


@pytest.mark.parametrize(("tokens", "M", "choices"), [(24, 4096, 10), (64, 4096, 10), (512, 4096, 10), (512, 7168, 8), (33, 2048, 1)])
def test_everything_that_the_kernel_keeps_in_its_window_fits(tokens, M, choices):
    """PeermemInfo of its source: rows with their scales behind them, 1 MiB of scales, results, and counts in the last 2 MiB."""
    size, rows = -(-window_bytes(tokens, M, choices) // MIB) * MIB, tokens * choices
    scales = -(-(size // 3) // 512) * 512
    results, counts = scales + MIB, size - 2 * MIB
    assert rows * (M + 512) <= size // 3
    assert rows * 4 <= MIB
    assert results + rows * M * 2 <= counts
    # Twice as many tokens would not fit: the window is no larger than it must be.
    assert tokens < 100 or 2 * rows * (M + 512) > size // 3


def test_the_workspace_is_that_of_every_row_a_device_can_get():
    # 64 tokens of each of 16 devices, each at 10 experts of one device: 10,240 rows of 16 KiB of products and 4 KiB of int4.
    needed = workspace_bytes(64, 4096, 1024, 10, 512, 16)
    assert 0 < needed - 10240 * (4 * 4096 + 4096 + 8) < 17 * MIB


def test_widths_and_ranks_that_the_kernel_would_compute_wrongly_are_not_taken():
    assert takes(4096, 1024, 16)
    assert takes(64, 32, 2)
    # Rows of the first product would overlap; tiles of NZ would be padded; its memory of a core would overflow; its tables would.
    assert not takes(4096, 2080, 16)
    assert not takes(4096 + 32, 1024, 16)
    assert not takes(4096, 1000, 16)
    assert not takes(8192, 3616, 16)
    assert not takes(11264, 1024, 16)
    assert not takes(4096, 1024, MOST_RANKS + 1)
    assert not takes(4096, 1024, 1)

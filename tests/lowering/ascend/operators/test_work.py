"""lowering/ascend/operators/work.py: few rows read few experts; what rules give for whole operators is in cost/test_work.py."""

from __future__ import annotations

import pytest

from npucompile.lowering.ascend.operators.work import Rows, experts_read


def test_experts_that_are_read():
    """One row reads one expert of all ranks; many rows read all of a rank's; without skew it is the textbook's expectation."""
    assert experts_read(Rows(1, 1, 512, 512), 0.6) == pytest.approx(1)
    assert experts_read(Rows(1e6, 1.6e7, 32, 512), 0.6) == pytest.approx(32)
    assert experts_read(Rows(8, 8, 16, 16), 0.0) == pytest.approx(16 * (1 - (15 / 16) ** 8))
    assert experts_read(Rows(8, 8, 16, 16), 0.6) < experts_read(Rows(8, 8, 16, 16), 0.0)

"""tools/advisor/plan/system.py: schemes and names of layouts."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.plan.system import PlannedLayout, Scheme


@pytest.mark.parametrize(
    ("name", "draft", "sizes"), [("w4a8", "bf16", (1.0, 0.53, 2.0)), ("w8a8", None, (1, 1, 1)), ("bf16", None, (2, 2, 2))]
)
def test_bytes_of_weights_and_names_of_layouts(name: str, draft: str | None, sizes) -> None:
    scheme = Scheme.named(name, draft)
    assert (scheme.product, scheme.expert, scheme.draft) == sizes
    assert (str(PlannedLayout(4, 2)), str(PlannedLayout(4, 2, instances=3)), PlannedLayout(4, 2).ranks) == ("dp=4,tp=2", "dp=4,tp=2 x 3", 8)

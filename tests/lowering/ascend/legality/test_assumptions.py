"""lowering/ascend/legality/assumptions.py: what graphs rely on without a source of their release, and how many operators do."""

from __future__ import annotations

import pytest
from support import legal_graph
from support.legal_graph import A3

from npucompile.lowering.ascend.legality.assumptions import assumptions
from npucompile.lowering.platform import Platform


@pytest.fixture(scope="module")
def legal(tmp_path_factory):
    return legal_graph.legal(tmp_path_factory.mktemp("stubs"))


def test_assumptions_are_what_no_source_says_of_the_release(legal):
    told = assumptions([legal, legal], A3)
    assert {(a.operator, a.what) for a in told} == {("MatMul", "types")}
    assert told[0].operators % 2 == 0
    older = {a.operator: a.assumed for a in assumptions([legal], Platform("ascend910_93", "8.5"))}
    assert "oldest release of which it could be read: hicann/ge@" in older["Cast"]
    assert "MoeDistributeDispatchV2" not in older

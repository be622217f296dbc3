"""lowering/ascend/legality/assumptions.py: what graphs rely on without a source of their release, and how many operators do."""

from __future__ import annotations

import pytest
from support import legal_graph
from support.legal_graph import A3

from npucompile.lowering.ascend.legality.assumptions import assumptions
from npucompile.lowering.ascend.legality.check import examine
from npucompile.lowering.platform import Platform


@pytest.fixture(scope="module")
def legal(tmp_path_factory):
    return legal_graph.legal(tmp_path_factory.mktemp("stubs"))


def test_assumptions_are_what_no_source_says_of_the_release(legal):
    told = assumptions([examine(legal, A3)] * 2, A3)
    assert {(a.operator, a.what) for a in told} == {("MatMul", "types")}
    assert told[0].operators % 2 == 0
    older_platform = Platform("ascend910_93", "8.5")
    older = {a.operator: a.assumed for a in assumptions([examine(legal, older_platform)], older_platform)}
    assert "oldest release of which it could be read: hicann/ge@" in older["Cast"]
    assert "MoeDistributeDispatchV2" not in older

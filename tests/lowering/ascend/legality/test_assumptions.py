"""lowering/ascend/legality/assumptions.py: what graphs rely on without a source of their release, and how many operators do."""

from __future__ import annotations

from support.legal_graph import A3, edited

from npucompile.lowering.ascend.legality.assumptions import assumptions
from npucompile.lowering.ascend.legality.check import examine
from npucompile.lowering.platform import Platform


def test_assumptions_are_what_no_source_says_of_the_release(legal):
    told = assumptions([examine(legal, A3)] * 2, A3)
    assert {(a.operator, a.what) for a in told} == {("MatMul", "types")}
    assert told[0].operators % 2 == 0
    older_platform = Platform("ascend910_93", "8.5")
    older = {a.operator: a.assumed for a in assumptions([examine(legal, older_platform)], older_platform)}
    assert "oldest release of which it could be read: hicann/ge@" in older["Cast"]
    assert "MoeDistributeDispatchV2" not in older


def test_two_algorithms_in_one_communicator_are_an_assumption(legal):
    """Small steps use another algorithm than large ones; graphs of both share the communicator."""

    def second(first):
        for operator in ("MoeDistributeDispatchV2", "MoeDistributeCombineV2"):
            first[operator].attr["comm_alg"].s = b"fullmesh_v2"

    (told,) = (a for a in assumptions([examine(each, A3) for each in (legal, edited(legal, second))], A3) if a.what == "communicator")
    assert (told.operator, told.operators) == ("comm_alg", 4)
    assert "'dispatch' may use '' and 'fullmesh_v2' in turn" in told.assumed
    assert not [a for a in assumptions([examine(legal, A3)] * 2, A3) if a.what == "communicator"]

"""lowering/ascend/legality/running.py: an older CANN and another chip are refused by name; a newer CANN is asked about each graph."""

from __future__ import annotations

import pytest
from support import legal_acl, legal_graph

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.legality.running import check_running, chip_of
from npucompile.lowering.platform import CPU, Platform

BUILT = Platform("ascend910_93", "9.0")


def unread():
    raise AssertionError("the graph is read though no newer release runs")


def test_a_chip_has_the_name_that_operators_are_defined_for():
    versions = ("cann-9.0.0-Ascend910_9391", "cann-8.5.0.alpha001-Ascend910B3", "cann-9.0.0-Ascend950PR", "emulated-1")
    assert [chip_of(version) for version in versions] == ["ascend910_93", "ascend910b", "", ""]


@pytest.mark.parametrize("version", ["cann-9.0.0-Ascend910_9391", "cann-9.0.RC2-Ascend910_9382", "emulated"])
def test_same_release(version):
    check_running(version, BUILT, [unread])
    check_running(version, CPU, [unread])


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (
            "cann-8.5.0.alpha001-Ascend910_9391",
            r"for CANN 9.0, and CANN 8.5 runs here; legal is 9.0 or newer, or a build with --cann 8.5",
        ),
        ("cann-9.0.0-Ascend910B3", "built for ascend910_93, and this machine has Ascend910B3"),
    ],
)
def test_older_release_or_other_chip(version, message):
    with pytest.raises(LoweringError, match=message):
        check_running(version, BUILT, [unread])


@pytest.mark.parametrize("running", ["9.1.0", "9.7.2"])
@pytest.mark.parametrize(
    ("kind", "edited", "edit"),
    [
        ("legal", legal_graph.edited, lambda first: setattr(first["MoeDistributeCombineV2"].attr["comm_alg"], "s", b"ring")),
        ("captured", legal_acl.edited, lambda first: first["npu_moe_distribute_combine_v2"].update_kwarg("comm_alg", "ring")),
    ],
    ids=["GE", "captured"],
)
def test_newer_release_is_asked_about_each_graph(running, kind, edited, edit, request):
    """Also one that this version does not know yet, which is held to the newest that it knows."""
    graph = request.getfixturevalue(kind)
    check_running(f"cann-{running}-Ascend910_9391", BUILT, [lambda: graph])
    wrong = edited(graph, edit)
    with pytest.raises(LoweringError, match=r"CANN 9.1 on ascend910_93 does not take .*comm_alg is 'ring'"):
        check_running(f"cann-{running}-Ascend910_9391", BUILT, [lambda: graph, lambda: wrong])

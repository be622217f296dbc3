"""lowering/ascend/legality/check.py: a legal graph passes, and each thing that CANN would refuse is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support import legal_graph
from support.legal_graph import A3, declare, edited

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import parse
from npucompile.lowering.ascend.legality import check
from npucompile.lowering.ascend.legality.table import read, table
from npucompile.lowering.platform import Platform


@pytest.fixture(scope="module")
def legal(tmp_path_factory):
    return legal_graph.legal(tmp_path_factory.mktemp("stubs"))


def test_a_graph_in_documented_forms_is_legal(legal):
    assert check.check(legal, A3) == []
    check.prove(legal, A3)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "attribute value": (
        lambda first: setattr(first["FusedInferAttentionScore"].attr["sparse_mode"], "i", 7),
        r"FusedInferAttentionScore\): sparse_mode is 7; legal are 0, 1, 2, 3, 4, 9",
    ),
    "layout": (
        lambda first: setattr(first["FusedInferAttentionScore"].attr["input_layout"], "s", b"TND"),
        r"heads of query, key and value are 1024, 256 and 256 wide in layout TND; legal are 64, 128, 192",
    ),
    "layout that the device cannot tile": (
        lambda first: setattr(first["FusedInferAttentionScore"].attr["input_layout"], "s", b"TND"),
        r"actual_seq_lengths_kv are? computed in the step in layout TND, which the device cannot tile",
    ),
    "page": (
        lambda first: setattr(first["FusedInferAttentionScore"].attr["block_size"], "i", 96),
        r"block_size is 96; legal is 128 to 512, a multiple of 128",
    ),
    "attribute": (
        lambda first: setattr(first["MoeGatingTopK"].attr["temperature"], "i", 1),
        r"MoeGatingTopK\): has attributes temperature; legal are .*k_group",
    ),
    "attribute type": (
        lambda first: setattr(first["MoeGatingTopK"].attr["k"], "s", b"4"),
        r"k is '4'; legal is a value of type Int",
    ),
    "operator": (
        lambda first: setattr(first["RecurrentGatedDeltaRule"], "type", "RecurrentGatedDeltaRuleV9"),
        r"RecurrentGatedDeltaRuleV9\): the table knows no such operator",
    ),
    "shared communicator": (
        lambda first: setattr(first["MoeDistributeDispatchV2"].attr["group_ep"], "s", b"world"),
        r"MoeDistributeDispatchV2\): shares the communicator 'world' with other collectives; legal is 'dispatch'",
    ),
    "collective in the exchange's communicator": (
        lambda first: setattr(first["HcomAllReduce"].attr["group"], "s", b"dispatch"),
        r"HcomAllReduce\): uses the communicator 'dispatch', which is for expert dispatch and combine alone",
    ),
    "experts": (
        lambda first: setattr(first["MoeDistributeDispatchV2"].attr["moe_expert_num"], "i", 30),
        r"divides 30 experts among 4 ranks; legal is a multiple of the ranks",
    ),
    "algorithm": (
        lambda first: setattr(first["MoeDistributeCombineV2"].attr["comm_alg"], "s", b"ring"),
        r"MoeDistributeCombineV2\): comm_alg is 'ring'; legal are '', 'fullmesh_v1', 'fullmesh_v2', 'hierarchy'",
    ),
    "reduction": (
        lambda first: setattr(first["HcomAllReduce"].attr["reduction"], "s", b"mean"),
        r"reduction is 'mean'; legal are 'sum', 'prod', 'max', 'min'",
    ),
    "dtype": (
        lambda first: declare(first["MoeDistributeDispatchV2"], 1, "DT_BF16", [64]),
        r"GroupedMatmulSwigluQuantV2\): has x=i8, x_scale=bf16, .* legal x/x_scale/.* are i8/f32/",
    ),
    "dynamic shape": (
        lambda first: declare(first["Data"], 0, "DT_BF16", [-1, 1024]),
        r"params.q:0 is bf16\[-1,1024\]; legal are sizes that are known",
    ),
    "width": (
        lambda first: declare(first["HcomAllReduce"], 0, "DT_BF16", [8, 9216]),
        r"x is bf16\[8,9216\]: the hidden size is 9216; legal is 1024 to 8192",
    ),
    "absent input": (
        lambda first: first["MoeGatingTopK"].input.__setitem__(0, ""),
        r"MoeGatingTopK\): lacks x; legal is an operator with x, bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_cann_refuses_is_refused_by_name(legal, kind):
    edit, message = WRONG[kind]
    wrong = edited(legal, edit)
    told = [str(violation) for violation in check.check(wrong, A3)]
    assert any(re.search(message, line) for line in told), told
    with pytest.raises(LoweringError, match=r"CANN 9\.1 on ascend910_93 does not take \d+ operators or options of the graph: "):
        check.prove(wrong, A3)


def test_releases_and_chips_differ(legal):
    """Operators that came later, attributes that came later, and limits of a chip."""
    of_8_3 = " ".join(map(str, check.check(legal, Platform("ascend910_93", "8.3"))))
    assert "nothing is known of it for ascend910_93 under CANN 8.3; legal is ascend910_93 from CANN 8.5" in of_8_3
    assert [v.type for v in check.check(legal, Platform("ascend910_93", "8.5"))] == ["MoeDistributeDispatchV2"]
    assert "legal is an operator without it" in str(check.check(legal, Platform("ascend910_93", "8.5"))[0])
    wide = edited(legal, lambda first: setattr(first["MoeDistributeCombineV2"].attr["comm_alg"], "s", b"fullmesh_v1"))
    assert check.check(wide, A3) == []
    assert "comm_alg is 'fullmesh_v1'; legal are '', 'fullmesh', 'hierarchy'" in str(check.check(wide, Platform("ascend910b", "9.1"))[0])


def test_sizes_of_models_made_small_may_be_left_out(legal):
    small = edited(legal, lambda first: declare(first["HcomAllReduce"], 0, "DT_BF16", [8, 512]))
    with pytest.raises(LoweringError, match="the hidden size is 512"):
        check.prove(small, A3)
    assert all(violation.sizes for violation in check.check(small, A3) if "hidden size" in violation.message)


def test_copies_of_an_operator_are_counted(legal):
    def twice(first: dict[str, Any]) -> None:
        first["MoeGatingTopK"].attr["renorm"].i = 5

    model = parse(edited(legal, twice).graph)
    copy = model.graph[0].op.add()
    original = next(op for op in model.graph[0].op if op.type == "MoeGatingTopK")
    copy.CopyFrom(original)
    copy.name = "another"
    checked = check.examine(replace(legal, graph=model.SerializeToString()), A3)
    assert next(iter(checked.pairs()))[1] == 2
    assert len(checked.violations) == 1
    with pytest.raises(LoweringError, match=r"does not take 2 operators.*renorm is 5; legal are 0 .*\(and 1 more\)"):
        check.prove(replace(legal, graph=model.SerializeToString()), A3)


def test_an_operator_without_facts_is_refused(legal):
    without = read([])
    assert {v.type for v in check.check(legal, A3, without)} >= {"FusedInferAttentionScore", "Cast"}
    assert len(check.check(legal, A3, table())) == 0

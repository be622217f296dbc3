"""lowering/ascend/legality/check.py: legal graphs pass, for GE and captured, and each thing that CANN would refuse is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import legal_acl
from support.legal_acl import of_type
from support.legal_graph import A3, declare, edited, violations
from torch.fx import Node

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Aval, Leaf
from npucompile.lowering.artifact.graph_io import NamedOperator
from npucompile.lowering.ascend.acl_graph import formats
from npucompile.lowering.ascend.ge_file import parse
from npucompile.lowering.ascend.legality import check
from npucompile.lowering.ascend.legality.table import read, table
from npucompile.lowering.platform import Platform

BF16, I32, I8 = torch.bfloat16, torch.int32, torch.int8
PACKAGES = replace(A3, packages=("vllm-ascend",))
First = dict[str, Node]


@pytest.fixture(scope="module")
def with_packages(tmp_path_factory):
    return legal_acl.with_packages(tmp_path_factory.mktemp("stubs"))


def test_graphs_in_documented_forms_are_legal(legal, captured, with_packages):
    for graph in (legal, captured):
        assert violations(graph) == []
        check.prove(graph, A3)
    assert violations(with_packages, PACKAGES) == []


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
    told = [str(violation) for violation in violations(wrong)]
    assert any(re.search(message, line) for line in told), told
    with pytest.raises(LoweringError, match=r"CANN 9\.1 on ascend910_93 does not take \d+ operators or options of the graph: "):
        check.prove(wrong, A3)


def test_releases_and_chips_differ(legal):
    """Operators that came later, attributes that came later, and limits of a chip."""
    of_8_3 = " ".join(map(str, violations(legal, Platform("ascend910_93", "8.3"))))
    assert "nothing is known of it for ascend910_93 under CANN 8.3; legal is ascend910_93 from CANN 8.5" in of_8_3
    assert [v.type for v in violations(legal, Platform("ascend910_93", "8.5"))] == ["MoeDistributeDispatchV2"]
    assert "legal is an operator without it" in str(violations(legal, Platform("ascend910_93", "8.5"))[0])
    wide = edited(legal, lambda first: setattr(first["MoeDistributeCombineV2"].attr["comm_alg"], "s", b"fullmesh_v1"))
    assert violations(wide) == []
    assert "comm_alg is 'fullmesh_v1'; legal are '', 'fullmesh', 'hierarchy'" in str(violations(wide, Platform("ascend910b", "9.1"))[0])


def test_sizes_of_models_made_small_may_be_left_out(legal):
    small = edited(legal, lambda first: declare(first["HcomAllReduce"], 0, "DT_BF16", [8, 512]))
    with pytest.raises(LoweringError, match="the hidden size is 512"):
        check.prove(small, A3)
    assert all(violation.sizes for violation in violations(small) if "hidden size" in violation.message)


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
    assert {v.type for v in violations(legal, facts=without)} >= {"FusedInferAttentionScore", "Cast"}
    assert len(violations(legal, facts=table())) == 0


# --- captured graphs ---


def test_every_operator_that_runs_is_checked(captured):
    """Each kind relies on a row of dtypes: nothing passes because nothing is known of it."""
    relied = {operator for operator, _ in check.examine(captured, A3).relied}
    assert relied >= {
        "FusedInferAttentionScore", "RecurrentGatedDeltaRule", "MoeDistributeDispatchV2", "GroupedMatmulSwigluQuantV2", "GroupedMatmul",
        "aclnnMatmulWeightNz", "aclnnAdd", "aclnnCast", "HcomAllReduce", "ScatterPaKvCache",
    }  # fmt: skip


WRONG_CAPTURED: dict[str, tuple[Callable[[First], None], str]] = {
    "operator": (
        lambda first: setattr(first["npu_moe_gating_top_k"], "target", NamedOperator("npu.npu_moe_gating_top_k_v9.default")),
        r"npu_moe_gating_top_k_v9.default\): the table knows no such operator",
    ),
    "argument": (
        lambda first: first["npu_grouped_matmul"].update_kwarg("activation_input", [first["npu_grouped_matmul"].args[0][0]]),
        r"npu_grouped_matmul.default by GroupedMatmul\): is given activation_input; legal is to leave out",
    ),
    "attribute value": (
        lambda first: first["npu_fused_infer_attention_score"].update_kwarg("sparse_mode", 7),
        r"by FusedInferAttentionScore\): sparse_mode is 7; legal are 0, 1, 2, 3, 4, 9",
    ),
    "reduction": (
        lambda first: first["all_reduce"].update_arg(1, "mean"),
        r"reduction is 'mean'; legal are 'sum', 'prod', 'max', 'min'",
    ),
    "kind of group list": (
        lambda first: first["npu_grouped_matmul"].update_kwarg("group_list_type", 0),
        r"group_list is read as running sums and npu.npu_moe_distribute_dispatch_v2.default writes counts",
    ),
    "dtype of a fused operator": (
        lambda first: of_type(first["inputs.gate"], BF16, 8, 4),
        r"by RecurrentGatedDeltaRule\): has .*g=bf16, .*; legal query/key/value.* are bf16/bf16/bf16/.*f32",
    ),
    "format that is the only one": (
        # Tiles that are not filled leave the weight in ND.
        lambda first: of_type(first["params.up"], I8, 8, 1024, 250),
        r"by GroupedMatmulSwigluQuantV2\): has .*weight=i8, .*legal .*i8:NZ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG_CAPTURED)
def test_what_a_device_refuses_is_refused_by_name(captured, kind):
    edit, message = WRONG_CAPTURED[kind]
    wrong = legal_acl.edited(captured, edit)
    told = [str(violation) for violation in violations(wrong)]
    assert any(re.search(message, line) for line in told), told


def test_a_product_that_cannot_be_captured_with_its_weight_in_nz(captured, monkeypatch):
    """torchair's operator for GE; the captured graph has `mm` in its place."""

    def linear(first: First) -> None:
        product, transposed = first["mm"], first["t"]
        product.target, product.args = NamedOperator("npu.npu_linear.default"), (product.args[0], transposed.args[0])

    wrong = legal_acl.edited(captured, linear)
    assert violations(wrong) == [], "its weight is in ND"
    form = formats.FORMS["npu.npu_linear.default"]
    monkeypatch.setitem(formats.FORMS, form.name, replace(form, weights=((1, "weight"),)))
    (told,) = map(str, violations(wrong))
    assert re.search(r"npu.npu_linear.default by aclnnMm\): has self=bf16, mat2=bf16:NZ, .*legal are .*mat2 of bf16 f16 f32", told)
    assert "cannot be captured" in told


OF_PACKAGES: dict[str, tuple[Callable[[First], None], str]] = {
    "convolution width": (
        lambda first: of_type(first["inputs.weight"], BF16, 3, 512),
        r"by CausalConv1d\): weight is bf16\[3,512\]: the width of the convolution is 3; legal is 4 to 4",
    ),
    "inputs of a slot": (
        lambda first: of_type(first["inputs.state"], BF16, 9, 3, 512),
        r"conv_state is bf16\[9,3,512\] for 2 tokens of a sequence; legal are at least 4 inputs a slot",
    ),
    "states that are a view": (
        lambda first: first["inputs.state"].meta.update(val=torch.empty(512, 5, 9, dtype=BF16, device="meta").permute(2, 1, 0)),
        r"conv_state of .* do not lie side by side; legal is a contiguous tensor",
    ),
    "gates that are a view": (
        lambda first: first["inputs.a"].meta.update(val=torch.empty(8, 8, dtype=BF16, device="meta")[:, :4]),
        r"by fused_gdn_gating_patch\): a of .* do not lie side by side",
    ),
    "dtype": (
        lambda first: of_type(first["inputs.decay"], I32, 4),
        r"has a_log=i32, .*; legal are a_log of bf16 f16 f32",
    ),
    "state": (
        lambda first: of_type(first["inputs.delta"], torch.float16, 9, 4, 128, 128),
        r"_C_ascend.npu_recurrent_gated_delta_rule.default by RecurrentGatedDeltaRule\): has .*state=f16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_PACKAGES)
def test_operators_of_packages_have_restrictions_of_their_own(with_packages, kind):
    edit, message = OF_PACKAGES[kind]
    told = [str(violation) for violation in violations(legal_acl.edited(with_packages, edit), PACKAGES)]
    assert any(re.search(message, line) for line in told), told


def test_operators_of_packages_need_the_package(with_packages):
    told = " ".join(map(str, violations(with_packages)))
    assert "by CausalConv1d): nothing is known of it for ascend910_93 under CANN 9.1; legal is ascend910_93 from CANN 8.3 with" in told
    assert "layer_norm_fwd_npu" in told


def test_aclnn_functions_take_operands_of_different_dtypes_and_not_of_every_one(captured):
    mixed = legal_acl.edited(captured, lambda first: of_type(first["inputs.lens"], I32, 4))
    assert not [violation for violation in violations(mixed) if "aclnnAdd" in violation.type]
    wrong = legal_acl.edited(captured, lambda first: of_type(first["inputs.lens"], torch.uint64, 4))
    told = [str(violation) for violation in violations(wrong) if "aclnnAdd" in violation.type]
    assert re.search(r"aten.add.Tensor by aclnnAdd\): has self=u64, .*; legal are .*self of bf16 bool f16 .*ops-math", told[0]), told


@pytest.mark.parametrize(("path", "full"), [("l0.norm", True), ("l0.ln_1", True), ("l0.ln.weight", True), ("l0.q_up.scale", False)])
def test_a_model_is_as_wide_as_its_norms_whatever_they_are_called_and_not_as_its_scales(path: str, full: bool) -> None:
    """Ranks that have all heads have matrices of many rows, in small models too."""
    matrix = Leaf("l0.q_up.weight", Aval((64, 1536), torch.int8))
    params = [Leaf("l0.input_norm", Aval((64,), torch.bfloat16)), matrix, Leaf(path, Aval((1536,), torch.float32))]
    assert check.has_kernels(params) == full

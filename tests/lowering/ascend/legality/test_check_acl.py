"""lowering/ascend/legality/check_acl.py: a legal captured graph passes, and each thing that a device would refuse is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import legal_acl
from support.legal_acl import edited, of_type
from support.legal_graph import A3
from torch.fx import Node

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.artifact.graph_io import NamedOperator
from npucompile.lowering.ascend.acl_graph import formats
from npucompile.lowering.ascend.legality import check_acl
from npucompile.lowering.platform import Platform

BF16, F32, I32, I8 = torch.bfloat16, torch.float32, torch.int32, torch.int8
PACKAGES = replace(A3, packages=("vllm-ascend",))
First = dict[str, Node]


@pytest.fixture(scope="module")
def legal(tmp_path_factory):
    return legal_acl.legal(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def with_packages(tmp_path_factory):
    return legal_acl.with_packages(tmp_path_factory.mktemp("stubs"))


def test_a_graph_in_documented_forms_is_legal(legal, with_packages):
    assert check_acl.check(legal, A3) == []
    check_acl.prove(legal, A3)
    assert check_acl.check(with_packages, PACKAGES) == []


def test_every_operator_that_runs_is_checked(legal):
    """Each kind relies on a row of dtypes: nothing passes because nothing is known of it."""
    relied = {operator for operator, _ in check_acl.examine(legal, A3).relied}
    assert relied >= {
        "FusedInferAttentionScore", "RecurrentGatedDeltaRule", "MoeDistributeDispatchV2", "GroupedMatmulSwigluQuantV2", "GroupedMatmul",
        "aclnnMatmulWeightNz", "aclnnAdd", "aclnnCast", "HcomAllReduce", "ScatterPaKvCache",
    }  # fmt: skip


WRONG: dict[str, tuple[Callable[[First], None], str]] = {
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
    "layout": (
        lambda first: first["npu_fused_infer_attention_score"].update_kwarg("input_layout", "TND"),
        r"heads of query, key and value are 1024, 256 and 256 wide in layout TND; legal are 64, 128, 192",
    ),
    "page": (
        lambda first: first["npu_fused_infer_attention_score"].update_kwarg("block_size", 96),
        r"block_size is 96; legal is 128 to 512, a multiple of 128",
    ),
    "attribute type": (
        lambda first: setattr(first["npu_moe_gating_top_k"], "args", (first["npu_moe_gating_top_k"].args[0], "4")),
        r"k is '4'; legal is a value of type Int",
    ),
    "shared communicator": (
        lambda first: first["npu_moe_distribute_dispatch_v2"].update_arg(2, "world"),
        r"by MoeDistributeDispatchV2\): shares the communicator 'world' with other collectives; legal is 'dispatch'",
    ),
    "collective in the exchange's communicator": (
        lambda first: first["all_reduce"].update_arg(2, "dispatch"),
        r"all_reduce.default by HcomAllReduce\): uses the communicator 'dispatch', which is for expert dispatch and combine alone",
    ),
    "reduction": (
        lambda first: first["all_reduce"].update_arg(1, "mean"),
        r"reduction is 'mean'; legal are 'sum', 'prod', 'max', 'min'",
    ),
    "algorithm": (
        lambda first: first["npu_moe_distribute_combine_v2"].update_kwarg("comm_alg", "ring"),
        r"comm_alg is 'ring'; legal are '', 'fullmesh_v1', 'fullmesh_v2', 'hierarchy'",
    ),
    "experts": (
        lambda first: first["npu_moe_distribute_dispatch_v2"].update_arg(5, 30),
        r"divides 30 experts among 4 ranks; legal is a multiple of the ranks",
    ),
    "kind of group list": (
        lambda first: first["npu_grouped_matmul"].update_kwarg("group_list_type", 0),
        r"group_list is read as running sums and npu.npu_moe_distribute_dispatch_v2.default writes one count each",
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
    "width": (
        lambda first: of_type(first["npu_moe_distribute_dispatch_v2"].args[0], BF16, 8, 9216),
        r"x is bf16\[8,9216\]: the hidden size is 9216; legal is 1024 to 8192",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_device_refuses_is_refused_by_name(legal, kind):
    edit, message = WRONG[kind]
    wrong = edited(legal, edit)
    told = [str(violation) for violation in check_acl.check(wrong, A3)]
    assert any(re.search(message, line) for line in told), told
    with pytest.raises(LoweringError, match=r"CANN 9\.1 on ascend910_93 does not take \d+ operators or options of the graph: "):
        check_acl.prove(wrong, A3)


def test_a_product_that_cannot_be_captured_with_its_weight_in_nz(legal, monkeypatch):
    """torchair's operator for GE; the captured graph has `mm` in its place."""

    def linear(first: First) -> None:
        product, transposed = first["mm"], first["t"]
        product.target, product.args = NamedOperator("npu.npu_linear.default"), (product.args[0], transposed.args[0])

    wrong = edited(legal, linear)
    assert check_acl.check(wrong, A3) == [], "its weight is in ND"
    form = formats.FORMS["npu.npu_linear.default"]
    monkeypatch.setitem(formats.FORMS, form.name, replace(form, weights=((1, "weight"),)))
    (told,) = map(str, check_acl.check(wrong, A3))
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
    told = [str(violation) for violation in check_acl.check(edited(with_packages, edit), PACKAGES)]
    assert any(re.search(message, line) for line in told), told


def test_operators_of_packages_need_the_package(with_packages):
    told = " ".join(map(str, check_acl.check(with_packages, A3)))
    assert "by CausalConv1d): nothing is known of it for ascend910_93 under CANN 9.1; legal is ascend910_93 from CANN 8.3 with" in told
    assert "layer_norm_fwd_npu" in told


def test_aclnn_functions_take_operands_of_different_dtypes_and_not_of_every_one(legal):
    mixed = edited(legal, lambda first: of_type(first["inputs.lens"], I32, 4))
    assert not [violation for violation in check_acl.check(mixed, A3) if "aclnnAdd" in violation.type]
    wrong = edited(legal, lambda first: of_type(first["inputs.lens"], torch.uint64, 4))
    told = [str(violation) for violation in check_acl.check(wrong, A3) if "aclnnAdd" in violation.type]
    assert re.search(r"aten.add.Tensor by aclnnAdd\): has self=u64, .*; legal are .*self of bf16 bool f16 .*ops-math", told[0]), told


def test_releases_differ(legal):
    of_8_3 = " ".join(map(str, check_acl.check(legal, Platform("ascend910_93", "8.3"))))
    assert "nothing is known of it for ascend910_93 under CANN 8.3; legal is ascend910_93 from CANN 8.5" in of_8_3


def test_copies_of_an_operator_are_one_violation(legal):
    def twice(first: First) -> None:
        router = first["npu_moe_gating_top_k"]
        router.update_kwarg("renorm", 5)
        with router.graph.inserting_after(router):
            copy = router.graph.node_copy(router)
        copy.meta = dict(router.meta)

    wrong = edited(legal, twice)
    body, nodes = wrong.calls[0]
    checked = check_acl.examine(replace(wrong, calls=((body, nodes + 1), *wrong.calls[1:])), A3)
    assert [(violation.message, copies) for violation, copies in checked.pairs()] == [("renorm is 5; legal are 0", 2)]

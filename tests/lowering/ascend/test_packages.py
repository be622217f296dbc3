"""lowering/ascend/packages.py: operators of packages are declared for recording, and a machine without the package says what it lacks."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.operators.table import GROUP_KERNELS, KERNELS
from npucompile.lowering.platform import OPERATOR_PACKAGES


def test_every_package_that_a_platform_may_name_is_here():
    assert set(packages.OPERATORS) == set(OPERATOR_PACKAGES)


def test_declared_operators_record_and_have_a_cpu_kernel():
    packages.declare()
    packages.declare()
    for operator in (operator for operators in packages.OPERATORS.values() for operator in operators):
        namespace, name = operator.name.split("::")
        overload = getattr(getattr(torch.ops, namespace), name).default
        assert str(overload._schema) == operator.name + operator.schema
        assert f"{namespace}.{name}.default" in {**KERNELS, **GROUP_KERNELS}


def test_results_of_the_recurrent_rule_are_like_its_values():
    packages.declare()
    q, v, state = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((5, 2, 6), (5, 4, 3), (9, 4, 3, 6)))
    out = torch.ops._C_ascend.npu_recurrent_gated_delta_rule(q, q, v, state.float(), scale=1.0)
    assert (out.shape, out.dtype) == (v.shape, v.dtype)


def test_a_process_without_the_package_lacks_its_operators():
    packages.declare()
    assert packages.missing(("vllm-ascend",)) == [
        "vllm-ascend: _C_ascend::npu_recurrent_gated_delta_rule",
        "vllm-ascend: _C_ascend::npu_causal_conv1d_custom",
        "vllm-ascend: vllm_ascend.ops.triton.fused_gdn_gating.fused_gdn_gating_patch",
        "vllm-ascend: vllm_ascend.ops.triton.layernorm_gated.layer_norm_fwd_npu",
        "vllm-ascend: _C_ascend::dispatch_ffn_combine",
        "vllm-ascend: vllm_ascend.ops.triton.linearnorm.split_qkv_rmsnorm_mrope.triton_split_qkv_rmsnorm_mrope",
        "vllm-ascend: vllm_ascend.ops.triton.fla.fused_qkvzba_split_reshape.fused_qkvzba_split_reshape_cat_kernel",
    ]
    assert packages.missing(("sgl-kernel-npu",)) == ["sgl-kernel-npu: sgl_kernel_npu.norm.fused_split_qk_norm.fused_split_qk_norm"]
    assert packages.missing(()) == []
    with pytest.raises(LoweringError, match="'xllm' is not known; legal are vllm-ascend, sgl-kernel-npu"):
        packages.missing(("xllm",))


def test_an_artifact_for_packages_is_refused_where_they_are_not_installed(monkeypatch):
    with pytest.raises(LoweringError, match=r"vllm-ascend cannot be imported: No module named 'vllm_ascend'; vllm-ascend: _C_ascend::"):
        packages.load(("vllm-ascend",))
    packages.load(())
    # A package of another release: it can be imported, and has other operators.
    monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm_ascend.vllm_ascend_C", SimpleNamespace())
    with pytest.raises(
        LoweringError, match=r"that this machine lacks: vllm-ascend: _C_ascend::.* or build without them in --operator-packages"
    ):
        packages.load(("vllm-ascend",))

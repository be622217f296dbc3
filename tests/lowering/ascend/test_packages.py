"""lowering/ascend/packages.py: operators are declared for recording, their calls fit the packages, and a machine says what it lacks."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.operators.table import GROUP_KERNELS, KERNELS
from npucompile.lowering.platform import OPERATOR_PACKAGES
from tests.support.vendors import put_vendor


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


def test_a_package_without_kernels_of_the_chip_is_refused(monkeypatch, tmp_path):
    """The wheel vllm_ascend-0.23.0-cp311 registers its operators on an A3 as well, and has kernels of the A2 alone."""
    package = tmp_path / "vllm_ascend"
    put_vendor(package / "_cann_ops_custom" / "vendors" / "custom_transformer", "ascend910b", ["CausalConv1d"])
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "missing", lambda packages: [])
    monkeypatch.setitem(packages.LOAD, "vllm-ascend", lambda: None)
    packages.load(("vllm-ascend",), "ascend910b")
    with pytest.raises(LoweringError, match=r"vllm-ascend at .* has kernels of ascend910b, and this machine has ascend910_93"):
        packages.load(("vllm-ascend",), "ascend910_93")
    # Its kernels are Triton's.
    monkeypatch.setitem(packages.LOAD, "sgl-kernel-npu", lambda: None)
    packages.load(("sgl-kernel-npu",), "ascend910_93")


# --- calls ---

SCHEMA = (
    "npu_causal_conv1d_custom(Tensor output, Tensor x, Tensor weight, Tensor conv_state, Tensor? bias_opt, Tensor? query_start_loc_opt, "
    "Tensor? cache_indices_opt, Tensor? initial_state_mode_opt, Tensor? num_accepted_tokens_opt, int activation_mode, int pad_slot_id, "
    "int run_mode) -> (Tensor output)"
)
"""csrc/torch_binding.cpp of vllm-project/vllm-ascend at 182b75e; as is the next."""

FUSED_SCHEMA = (
    "dispatch_ffn_combine(Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1, Tensor[] scale2, "
    "Tensor[] bias1, Tensor[] bias2, Tensor probs, str group, int max_output_size, Tensor! out, Tensor! expert_token_nums, "
    "Tensor? x_active_mask=None, float swiglu_limit=1000000.0) -> (Tensor out, Tensor expert_token_nums)"
)


@pytest.fixture
def vllm_ascend(monkeypatch):
    """Modules of the package, with functions that are put into them."""

    def put(module: str, **offered) -> None:
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**offered))

    return put


def test_the_convolution_updates_states_with_silu_from_the_accepted_token():
    calls = []

    def run(output, x, weight, conv_state, *options):
        calls.append((x, weight, conv_state, *options))
        return output

    library = torch.library.Library("_C_ascend", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("npu_causal_conv1d_custom", run, "CPU")
    x, weight, state, slots, accepted = (
        torch.ones(2, 3, 16),
        torch.ones(4, 16),
        torch.ones(5, 5, 16),
        torch.tensor([1, 2]),
        torch.tensor([3, 1]),
    )
    out = packages.causal_conv1d_update(x, weight, state, slots, accepted)
    assert (out.shape, out.data_ptr() != x.data_ptr()) == (x.shape, True)
    ((*tensors, bias, starts, at, initial, tokens, activation, padding, mode),) = calls
    assert [t.shape for t in tensors] == [x.shape, weight.shape, state.shape]
    assert (bias, starts, initial, activation, padding, mode) == (None, None, None, 1, -1, 1)
    assert (at.tolist(), tokens.tolist()) == ([1, 2], [3, 1])


@pytest.fixture
def cores(vllm_ascend):
    """Three vector cores, which are known once they were asked for."""
    device = SimpleNamespace(cores=-1)
    vllm_ascend(
        "vllm_ascend.ops.triton.triton_utils",
        init_device_properties_triton=lambda: setattr(device, "cores", 3),
        get_vectorcore_num=lambda: device.cores,
    )
    return device


def test_gates_come_without_the_first_dimension(vllm_ascend, cores):
    def fused_gdn_gating_patch(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
        assert cores.cores == 3
        return (a + A_log)[None], (b + dt_bias)[None]

    vllm_ascend("vllm_ascend.ops.triton.fused_gdn_gating", fused_gdn_gating_patch=fused_gdn_gating_patch)
    g, beta = packages.fused_gdn_gating(torch.full((2,), 10.0), torch.full((3, 2), 1.0), torch.full((3, 2), 2.0), torch.full((2,), 20.0))
    assert (g.tolist(), beta.tolist()) == ([[11.0] * 2] * 3, [[22.0] * 2] * 3)


def test_the_norm_comes_before_the_gate(vllm_ascend):
    def layer_norm_fwd_npu(x, weight, bias, eps, z=None, out=None, group_size=None, norm_before_gate=True, is_rms_norm=False):
        assert (bias, eps, group_size, norm_before_gate, is_rms_norm) == (None, 1e-6, None, True, True)
        return x * weight + z, None, torch.zeros(3)

    vllm_ascend("vllm_ascend.ops.triton.layernorm_gated", layer_norm_fwd_npu=layer_norm_fwd_npu)
    assert packages.rms_norm_gated(torch.ones(3, 2), torch.full((2,), 5.0), torch.full((3, 2), 2.0), 1e-6).tolist() == [[7.0] * 2] * 3


def test_fused_experts_are_one_tensor_a_list_and_clamp_nothing():
    calls = []

    def run(x, weight1, weight2, ids, scale1, scale2, bias1, bias2, probs, group, most, out, counts, mask, limit):
        assert all(len(listed) == 1 for listed in (weight1, weight2, scale1, scale2, bias1, bias2))
        calls.append((weight2[0].shape, scale2[0].shape, group, most, counts.shape, counts.dtype, mask, limit))
        return out.fill_(7), counts

    library = torch.library.Library("_C_ascend", "FRAGMENT")
    library.define(FUSED_SCHEMA)
    library.impl("dispatch_ffn_combine", run, "CPU")
    weights = [torch.ones(shape, dtype=torch.int32) for shape in ((2, 16, 4), (2, 8, 2))]
    scales = [torch.ones(2, width, dtype=torch.int64) for width in (32, 16)]
    x, ids, probs = torch.ones(3, 16), torch.ones(3, 2, dtype=torch.int32), torch.ones(3, 2)
    out = packages.dispatch_ffn_combine_w4a8(x, *weights, ids, *scales, *map(torch.Tensor.float, scales), probs, "hccl", 4, 24)
    assert torch.equal(out, torch.full_like(x, 7))
    assert torch.equal(x, torch.ones(3, 16))
    assert calls == [((2, 8, 2), (2, 16), "hccl", 24, (2,), torch.int32, None, 0.0)]


def test_heads_turn_by_the_angles_of_one_axis(vllm_ascend, cores):
    def triton_split_qkv_rmsnorm_mrope(
        qkv, q_weight, k_weight, cos_sin, num_q_heads, num_kv_heads, head_size, eps, mrope_section, is_interleaved, rope_dim=None,
        q_bias=None, k_bias=None, has_gate=False,
    ):  # fmt: skip
        assert (num_q_heads, num_kv_heads, head_size, eps, mrope_section) == (2, 1, 8, 1e-6, [2, 0, 0])
        assert (is_interleaved, rope_dim, q_bias, k_bias, has_gate, cores.cores) == (False, 4, None, None, True, 3)
        return qkv[:, :16], k_weight, q_weight, cos_sin

    vllm_ascend("vllm_ascend.ops.triton.linearnorm.split_qkv_rmsnorm_mrope", triton_split_qkv_rmsnorm_mrope=triton_split_qkv_rmsnorm_mrope)
    q, k, *_ = packages.split_qkv_rmsnorm_rope(torch.ones(3, 48), torch.zeros(8), torch.ones(8), torch.ones(3, 4), 2, 1, 1e-6)
    assert (q.shape, k.tolist()) == ((3, 16), [1.0] * 8)


@pytest.mark.parametrize(
    ("rows", "dtype", "grid", "a_core", "at_once"),
    [(7, torch.float32, 3, 3, 3), (2, torch.bfloat16, 2, 1, 1), (9000, torch.bfloat16, 3, 3000, 64)],
)
def test_a_projection_is_split_with_the_strides_of_its_rows(vllm_ascend, cores, rows, dtype, grid, a_core, at_once):
    """A kernel that does what the package's does with its arguments: every row of one head, at the strides it is given."""

    class Kernel:
        def __getitem__(self, launched):
            assert launched == (grid, 1)
            return self

        def __call__(self, qkv, z, b, a, mixed, ba, heads_qk, heads_v, qk, v, total, per_core, *strides):
            assert (heads_qk, heads_v, qk, v, total, per_core, strides[-1]) == (1, 2, 4, 8, rows, a_core, at_once)
            at = torch.arange(total)[:, None]

            def move(target, source, to, fro, first, at_target, size):
                wanted = torch.arange(size)
                flat = source.as_strided((source.untyped_storage().nbytes() // source.element_size() - source.storage_offset(),), (1,))
                target.view(-1)[at * to + at_target + wanted] = flat[at * fro + first + wanted]

            mixed_stride, ba_stride, qkv_stride, z_stride, out_stride, _ = strides
            for first, size in ((0, qk), (qk, qk), (2 * qk, heads_v * v)):
                move(qkv, mixed, qkv_stride, mixed_stride, first, first, size)
            move(z, mixed, z_stride, mixed_stride, 2 * qk + heads_v * v, 0, heads_v * v)
            move(b, ba, out_stride, ba_stride, 0, 0, heads_v)
            move(a, ba, out_stride, ba_stride, heads_v, 0, heads_v)

    vllm_ascend("vllm_ascend.ops.triton.fla.fused_qkvzba_split_reshape", fused_qkvzba_split_reshape_cat_kernel=Kernel())
    x = torch.randn(rows, 2 * 4 + 4 * 8 + 4).to(dtype)
    for got, want in zip(packages.split_qkvzba(x, 4, 8, 2), x.split([24, 16, 2, 2], 1), strict=True):
        assert torch.equal(got, want)


def test_norms_of_queries_and_keys_are_weights_alone(monkeypatch):
    def fused_split_qk_norm(fused, q_a_layernorm, kv_a_layernorm, q_lora_rank, kv_lora_rank, qk_rope_dim, eps=1e-6):
        assert not hasattr(q_a_layernorm, "bias")
        assert (q_lora_rank, kv_lora_rank, qk_rope_dim, eps) == (2, 4, 8, 1e-8)
        return fused[:, :2] * q_a_layernorm.weight, (fused[:, 2:6] * kv_a_layernorm.weight).unsqueeze(1), fused[:, 6:].unsqueeze(1)

    monkeypatch.setitem(sys.modules, "sgl_kernel_npu.norm.fused_split_qk_norm", SimpleNamespace(fused_split_qk_norm=fused_split_qk_norm))
    q, k, rest = packages.split_qk_norm(torch.ones(3, 14), torch.full((2,), 2.0), torch.full((4,), 4.0), 1e-8)
    assert (q.tolist(), k.tolist(), rest.shape) == ([[2.0] * 2] * 3, [[4.0] * 4] * 3, (3, 8))

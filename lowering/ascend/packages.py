"""Operators that lowerings use from packages beside CANN: their schemas, and which of them this process has kernels for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...graphs.errors import LoweringError
from . import package_functions as functions


@dataclass(frozen=True)
class Operator:
    """An operator of a package.

    Attributes:
        name: of the operator in torch, with its namespace.
        schema: without the name, as the package registers it.
        meta: results of meta operands.
        source: file that registers it, and its commit.
        function: what runs it, where the package has no such operator (package_functions.py): we register it as one of NAMESPACE.
        calls: the operator or function of the package that it calls.
        kernel: finds that function; None where it is an operator.
    """

    name: str
    schema: str
    meta: Callable[..., Any]
    source: str
    function: Callable[..., Any] | None = None
    calls: str = ""
    kernel: Callable[[], Any] | None = None


def _like_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _like(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _gates(a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(a.shape, dtype=torch.float32, device=a.device), _like(b)


def _heads(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    q, kv = (heads * q_weight.shape[0] for heads in (q_heads, kv_heads))
    return _parts(qkv, (q, kv, kv, q))


def _split(x: torch.Tensor, key_width: int, value_width: int, value_heads: int) -> tuple[torch.Tensor, ...]:
    values = value_heads * value_width
    return _parts(x, (2 * key_width + values, values, value_heads, value_heads))


def _qk_norm(x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return _parts(x, (len(q_weight), len(k_weight), x.shape[1] - len(q_weight) - len(k_weight)))


def _parts(x: torch.Tensor, widths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device) for width in widths)


NAMESPACE = "npucompile_packages"
"""Of the operators that we register for functions of packages."""

OPERATORS: Mapping[str, tuple[Operator, ...]] = {
    "vllm-ascend": (
        Operator(
            "_C_ascend::npu_recurrent_gated_delta_rule",
            "(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, float? scale=None, "
            "Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None, "
            "Tensor? gk=None) -> Tensor",
            _like_value,
            "vllm-project/vllm-ascend@182b75e csrc/torch_binding.cpp",
        ),
        Operator(
            f"{NAMESPACE}::causal_conv1d_update",
            "(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor cache_indices, Tensor num_accepted_tokens) -> Tensor",
            _like,
            "vllm-project/vllm-ascend@182b75e csrc/torch_binding.cpp, csrc/moe/causal_conv1d",
            functions.causal_conv1d_update,
            "_C_ascend::npu_causal_conv1d_custom",
        ),
        Operator(
            f"{NAMESPACE}::fused_gdn_gating",
            "(Tensor a_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
            _gates,
            "vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/fused_gdn_gating.py",
            functions.fused_gdn_gating,
            "vllm_ascend.ops.triton.fused_gdn_gating.fused_gdn_gating_patch",
            functions.gating_kernel,
        ),
        Operator(
            f"{NAMESPACE}::rms_norm_gated",
            "(Tensor x, Tensor weight, Tensor z, float eps) -> Tensor",
            _like,
            "vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/layernorm_gated.py",
            functions.rms_norm_gated,
            "vllm_ascend.ops.triton.layernorm_gated.layer_norm_fwd_npu",
            functions.norm_kernel,
        ),
        Operator(
            f"{NAMESPACE}::dispatch_ffn_combine_w4a8",
            "(Tensor x, Tensor weight1, Tensor weight2, Tensor expert_idx, Tensor scale1, Tensor scale2, Tensor bias1, Tensor bias2, "
            "Tensor probs, str group, int ranks, int max_output_size) -> Tensor",
            _like,
            "vllm-project/vllm-ascend@182b75e csrc/torch_binding.cpp, csrc/mc2/dispatch_ffn_combine_w4_a8",
            functions.dispatch_ffn_combine_w4a8,
            "_C_ascend::dispatch_ffn_combine",
        ),
        Operator(
            f"{NAMESPACE}::split_qkv_rmsnorm_rope",
            "(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, int q_heads, int kv_heads, float eps) -> "
            "(Tensor, Tensor, Tensor, Tensor)",
            _heads,
            "vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/linearnorm/split_qkv_rmsnorm_mrope.py",
            functions.split_qkv_rmsnorm_rope,
            "vllm_ascend.ops.triton.linearnorm.split_qkv_rmsnorm_mrope.triton_split_qkv_rmsnorm_mrope",
            functions.heads_kernel,
        ),
        Operator(
            f"{NAMESPACE}::split_qkvzba",
            "(Tensor x, int key_width, int value_width, int value_heads) -> (Tensor, Tensor, Tensor, Tensor)",
            _split,
            "vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/fla/fused_qkvzba_split_reshape.py",
            functions.split_qkvzba,
            "vllm_ascend.ops.triton.fla.fused_qkvzba_split_reshape.fused_qkvzba_split_reshape_cat_kernel",
            functions.split_kernel,
        ),
    ),
    # Others of its kernels keep one slot of convolution inputs a request, or states in bfloat16 (recurrent_gated_delta_rule), or take
    # float16 and buffers that the host sizes (mega_chunk_gdn); its fused experts are int8 (fused_deep_moe and dispatch_ffn_combine of
    # deep_ep).
    "sgl-kernel-npu": (
        Operator(
            f"{NAMESPACE}::split_qk_norm",
            "(Tensor x, Tensor q_weight, Tensor k_weight, float eps) -> (Tensor, Tensor, Tensor)",
            _qk_norm,
            "sgl-project/sgl-kernel-npu@f425bdf python/sgl_kernel_npu/sgl_kernel_npu/norm/fused_split_qk_norm.py",
            functions.split_qk_norm,
            "sgl_kernel_npu.norm.fused_split_qk_norm.fused_split_qk_norm",
            functions.qk_norm_kernel,
        ),
    ),
}
"""Package -> operators that graphs lowered for it call."""

_LOAD: Mapping[str, Callable[[], None]] = {
    "vllm-ascend": functions.load_vllm_ascend,
    "sgl-kernel-npu": functions.load_sgl_kernel_npu,
}

_LIBRARIES: dict[str, torch.library.Library] = {}


def declare() -> None:
    """Declares operators whose package this process has not loaded, so that graphs can be recorded; a second call changes nothing.

    A process that runs on a device loads its packages first: each defines its operators itself.
    """
    for operators in OPERATORS.values():
        for operator in operators:
            namespace, _, name = operator.name.partition("::")
            if torch._C._dispatch_has_kernel(operator.name) or hasattr(getattr(torch.ops, namespace), name):
                continue
            library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
            library.define(name + operator.schema)
            library.impl(name, operator.meta, "Meta")
            if operator.function is not None:
                library.impl(name, operator.function, "PrivateUse1")


def load(packages: Iterable[str]) -> None:
    """Loads the packages into this process, whose operators run on its NPUs.

    Raises:
        LoweringError: a package is not installed, or lacks an operator; it names what is lacking.
    """
    packages, reasons = tuple(packages), []
    for package in packages:
        try:
            _LOAD.get(package, lambda: None)()
        except (ImportError, OSError) as error:
            reasons.append(f"{package} cannot be imported: {error}")
    # Behind the imports, which define the packages' own operators.
    declare()
    if lacking := reasons + missing(packages):
        raise LoweringError(
            f"the artifact was built for operator packages that this machine lacks: {'; '.join(lacking)}; install them, or build without"
            " them in --operator-packages"
        )


def missing(packages: Iterable[str]) -> list[str]:
    """Operators of the packages that this process has no kernel of an NPU for, as `package: operator`.

    Raises:
        LoweringError: there is no such package.
    """
    lacking = []
    for package in packages:
        if package not in OPERATORS:
            raise LoweringError(f"operator package {package!r} is not known; legal are {', '.join(OPERATORS)}")
        lacking += [f"{package}: {operator.calls or operator.name}" for operator in OPERATORS[package] if not _is_there(operator)]
    return lacking


def _is_there(operator: Operator) -> bool:
    if operator.kernel is None:
        name = operator.calls or operator.name
        return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")
    try:
        return callable(operator.kernel())
    except (ImportError, OSError, AttributeError):
        return False

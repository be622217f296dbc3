"""Operators that lowerings use from packages beside CANN: their schemas, what runs them on an NPU, and which of them a process has."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ...graphs.errors import LoweringError
from .vendors import check_kernels

NAMESPACE = "npucompile_packages"
"""Of the operators that we register for functions of packages."""


@dataclass(frozen=True)
class PackageOperator:
    """An operator of a package.

    Attributes:
        name: of the operator in torch, with its namespace.
        schema: without the name, as the package registers it.
        meta: results of meta operands.
        source: file that registers it, and its commit.
        function: what runs it on an NPU, where the package has no such operator, or one that does not say what it writes: we register it
            as one of NAMESPACE.
        calls: what that calls: an operator of torch (`namespace::name`), or a function by its module.
    """

    name: str
    schema: str
    meta: Callable[..., Any]
    source: str
    function: Callable[..., Any] | None = None
    calls: str = ""


def _like(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _parts(widths: Callable[..., Sequence[int]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Results with the rows of the first operand, and widths that follow from all."""
    return lambda x, *rest: tuple(torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device) for width in widths(x, *rest))


def split_widths(key_width: int, value_width: int, value_heads: int) -> tuple[int, int, int, int]:
    """Widths of the parts of a projection for a key head: queries, keys and values; z; b; a."""
    values = value_heads * value_width
    return 2 * key_width + values, values, value_heads, value_heads


def _found(path: str) -> Any:
    """A function of a package; imports its module when it is called first, which `load` has imported before."""
    module, _, name = path.rpartition(".")
    package, _, inner = module.partition(".")
    if package == "vllm_ascend":
        return getattr(importlib.import_module(f"vllm_ascend.{inner}"), name)
    return getattr(importlib.import_module(f"sgl_kernel_npu.{inner}"), name)


_TRITON = "vllm_ascend.ops.triton"
_GATES = f"{_TRITON}.fused_gdn_gating.fused_gdn_gating_patch"
_NORM = f"{_TRITON}.layernorm_gated.layer_norm_fwd_npu"
_HEADS = f"{_TRITON}.linearnorm.split_qkv_rmsnorm_mrope.triton_split_qkv_rmsnorm_mrope"
_SPLIT = f"{_TRITON}.fla.fused_qkvzba_split_reshape.fused_qkvzba_split_reshape_cat_kernel"
_QK_NORM = "sgl_kernel_npu.norm.fused_split_qk_norm.fused_split_qk_norm"


def _vector_cores() -> int:
    """Vector cores of the current device, which the package's Triton functions ask for: its own worker does this when it starts.

    Source: vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/triton_utils.py.
    """
    utils = importlib.import_module("vllm_ascend.ops.triton.triton_utils")
    utils.init_device_properties_triton()
    cores: int = utils.get_vectorcore_num()
    return cores


def causal_conv1d_update(
    x: torch.Tensor, weight: torch.Tensor, conv_state: torch.Tensor, cache_indices: torch.Tensor, num_accepted_tokens: torch.Tensor
) -> torch.Tensor:
    """`npu_causal_conv1d_custom` of vllm-ascend, whose schema says neither that it writes its output nor that it writes the states."""
    return torch.ops._C_ascend.npu_causal_conv1d_custom(  # type: ignore[no-any-return]
        torch.empty_like(x), x, weight, conv_state, None, None, cache_indices, None, num_accepted_tokens, 1, -1, 1
    )


def fused_gdn_gating(a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A Triton kernel of vllm-ascend; its results have a first dimension of 1."""
    _vector_cores()
    g, beta = _found(_GATES)(a_log, a, b, dt_bias)
    return g[0], beta[0]


def rms_norm_gated(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, eps: float) -> torch.Tensor:
    """A Triton kernel of vllm-ascend, norm before gate."""
    out: torch.Tensor = _found(_NORM)(x, weight, None, eps, z=z, norm_before_gate=True, is_rms_norm=True)[0]
    return out


def dispatch_ffn_combine_w4a8(
    x: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    expert_idx: torch.Tensor,
    scale1: torch.Tensor,
    scale2: torch.Tensor,
    bias1: torch.Tensor,
    bias2: torch.Tensor,
    probs: torch.Tensor,
    group: str,
    ranks: int,
    max_output_size: int,
) -> torch.Tensor:
    """`dispatch_ffn_combine` of vllm-ascend, whose results do not say that they are operands; it finds the number of ranks by the group.

    A `swiglu_limit` of 0 clamps nothing. Without a mask of active tokens the kernel leaves `expert_idx` as it is.
    """
    out, counts = torch.empty_like(x), torch.empty(weight1.shape[0], dtype=torch.int32, device=x.device)
    lists = ([tensor] for tensor in (scale1, scale2, bias1, bias2))
    torch.ops._C_ascend.dispatch_ffn_combine(
        x, [weight1], [weight2], expert_idx, *lists, probs, group, max_output_size, out, counts, x_active_mask=None, swiglu_limit=0.0
    )
    return out


def split_qkv_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Triton kernel of vllm-ascend; all angles are those of its first position axis."""
    _vector_cores()
    rotated = cos_sin.shape[1]
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _found(_HEADS)(
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        q_heads,
        kv_heads,
        q_weight.shape[0],
        eps,
        [rotated // 2, 0, 0],
        False,
        rope_dim=rotated,
        has_gate=True,
    )
    return out


def split_qkvzba(
    x: torch.Tensor, key_width: int, value_width: int, value_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Triton kernel of vllm-ascend, whose function takes two projections; their rows may as well lie in one, as far apart as its rows.

    Launched as that function does for one key head a row (vllm_ascend/ops/triton/fla/fused_qkvzba_split_reshape.py at 182b75e).
    """
    rows, width = x.shape
    widths = split_widths(key_width, value_width, value_heads)
    qkv, z, b, a = (torch.empty(rows, part, dtype=x.dtype, device=x.device) for part in widths)
    cores = max(1, min(_vector_cores(), rows))
    a_core = -(-rows // cores)
    # Its unified buffer holds 85 KiB of rows, read and written.
    at_once = 1 << (max(1, 85 * 1024 // x.element_size() // (2 * width)) - 1).bit_length()
    _found(_SPLIT)[(cores, 1)](
        qkv,
        z,
        b,
        a,
        x,
        x[:, width - 2 * value_heads :],
        1,
        value_heads,
        key_width,
        value_width,
        rows,
        a_core,
        width,
        width,
        widths[0],
        widths[1],
        widths[2],
        min(at_once, a_core, 64),
    )
    return qkv, z, b, a


def split_qk_norm(
    x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Triton kernel of sgl-kernel-npu, which takes weights as the norms of latent attention and puts a dimension into two results."""
    q_norm, k_norm = SimpleNamespace(weight=q_weight), SimpleNamespace(weight=k_weight)
    widths = len(q_weight), len(k_weight), x.shape[1] - len(q_weight) - len(k_weight)
    q, k, rest = _found(_QK_NORM)(x, q_norm, k_norm, *widths, eps)
    return q, k.squeeze(1), rest.squeeze(1)


OPERATORS: Mapping[str, tuple[PackageOperator, ...]] = {
    "vllm-ascend": (
        PackageOperator(
            "_C_ascend::npu_recurrent_gated_delta_rule",
            "(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, float? scale=None, "
            "Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None, "
            "Tensor? gk=None) -> Tensor",
            lambda query, key, value, *rest, **options: _like(value),
            "vllm-project/vllm-ascend@182b75e csrc/torch_binding.cpp",
        ),
        PackageOperator(
            f"{NAMESPACE}::causal_conv1d_update",
            "(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor cache_indices, Tensor num_accepted_tokens) -> Tensor",
            _like,
            "vllm-project/vllm-ascend@182b75e csrc/torch_binding.cpp, csrc/moe/causal_conv1d",
            causal_conv1d_update,
            "_C_ascend::npu_causal_conv1d_custom",
        ),
        PackageOperator(
            f"{NAMESPACE}::fused_gdn_gating",
            "(Tensor a_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
            lambda a_log, a, b, dt_bias: (_like(a.float()), _like(b)),
            "vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/fused_gdn_gating.py",
            fused_gdn_gating,
            _GATES,
        ),
        PackageOperator(
            f"{NAMESPACE}::rms_norm_gated",
            "(Tensor x, Tensor weight, Tensor z, float eps) -> Tensor",
            _like,
            "vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/layernorm_gated.py",
            rms_norm_gated,
            _NORM,
        ),
        PackageOperator(
            f"{NAMESPACE}::dispatch_ffn_combine_w4a8",
            "(Tensor x, Tensor weight1, Tensor weight2, Tensor expert_idx, Tensor scale1, Tensor scale2, Tensor bias1, Tensor bias2, "
            "Tensor probs, str group, int ranks, int max_output_size) -> Tensor",
            _like,
            "vllm-project/vllm-ascend@182b75e csrc/torch_binding.cpp, csrc/mc2/dispatch_ffn_combine_w4_a8",
            dispatch_ffn_combine_w4a8,
            "_C_ascend::dispatch_ffn_combine",
        ),
        PackageOperator(
            f"{NAMESPACE}::split_qkv_rmsnorm_rope",
            "(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, int q_heads, int kv_heads, float eps) -> "
            "(Tensor, Tensor, Tensor, Tensor)",
            _parts(lambda qkv, q, k, cos_sin, q_heads, kv_heads, eps: [n * len(q) for n in (q_heads, kv_heads, kv_heads, q_heads)]),
            "vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/linearnorm/split_qkv_rmsnorm_mrope.py",
            split_qkv_rmsnorm_rope,
            _HEADS,
        ),
        PackageOperator(
            f"{NAMESPACE}::split_qkvzba",
            "(Tensor x, int key_width, int value_width, int value_heads) -> (Tensor, Tensor, Tensor, Tensor)",
            _parts(lambda x, *sizes: split_widths(*sizes)),
            "vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/fla/fused_qkvzba_split_reshape.py",
            split_qkvzba,
            _SPLIT,
        ),
    ),
    # Others of its kernels keep one slot of convolution inputs a request, or states in bfloat16 (recurrent_gated_delta_rule), or take
    # float16 and buffers that the host sizes (mega_chunk_gdn); its fused experts are int8 (fused_deep_moe and dispatch_ffn_combine of
    # deep_ep).
    "sgl-kernel-npu": (
        PackageOperator(
            f"{NAMESPACE}::split_qk_norm",
            "(Tensor x, Tensor q_weight, Tensor k_weight, float eps) -> (Tensor, Tensor, Tensor)",
            _parts(lambda x, q, k, eps: (len(q), len(k), x.shape[1] - len(q) - len(k))),
            "sgl-project/sgl-kernel-npu@f425bdf python/sgl_kernel_npu/sgl_kernel_npu/norm/fused_split_qk_norm.py",
            split_qk_norm,
            _QK_NORM,
        ),
    ),
}
"""Package -> operators that graphs lowered for it call."""

# vllm_ascend/utils.py of vllm-project/vllm-ascend@182b75e (enable_custom_op); python/sgl_kernel_npu/sgl_kernel_npu/__init__.py of
# sgl-project/sgl-kernel-npu@f425bdf.
LOAD: Mapping[str, Callable[[], Any]] = {
    "vllm-ascend": lambda: importlib.import_module("vllm_ascend.vllm_ascend_C"),
    "sgl-kernel-npu": lambda: importlib.import_module("sgl_kernel_npu"),
}
"""Package -> imports the module that registers its operators."""

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


def load(packages: Iterable[str], chip: str = "") -> None:
    """Loads the packages into this process, whose operators run on its NPUs.

    Args:
        chip: of these, as CANN's operator definitions name it; "" where it is not known, and kernels are not looked for.

    Raises:
        LoweringError: a package is not installed, or lacks an operator or the chip's kernels; it names what is lacking.
    """
    packages, reasons = tuple(packages), []
    for package in packages:
        try:
            LOAD.get(package, lambda: None)()
        except (ImportError, OSError) as error:
            reasons.append(f"{package} cannot be imported: {error}")
    # Behind the imports, which define the packages' own operators.
    declare()
    if lacking := reasons + missing(packages):
        raise LoweringError(
            f"the artifact was built for operator packages that this machine lacks: {'; '.join(lacking)}; install them, or build without"
            " them in --operator-packages"
        )
    for package in packages if chip else ():
        # Triton's kernels are compiled where they run.
        if any("::" in (operator.calls or operator.name) for operator in OPERATORS[package]):
            check_kernels(package, Path(str(resources.files(package.replace("-", "_")))), chip)


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


def _is_there(operator: PackageOperator) -> bool:
    name = operator.calls or operator.name
    if "::" in name:
        return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")
    try:
        return callable(_found(name))
    except (ImportError, OSError, AttributeError):
        return False

"""Operators that lowerings use from packages beside CANN: their schemas, and which of them this process has kernels for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...graphs.errors import LoweringError


@dataclass(frozen=True)
class Operator:
    """An operator of a package.

    Attributes:
        name: of the operator in torch, with its namespace.
        schema: without the name, as the package registers it.
        meta: results of meta operands.
        source: file that registers it, and its commit.
    """

    name: str
    schema: str
    meta: Callable[..., Any]
    source: str


def _like_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


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
    ),
    # Its kernels keep one slot of convolution inputs a request, or take float16 and buffers that the host sizes (mega_chunk_gdn).
    "sgl-kernel-npu": (),
}
"""Package -> operators that graphs lowered for it call."""

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


def missing(packages: Iterable[str]) -> list[str]:
    """Operators of the packages that this process has no kernel of an NPU for, as `package: operator`.

    Raises:
        LoweringError: there is no such package.
    """
    lacking = []
    for package in packages:
        if package not in OPERATORS:
            raise LoweringError(f"operator package {package!r} is not known; legal are {', '.join(OPERATORS)}")
        for operator in OPERATORS[package]:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name, "PrivateUse1"):
                lacking.append(f"{package}: {operator.name}")
    return lacking

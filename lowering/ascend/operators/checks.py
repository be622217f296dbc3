"""Conventions that the CPU kernels share: undefined rows, dtype numbers, int8 rounding, packed int4."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDICES = (torch.int32, torch.int64)
# c10::ScalarType numbers: a torch.dtype becomes one in an `int?` argument of a schema.
DTYPE_NUMBERS = {1: torch.int8, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def require(op: str, name: str, value: torch.Tensor | None, dtypes: Sequence[torch.dtype], dims: Sequence[int] = ()) -> torch.Tensor:
    """The operand itself.

    Raises:
        LoweringError: naming operator, operand and what is legal, when it is absent or of another dtype or rank.
    """
    wanted = f"legal is a tensor of {[str(d) for d in dtypes]}" + (f" with {list(dims)} dimensions" if dims else "")
    if value is None:
        raise LoweringError(f"{op}: {name} is absent; {wanted}")
    if value.dtype not in dtypes or (dims and value.dim() not in dims):
        raise LoweringError(f"{op}: {name} is {tuple(value.shape)} {value.dtype}; {wanted}")
    return value


def require_shape(op: str, name: str, value: torch.Tensor, shape: Sequence[int]) -> None:
    """Refuses another shape.

    Raises:
        LoweringError: naming both shapes.
    """
    if tuple(value.shape) != tuple(shape):
        raise LoweringError(f"{op}: {name} is {tuple(value.shape)}; the other operands make {tuple(shape)} legal")


def refuse_options(op: str, options: Mapping[str, Any], **legal: Any) -> None:
    """Refuses options that these kernels do not implement.

    Args:
        options: arguments of the call that its kernel does not read.
        legal: the one value an option may have besides None, 0, False and empty.

    Raises:
        LoweringError: naming the option, its value and the legal one.
    """
    for name, value in options.items():
        plain = value is None or (isinstance(value, int | float | str | list | tuple) and not value)
        if not plain and not (name in legal and value == legal[name]):
            shown = f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise LoweringError(f"{op}: {name}={shown} has no CPU kernel; legal is {legal.get(name)!r}")


def dtype_of(op: str, number: int | torch.dtype | None) -> torch.dtype:
    """The dtype behind an `output_dtype`.

    Raises:
        LoweringError: when it is absent or unknown.
    """
    if isinstance(number, torch.dtype):
        return number
    if number not in DTYPE_NUMBERS:
        raise LoweringError(f"{op}: output_dtype is {number}; legal is a number of {DTYPE_NUMBERS}")
    return DTYPE_NUMBERS[number]


def undefined(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that the real kernel leaves unwritten: NaN, or the lowest integer, so that whoever reads them shows in the results."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype)


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest even, saturates; NaN becomes -128, the undefined int8."""
    return torch.where(x.isnan(), -128.0, x.round().clamp(-128, 127)).to(torch.int8)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row: f32 [..., K] -> int8 [..., K] and f32 [...] with x ~ q * t, t = max|x| / 127; zero rows get t = 0."""
    scale = x.abs().amax(-1) / 127
    return to_int8(x / torch.where(scale == 0, 1.0, scale)[..., None]), scale


def int_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Exact integer product as f64: int8 [..., M, K] by int8 [..., K, N]; 2**39 terms still fit."""
    return x.double() @ w.double()


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int32 [..., N/8] -> int8 [..., N] in -8..7: eight signed nibbles a word, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed[..., None] >> shifts) & 15
    return torch.where(nibbles > 7, nibbles - 16, nibbles).to(torch.int8).flatten(-2)


def float_scale(scale: torch.Tensor) -> torch.Tensor:
    """A scale as f32; int64 and uint64 hold the bits of an f32, extended by zeros."""
    bits = scale.view(torch.int64) if scale.dtype == torch.uint64 else scale
    return bits.to(torch.int32).view(torch.float32) if bits.dtype == torch.int64 else scale.float()


def group_bounds(op: str, group_list: torch.Tensor | None, kind: int, groups: int, rows: int) -> list[tuple[int, int]]:
    """First and last+1 row of each group.

    Args:
        group_list: int64 [E]: counts, which are kind 1.
        groups: E of the weights.
        rows: M of the activations; rows beyond the last group are undefined.

    Raises:
        LoweringError: when the groups are of another number or do not fit the rows.
    """
    sizes = require(op, "group_list", group_list, (torch.int64,), (1,))
    require_shape(op, "group_list", sizes, (groups,))
    if kind != 1:
        raise LoweringError(f"{op}: group_list_type is {kind}; legal is 1 (counts)")
    ends = [0, *sizes.cumsum(0).tolist()]
    bounds = list(itertools.pairwise(ends))
    if ends[-1] > rows or any(low > high for low, high in bounds):
        raise LoweringError(f"{op}: groups {bounds} do not fit {rows} rows in rising order")
    return bounds


def signed(scale: torch.Tensor) -> torch.Tensor:
    """A scale as int64, the dtype that the kernels have for its 64 bits."""
    return scale.view(torch.int64) if scale.dtype == torch.uint64 else scale

"""Which dtype a build computes in."""

from __future__ import annotations

import torch

from ...graphs.errors import SpecError
from .targets import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_dtype(requested: str, target: Target) -> tuple[torch.dtype, str | None]:
    """The dtype to compute in, and the reason if it was chosen among several."""
    if requested not in ("auto", *DTYPES):
        raise SpecError(f"dtype is {requested!r}; legal are {', '.join(('auto', *DTYPES))}")
    if requested != "auto" and requested not in target.dtypes:
        legal = " and ".join(("auto", *target.dtypes))
        raise SpecError(f"--dtype {requested} for {target.name}: its fused operators take {', '.join(target.dtypes)}; legal are {legal}")
    if requested != "auto" or len(target.dtypes) == 1:
        return DTYPES[target.dtypes[0] if requested == "auto" else requested], None
    if torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16, "dtype bfloat16: this CPU multiplies it in hardware (--dtype to change)"
    return torch.float32, "dtype float32: this CPU has no bfloat16 arithmetic (--dtype to change)"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype on the command line."""
    return next(name for name, kind in DTYPES.items() if kind == dtype)

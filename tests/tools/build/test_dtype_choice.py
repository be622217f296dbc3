"""tools/build/dtype_choice.py: the dtype that a CPU multiplies, unless a user says otherwise."""

from __future__ import annotations

import pytest
import torch

from npucompile.tools.build.dtype_choice import choose_dtype, dtype_name
from npucompile.tools.build.targets import target


@pytest.mark.parametrize(("hardware", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_the_dtype_the_cpu_multiplies(monkeypatch, hardware, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: hardware)
    chosen, why = choose_dtype("auto", target("cpu"))
    assert chosen == dtype
    assert f"dtype {dtype_name(dtype)}" in why
    assert choose_dtype("float32", target("cpu")) == (torch.float32, None)

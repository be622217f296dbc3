"""lowering/cuda/torch_cuda.py: what is said where torch has no CUDA, or the machine no GPU; a GPU itself is needed for the rest."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering import device
from npucompile.lowering.cuda.torch_cuda import Cuda, TorchCuda, missing


def test_it_has_all_that_the_device_asks_for() -> None:
    for name, member in inspect.getmembers(Cuda, inspect.isfunction):
        if not name.startswith("_"):
            assert list(inspect.signature(getattr(TorchCuda, name)).parameters) == list(inspect.signature(member).parameters), name


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = missing()
    assert reason == device.missing("cuda")
    assert reason is not None
    assert reason.startswith(f"torch {torch.__version__} has no CUDA; install torch {torch.__version__.partition('+')[0]} ")
    with pytest.raises(LoweringError, match=re.escape(reason)):
        device.open_device("cuda")


def test_a_driver_without_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "is built for CUDA 13.0, and the driver shows no GPU" in str(missing())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(LoweringError, match=r"there is no cuda:2: this process sees 2 GPUs; legal is 0 to 1"):
        TorchCuda(2)

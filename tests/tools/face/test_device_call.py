"""tools/face/device_call.py: a function runs behind the interface of a device, as an NPU has it, and says what torch says."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import npucompile as npc
from npucompile.graphs.errors import LoweringError, SpecError
from npucompile.lowering.device import EMULATED
from npucompile.tools.face import stages
from npucompile.tools.face.device_call import DeviceCall

F32 = torch.float32

pytestmark = pytest.mark.usefixtures("face_home")


def affine(x: torch.Tensor, w: torch.Tensor, unread: torch.Tensor) -> Any:
    return {"y": x @ w, "sum": x.sum(-1)}


def compiled(backend: str) -> Any:
    avals = npc.Aval((4, 6), F32), npc.Aval((6, 2), F32), npc.Aval((3,), F32)
    return npc.trace(affine, *avals).partition().lower("ascend-a3", backend=backend).compile(progress=False)


@pytest.mark.parametrize("backend", ["ge", "aclgraph"])
def test_a_call_runs_on_a_device(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """On the emulated one, which is a device as an NPU is; results of an earlier call stay what they were."""
    monkeypatch.setattr(stages, "DEVICE", EMULATED)
    function, results = compiled(backend), []
    for _ in range(3):
        arguments = torch.randn(4, 6), torch.randn(6, 2), torch.randn(3)
        results.append((function(*arguments), affine(*arguments)))
    for got, want in results:
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name])
    del function
    gc.collect()


def test_without_a_device_it_is_said_what_is_missing() -> None:
    with pytest.raises(SpecError, match=r"affine is compiled for ascend-a3, and this machine cannot run it: .*; \.emulate"):
        compiled("ge")(torch.randn(4, 6), torch.randn(6, 2), torch.randn(3))


def test_what_is_no_executable_is_refused() -> None:
    function = compiled("ge")
    with pytest.raises(LoweringError, match=r"not a file of format 'npucompile\.ge/2'"):
        DeviceCall(EMULATED, function.data[:40], "ge", function.partitioned.signature, ())

"""tools/serve/device_groups.py: NPUs communicate over HCCL, CPUs and emulated devices over gloo."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from npucompile.lowering.ascend import hccl, npu
from npucompile.lowering.ascend.toolchain import harness
from npucompile.runtime.distributed.process_groups import gloo
from npucompile.tools.serve.device_groups import group_maker


def test_only_npus_need_hccl(tmp_path, monkeypatch):
    assert group_maker(None, {}) is gloo
    assert group_maker(SimpleNamespace(kind="emulated"), {"tp": 1}) is gloo
    loaded = replace(harness.load(tmp_path), cann="a stand-in")
    monkeypatch.setattr(npu.NpuDevice, "__init__", lambda self: setattr(self, "_torch_npu", loaded.torch_npu))
    calls = []
    monkeypatch.setattr(hccl, "group_maker", lambda *args: calls.append(args) or "made")
    assert group_maker(npu.NpuDevice(), {"tp": 7}) == "made"
    assert calls == [(loaded.torch_npu, {"tp": 7})]

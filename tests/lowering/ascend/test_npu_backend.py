"""lowering/ascend/npu_backend.py: both backends for NPUs say alike what a machine lacks; their own tests ask in processes without it."""

from __future__ import annotations

import pytest

from npucompile.lowering.ascend import npu_backend
from npucompile.lowering.ascend.toolchain import harness
from npucompile.lowering.backend import backend


@pytest.mark.parametrize(("name", "graph"), [("ge", "a GE graph"), ("aclgraph", "a captured graph")])
def test_what_a_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch, name: str, graph: str) -> None:
    chosen = backend(name)
    assert set(chosen.versions()) == set(harness.DISTRIBUTIONS)
    assert set(chosen.options(1)) == {"sources"}
    assert chosen.compiles_here() is None
    assert chosen.runs_here() == f"running {graph} needs CANN and an NPU, and this machine has no CANN"
    monkeypatch.setattr(npu_backend, "cann", lambda home: "here")
    assert chosen.runs_here() is None
    monkeypatch.setattr(harness, "installed", dict)
    assert "torch_npu" in str(chosen.runs_here())
    assert set(chosen.versions().values()) == {""}

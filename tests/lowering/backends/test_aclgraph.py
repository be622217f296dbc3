"""lowering/backends/aclgraph.py: a prepared process lowers to torch operators; what a file must hold is proved of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.toy_layer import split

from npucompile.graphs.errors import LoweringError
from npucompile.lowering import collectives_check
from npucompile.lowering.ascend.acl_graph.file import decode
from npucompile.lowering.backend import backend


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    chosen = backend("aclgraph")
    chosen.prepare(tmp_path_factory.mktemp("stubs"))
    return chosen


def test_decode_is_captured_and_prefill_is_not(prepared: Any, tmp_path: Path) -> None:
    for kind in ("decode", "prefill"):
        partitioned = split("tp=2", kind)
        lowered = prepared.lower(partitioned)
        assert (lowered.backend, lowered.signature) == ("aclgraph", partitioned.signature)
        compiled = prepared.compile(lowered, cache_dir=tmp_path, threads=0)
        prepared.prove(compiled, partitioned)
        file = decode(compiled.data)
        assert file.captured == (kind == "decode")
        first = len(lowered.signature.params)
        assert file.written == (first, first + 1)
        assert compiled.census["npu.npu_scatter_pa_kv_cache.default"] == 1
        assert collectives_check.of_acl_file(file) == partitioned.collectives == (("all_reduce", "tp", "bf16[4,32]"),)
        assert prepared.compile(prepared.lower(partitioned), cache_dir=tmp_path, threads=0) == compiled


def test_a_file_with_other_collectives_is_refused(prepared: Any, tmp_path: Path) -> None:
    partitioned = split("tp=2")
    compiled = prepared.compile(prepared.lower(partitioned), cache_dir=tmp_path, threads=0)
    with pytest.raises(LoweringError, match="legal is the same list"):
        prepared.prove(compiled, replace(partitioned, graph=split("").graph))


def test_a_process_that_is_not_prepared_says_what_to_call(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_loaded", None)
    with pytest.raises(LoweringError, match=r"backend aclgraph is not prepared in this process; call its `prepare`"):
        prepared.lower(split("tp=2"))


def test_it_runs_on_a_device_alone(prepared: Any, tmp_path: Path) -> None:
    assert "needs CANN and an NPU" in prepared.runs_here()
    assert prepared.compiles_here() is None
    assert prepared.versions()["torch_npu"]
    with pytest.raises(LoweringError, match="backend aclgraph has no executables that run on a CPU"):
        prepared.open(tmp_path / "x.aclgraph")


def test_asking_for_the_backend_loads_no_torch_npu() -> None:
    code = """
import sys
from npucompile.lowering.backend import backend
found = backend("aclgraph")
assert (found.name, found.suffix) == ("aclgraph", "aclgraph")
found.versions(), found.compiles_here()
heavy = {"torch_npu", "torchair", "google.protobuf", "npucompile.lowering.ascend.lowered"}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr

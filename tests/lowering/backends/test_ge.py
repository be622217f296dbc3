"""lowering/backends/ge.py: a prepared process lowers and converts; a process that cannot says what it lacks."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from support.toy_layer import split

from npucompile.graphs.errors import LoweringError
from npucompile.lowering import collectives_check
from npucompile.lowering.ascend import inspect_ge
from npucompile.lowering.ascend.ge_file import decode, encode
from npucompile.lowering.ascend.shipped import GE
from npucompile.lowering.ascend.toolchain import harness
from npucompile.lowering.backend import backend
from npucompile.lowering.platform import Platform


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    ge = backend("ge")
    ge.prepare(tmp_path_factory.mktemp("stubs"))
    return ge


@pytest.fixture(scope="module")
def partitioned():
    return split("tp=2")


def test_a_partitioned_graph_becomes_a_file_that_holds_what_it_communicates_and_remembers(prepared, partitioned, tmp_path):
    lowered = prepared.lower(partitioned)
    assert (lowered.backend, lowered.signature) == ("ge", partitioned.signature)
    assert "npu.npu_scatter_pa_kv_cache_functional" in lowered.as_text()
    compiled = prepared.compile(lowered, cache_dir=tmp_path, threads=0)
    prepared.prove(compiled, partitioned)
    ge_file = decode(compiled.data)
    assert ge_file.inputs == len(lowered.signature.operands)
    census = compiled.census
    assert census == GE.census(ge_file)
    assert (census["ScatterPaKvCache"], census["HcomAllReduce"]) == (1, 1)
    assert collectives_check.of_ge_file(ge_file) == partitioned.collectives == (("all_reduce", "tp", "bf16[4,32]"),)
    first = len(lowered.signature.params)
    assert {*ge_file.bound, *(operand for _, operand in ge_file.donations)} == {first, first + 1}


def test_lowering_and_converting_again_make_the_same(prepared, partitioned, tmp_path):
    first, second = prepared.lower(partitioned), prepared.lower(partitioned)
    assert first.as_text() == second.as_text()
    executables = [prepared.compile(lowered, cache_dir=tmp_path, threads=0) for lowered in (first, second)]
    assert executables[0] == executables[1]


def test_a_graph_that_breaks_what_it_must_hold_is_refused(prepared, partitioned, tmp_path, monkeypatch):
    compiled = prepared.compile(prepared.lower(partitioned), cache_dir=tmp_path, threads=0)

    def refuse(ge_file, signature):
        raise LoweringError("the GE graph has 1 breaches: it is not in place")

    monkeypatch.setattr(inspect_ge, "check", refuse)
    with pytest.raises(LoweringError, match="not in place"):
        prepared.prove(compiled, partitioned)
    monkeypatch.undo()
    with pytest.raises(LoweringError, match="legal is the same list"):
        prepared.prove(compiled, replace(partitioned, graph=split("").graph))


def test_a_process_that_is_not_prepared_says_what_to_call(prepared, partitioned, tmp_path, monkeypatch):
    lowered = prepared.lower(partitioned)
    monkeypatch.setattr(prepared, "_loaded", None)
    calls = [
        lambda: prepared.lower(partitioned),
        lambda: prepared.compile(lowered, cache_dir=tmp_path, threads=0),
    ]
    for call in calls:
        with pytest.raises(LoweringError, match=r"backend ge is not prepared in this process; call its `prepare`"):
            call()


def test_a_file_runs_on_a_device_alone(prepared, tmp_path):
    assert "needs CANN and an NPU" in prepared.runs_here()
    with pytest.raises(LoweringError, match="backend ge has no executables that run on a CPU"):
        prepared.open(tmp_path / "x.ge")


def test_what_converts_is_part_of_a_graphs_key():
    versions = backend("ge").versions()
    assert versions["torch_npu"] == importlib.metadata.version("torch_npu")
    assert set(versions) == set(harness.DISTRIBUTIONS)
    assert backend("ge").cpu_features() == ()


def test_what_is_not_installed_is_part_of_it_too_and_refused(monkeypatch):
    here = harness.installed()
    monkeypatch.setattr(harness, "installed", lambda: {name: version for name, version in here.items() if name != "protobuf"})
    assert backend("ge").versions()["protobuf"] == ""
    assert re.match(r"lowering to Ascend needs protobuf, which is not installed; .*pip install", backend("ge").compiles_here())
    monkeypatch.undo()
    assert backend("ge").compiles_here() is None


def test_asking_for_the_backend_loads_neither_torchair_nor_the_converter():
    code = """
import sys
from npucompile.lowering.backend import backend
from npucompile.lowering.platform import Platform
found = backend("ge")
assert (found.name, found.suffix) == ("ge", "ge")
found.versions(), found.compiles_here()
heavy = {"torch_npu", "torchair", "google.protobuf", "npucompile.lowering.ascend.link", "npucompile.lowering.ascend.lowered"}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_prove_refuses_what_the_chip_does_not_take(prepared, partitioned, tmp_path):
    """Only where the platform names a chip: a graph for nothing in particular is held to no operator library."""
    compiled = prepared.compile(prepared.lower(partitioned), cache_dir=tmp_path, threads=1)
    ge_file = decode(compiled.data)
    wrong = replace(compiled, data=encode(replace(ge_file, options={**ge_file.options, "ge.fastest": "1"})))
    prepared.prove(compiled, partitioned, Platform("ascend910_93", "9.1"))
    prepared.prove(wrong, partitioned)
    with pytest.raises(LoweringError, match=r"CANN 9.1 on ascend910_93 does not take 1 operators or options .*ge.fastest"):
        prepared.prove(wrong, partitioned, Platform("ascend910_93", "9.1"))

"""lowering/ascend/toolchain/stubs.py: stub libraries are compiled once, also by concurrent processes, and never where CANN is installed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.toolchain import stubs
from npucompile.lowering.ascend.toolchain.elf import read_symbols


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return stubs.stub_libraries(tmp_path_factory.mktemp("cache"))


def test_every_missing_library_is_made_with_every_missing_symbol(paths):
    symbols, libraries = stubs.missing(stubs.wheel_path())
    assert [path.name for path in paths] == libraries
    assert {"libascendcl.so", "libhccl.so", "libge_runner.so", "libgraph.so"} <= set(libraries)
    assert len(symbols) > 100
    for path in paths:
        stub = read_symbols(path)
        assert set(symbols) <= stub.defined
        assert stub.undefined == set()
        assert stub.needed == ()


def test_only_cann_is_replaced():
    symbols, libraries = stubs.missing(stubs.wheel_path())
    assert "aclrtMalloc" in symbols
    assert any(name.startswith("_ZN2ge") for name in symbols)
    assert not [name for name in symbols if name.startswith(("Py", "_Py", "_ZN3c10", "_ZN2at", "_ZNSt"))]
    assert not [name for name in libraries if name.startswith(("libtorch", "libc.", "libstdc++", "libpython"))]


def test_a_stub_returns_zero_and_the_loader_knows_it_by_its_soname(paths):
    script = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "assert library.aclrtGetDeviceCount() == 0\n"
        "assert library['_ZN2ge10GEFinalizeEv']() == 0\n"
        "ctypes.CDLL('libascendcl.so')\n"
    )
    path = next(path for path in paths if path.name == "libascendcl.so")
    ran = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_second_call_makes_nothing(paths):
    before = [path.stat().st_mtime_ns for path in paths]
    assert stubs.stub_libraries(paths[0].parents[1], compiler="/nowhere/cc") == paths
    assert [path.stat().st_mtime_ns for path in paths] == before


def test_many_at_once_end_with_one_complete_set(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(stubs.stub_libraries, [tmp_path] * 4))
    assert results == [results[0]] * 4
    assert len(results[0]) == len(stubs.missing(stubs.wheel_path())[1])
    # The other processes' folders are removed.
    assert list(tmp_path.iterdir()) == [results[0][0].parent]


def test_cann_is_never_hidden(tmp_path):
    with pytest.raises(LoweringError, match=r"hide the CANN of this machine \(ASCEND_HOME_PATH is /usr/local/Ascend\)"):
        stubs.stub_libraries(tmp_path, ascend_home="/usr/local/Ascend")
    assert list(tmp_path.iterdir()) == []


def test_a_real_libascendcl_counts_as_cann_and_a_stub_does_not(tmp_path, paths, monkeypatch):
    assert stubs.cann(None) is None
    monkeypatch.setattr(stubs, "PROBED", str(next(path for path in paths if path.name == stubs.PROBED)))
    assert stubs.cann(None) is None
    (tmp_path / "real.c").write_text("int aclInit(void) { return 0; }")
    subprocess.run([shutil.which("cc"), "-shared", "-fPIC", "-o", tmp_path / "libreal.so", tmp_path / "real.c"], check=True)
    monkeypatch.setattr(stubs, "PROBED", str(tmp_path / "libreal.so"))
    assert "the loader finds" in stubs.cann(None)
    with pytest.raises(LoweringError, match="hide the CANN"):
        stubs.stub_libraries(tmp_path)


def test_without_torch_npu_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoweringError, match=re.escape("pip install 'npucompile[npu]'")):
        stubs.stub_libraries(tmp_path)


def test_without_a_compiler_what_to_install_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LoweringError, match="none of cc, gcc, clang is on PATH; install one"):
        stubs.stub_libraries(tmp_path)


def test_what_a_failing_compiler_says_is_passed_on_and_nothing_is_left(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such architecture >&2\nexit 3\n")
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    with pytest.raises(LoweringError, match=r"exit code 3\): no such architecture"):
        stubs.stub_libraries(cache, compiler=str(compiler))
    assert list(cache.iterdir()) == []


def test_one_compiler_after_another_is_looked_for(monkeypatch):
    monkeypatch.setattr(shutil, "which", {"clang": "/opt/clang"}.get)
    assert stubs.find_compiler() == "/opt/clang"


def test_source_compiles_for_names_that_are_no_identifiers(tmp_path):
    names = ["plain", "_ZN2ge3FooC1Ev", "odd.name$1"]
    (tmp_path / "s.c").write_text(stubs.source(names))
    subprocess.run([shutil.which("cc"), "-shared", "-fPIC", "-o", tmp_path / "s.so", tmp_path / "s.c"], check=True)
    library = ctypes.CDLL(str(tmp_path / "s.so"))
    assert all(library[name]() == 0 for name in names)

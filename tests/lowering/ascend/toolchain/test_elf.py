"""lowering/ascend/toolchain/elf.py: which symbols and libraries a compiled library defines and needs; other files are refused."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.toolchain.elf import read_symbols

SOURCE = """
#include <stdio.h>
int elsewhere(int);
int perhaps(int) __attribute__((weak));
long _ZN2ge5hiddenEv(void) { return 1; }
int here(int x) { return elsewhere(x) + (perhaps ? perhaps(x) : 0) + printf("%d", x); }
static int inside(int x) { return x; }
int (*table[])(int) = { inside };
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elf")
    (folder / "one.c").write_text(SOURCE)
    compiler = shutil.which("cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libone.so", folder / "one.c"], check=True)
    return folder / "libone.so"


def test_symbols_are_told_apart(library):
    symbols = read_symbols(library)
    assert {"here", "_ZN2ge5hiddenEv", "table"} <= symbols.defined
    assert "inside" not in symbols.defined
    # Weak symbols may stay unresolved, and versioned ones belong to the C library.
    assert symbols.undefined == {"elsewhere"}
    assert any(name.startswith("libc.so") for name in symbols.needed)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + b"\0" * 200, b"\x7fELF\x02\x01" + b"\0" * 200])
def test_what_is_no_library_is_refused_by_name(tmp_path, content):
    path = tmp_path / "libodd.so"
    path.write_bytes(content)
    with pytest.raises(LoweringError, match=r"libodd\.so is not a shared library"):
        read_symbols(path)


def test_a_library_cut_short_is_refused(library, tmp_path):
    path = tmp_path / "libhalf.so"
    path.write_bytes(library.read_bytes()[:4096])
    with pytest.raises(LoweringError, match="libhalf"):
        read_symbols(path)

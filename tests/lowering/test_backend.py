"""lowering/backend.py: a backend is one file that exports one object under its own name; looking one up imports no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering import backends
from npucompile.lowering.backend import backend, backend_names
from npucompile.lowering.backends.null import Null

NAMES = sorted(
    path.stem
    for path in Path(backends.__path__[0]).iterdir()
    if (path / "__init__.py").is_file() or (path.suffix == ".py" and path.stem != "__init__")
)


def test_every_file_or_folder_is_a_backend() -> None:
    assert list(backend_names()) == NAMES
    assert {"eager", "inductor", "null"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_has_its_name_and_a_suffix_of_its_own(name: str) -> None:
    exported = backend(name)
    assert exported.name == name
    assert [other for other in NAMES if backend(other).suffix == exported.suffix] == [name]


@pytest.mark.parametrize("name", ["eager", "null"])
def test_backends_without_a_compiler_run_anywhere(name: str) -> None:
    assert backend(name).compiles_here() is None
    assert backend(name).cpu_features() == ()


@pytest.mark.parametrize("name", ["Eager", "", "backends", "../eager", "os"])
def test_an_unknown_name_is_refused_with_the_legal_ones(name: str) -> None:
    with pytest.raises(LoweringError, match=f"no backend '{name}'; legal are {', '.join(NAMES)}"):
        backend(name)


class Void(Null):
    name = "void"


@pytest.mark.parametrize("exported", ["a string", "wrong name"])
def test_a_file_that_exports_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, exported: str) -> None:
    stand_in = ModuleType("npucompile.lowering.backends.null")
    stand_in.BACKEND = exported if exported == "a string" else Void()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    with pytest.raises(LoweringError, match=r"lowering/backends/null.py must export BACKEND, a Backend named 'null'"):
        backend("null")


def test_the_names_are_known_without_loading_a_compiler() -> None:
    code = """
import sys
from npucompile.lowering.backend import backend_names
assert backend_names()
sys.exit("torch._inductor" in sys.modules or any(m.startswith("npucompile.lowering.backends.") for m in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

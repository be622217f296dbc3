"""The wheel contains all source files and nothing else, and works on a path of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from support import wheels

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("graphs", "models", "lowering", "runtime", "server", "tools")

# Run with -S, so that no .pth file of an editable install adds files that the wheel lacks.
IMPORT_ALL = """
import importlib, importlib.metadata, json, pkgutil, sys
wheel, *libraries = sys.argv[1:]
sys.path[:0] = [wheel, *libraries]
import npucompile
names = [m.name for m in pkgutil.walk_packages(npucompile.__path__, "npucompile.") if not m.name.endswith(".__main__")]
files = {name: importlib.import_module(name).__file__ for name in ("npucompile", *names)}
(distribution,) = importlib.metadata.distributions(name="npucompile", path=[wheel])
commands = {e.name: callable(e.load()) for e in distribution.entry_points}
print(json.dumps({"files": files, "commands": commands, "versions": [npucompile.__version__, distribution.version]}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    place = tmp_path_factory.mktemp("wheel")
    file = wheels.built(place)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(place / "unpacked")
    return place / "unpacked"


def files_under(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_holds_every_source_and_bundled_file(wheel: Path) -> None:
    expected = {p.relative_to(ROOT).as_posix() for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")} | {"__init__.py"}
    expected = {path for path in expected if not path.startswith("tools/lab/")}
    expected |= {f"models/{p}" for p in files_under(ROOT / "models") if p.startswith("bundled/")}
    tables = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tools").rglob("*.json")}
    assert tables
    expected |= tables
    files = {p for p in files_under(wheel / "npucompile") if "__pycache__" not in p}
    assert expected - files == set()


def test_holds_nothing_else(wheel: Path) -> None:
    files = files_under(wheel)
    assert {p.split("/")[0] for p in files if ".dist-info/" not in p} == {"npucompile"}
    assert not [p for p in files if p.startswith("npucompile/tools/lab/")]
    assert {p.split("/")[1] for p in files if p.startswith("npucompile/")} == {"__init__.py", "py.typed", *FOLDERS}


def test_imports_alone(wheel: Path, tmp_path: Path) -> None:
    libraries = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(wheel), *libraries]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {f"npucompile.{folder}" for folder in FOLDERS} <= set(result["files"])
    assert [name for name, file in result["files"].items() if not file.startswith(str(wheel / "npucompile"))] == []
    assert result["commands"] == {"npucompile": True}
    assert len(set(result["versions"])) == 1

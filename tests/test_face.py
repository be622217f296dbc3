"""The root's `__init__`: what `import npucompile` offers, that it costs nothing until it is used, and that type checkers see it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import npucompile as npc

ROOT = Path(__file__).resolve().parents[1]
FACE = [
    *("Aval", "Client", "Compiled", "Completion", "Delta", "LLM", "Lowered", "Mesh", "Partitioned", "Rules", "Sampling", "Traced"),
    *("constrain", "errors", "trace"),
]

IMPORTED = """
import json, sys
before = set(sys.modules)
import npucompile as npc
names = sorted(name for name in dir(npc) if not name.startswith("_"))
light = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
npc.errors
print(json.dumps([names, light, "torch" in sys.modules]))
"""


def run(code: str, **environment: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment or None)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_lists_the_face_and_imports_nothing() -> None:
    assert run(IMPORTED) == [FACE, ["npucompile"], False]


@pytest.mark.parametrize("name", FACE)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(npc, name)
    assert value is getattr(npc, name)
    assert value.__doc__
    assert getattr(value, "__name__", name).rpartition(".")[2] == name


def test_another_name_is_refused_with_the_face() -> None:
    with pytest.raises(AttributeError, match=r"module 'npucompile' has no attribute 'jit'; it offers Aval, Client, .*trace"):
        _ = npc.jit  # type: ignore[attr-defined]


def test_type_checkers_see_what_python_sees() -> None:
    """The imports for type checkers are those of the table, each under its own name, which exports it."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    assert {alias.asname: node.module for node in imports for alias in node.names if alias.asname == alias.name} == npc._FACE
    assert (ROOT / "py.typed").read_bytes() == b""


def test_an_instruction_set_is_hidden_from_functions_too(tmp_path: Path) -> None:
    """What $NPUCOMPILE_ISA hides from commands it hides from a program that compiles in its own process."""
    code = (
        "import json, os; import npucompile as npc; from npucompile.tools.cli import home_of_process; home_of_process();"
        "print(json.dumps([os.environ['ATEN_CPU_CAPABILITY'], str(npc.ISA)]))"
    )
    assert run(code, NPUCOMPILE_ISA="default", NPUCOMPILE_HOME=str(tmp_path), PATH="/bin") == ["default", "default"]

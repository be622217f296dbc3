"""server/: its rooms import in one order, and no file imports itself by way of others. Imports for types alone count."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

SERVER = Path(__file__).resolve().parents[2] / "server"
ORDER = (
    *(("text",), ("requests",), ("grammar",), ("parsers",), ("chat",), ("pictures",), ("telemetry",), ("guard",), ("storage",)),
    *(("siblings",), ("engine",), ("fleet", "response"), ("socket", "openai", "pages"), ("anthropic",)),
)
"""A room may import itself and those before it; the files beside the rooms import any room, and no room imports them."""

Imports = Mapping[str, set[str]]
"""Paths of modules, as "engine/service", with the modules of the server that each imports."""


def imports_of(folder: Path) -> Imports:
    modules = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.py")}
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = ("server", *name.split("/")[:-1])
        imports[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(package):
                base = [*package[1 : len(package) - node.level + 1], *(node.module or "").split(".")]
                targets = ["/".join(filter(None, base)), *("/".join(filter(None, [*base, alias.name])) for alias in node.names)]
                imports[name] |= {target for target in targets if target in modules}
    return imports


def floor_breaches(imports: Imports) -> list[str]:
    floors = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
    breaches = []
    for name, targets in imports.items():
        room, inner, _ = name.partition("/")
        for target in targets if inner else ():
            other = target.split("/")[0]
            if other != room and floors.get(other, len(ORDER)) >= floors[room]:
                breaches.append(f"{name} imports {target}; legal are {ORDER[: floors[room]]}")
    return breaches


def circle(imports: Imports) -> list[str]:
    """Modules that are left when those are taken away, again and again, that import none of the others."""
    left = dict(imports)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_the_rooms_keep_their_order_and_have_no_circle() -> None:
    imports = imports_of(SERVER)
    assert {name.split("/")[0] for name in imports if "/" in name} == {room for rooms in ORDER for room in rooms}
    assert "engine/mailbox" in imports["engine/service"]
    assert floor_breaches(imports) == []
    assert circle(imports) == []


@pytest.mark.parametrize(
    ("text", "breach"),
    [
        ("from ..engine.service import Service\n", "guard/door imports engine/service"),
        ("from ..app import create_app\n", "guard/door imports app"),
        ("if TYPE_CHECKING:\n    from ..socket import websocket\n", "guard/door imports socket/websocket"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, text: str, breach: str) -> None:
    for name in ("app", "engine/service", "socket/websocket", "guard/door"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text if name == "guard/door" else "from ..guard.door import Door\n")
    imports = imports_of(tmp_path)
    assert [found.partition(";")[0] for found in floor_breaches(imports)] == [breach]
    assert ("guard/door" in circle(imports)) == (breach != "guard/door imports app")

"""lowering/ascend/legality/calls.json lists every call of torch_npu, torchair and HCCL that the device path makes, and no other."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import npucompile

ROOT = Path(npucompile.__file__).parent
FILES = [ROOT / "lowering" / "ascend" / name for name in ("device.py", "npu.py", "hccl.py", "acl_graph/npu_engine.py")]
OF_OBJECTS = {"get_hccl_comm_name"}
"""Methods of HCCL's objects; those of torchair's graphs and torch_npu's events are listed with their classes."""


def dotted(node: ast.AST, modules: dict[str, str]) -> str | None:
    """`torch_npu.npu.set_device` of an attribute chain that starts at the module, whatever holds it; None of others."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        if node.attr.strip("_") == "torch_npu":
            break
        node = node.value
    else:
        if isinstance(node, ast.Name):
            names.append(modules.get(node.id, node.id))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            names.append(ast.literal_eval(node.args[0]))
    name = ".".join(reversed(names)).replace("_torch_npu", "torch_npu", 1 if names and names[-1] == "_torch_npu" else 0)
    return name if re.match(r"(torch_npu|torchair)\.", name) else None


def calls(source: str) -> set[str]:
    tree = ast.parse(source)
    modules = {
        node.targets[0].id: ast.literal_eval(node.value.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "importlib.import_module"
    }
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    names = {name for node in attributes if id(node) not in inner and (name := dotted(node, modules))}
    return {name for name in names if name != "torchair.torch_npu" and name != "torchair.cann"} | (
        {node.attr for node in attributes} & OF_OBJECTS
    )


def test_the_table_lists_what_the_code_calls():
    rows = json.loads((ROOT / "lowering" / "ascend" / "legality" / "calls.json").read_text())
    listed = [row["call"] for row in rows]
    assert len(set(listed)) == len(listed)
    assert set(listed) == set().union(*(calls(file.read_text()) for file in FILES))
    assert all(len(row["for"]) > 5 and len(row["documented"]) > 5 for row in rows)


def test_a_call_is_found_however_the_module_is_held():
    source = """
import importlib
def f(torch_npu, self):
    m = importlib.import_module("torchair.a")
    torch_npu.x(1), self._torch_npu.npu.y(), m.z, importlib.import_module("torchair.b").w, self.other.npu.v()
    self.torchair.torch_npu.u, group.get_hccl_comm_name(1)
"""
    expected = {"torch_npu.x", "torch_npu.npu.y", "torchair.a.z", "torchair.b.w", "torch_npu.u", "get_hccl_comm_name"}
    assert calls(source) == expected

"""lowering/ascend/inventory.py: a CANN of files that has all that graphs need passes, and each fault is named with the next command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.vendors import put_vendor

from npucompile.lowering.ascend.inventory import DTYPES, TBE, functions, inventory
from npucompile.lowering.ascend.legality.table import TYPES, table
from npucompile.lowering.ascend.prototypes import HEADERS, forms
from npucompile.lowering.ascend.vendors import VARIABLE
from npucompile.lowering.platform import Platform

CHIP, RELEASE = "ascend910_93", "9.1"
NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


def definition(columns: Any) -> dict[str, Any]:
    """A row of CANN's table that takes these combinations of dtypes."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    # An operand that a combination leaves out has some dtype in CANN's row all the same.
    dtypes = {name: ",".join(NAMES.get(column.get(name, "f16"), column.get(name, "f16")) for column in columns) for name in names}
    kinds = {True: iter(range(99)), False: iter(range(99))}
    keys = {name: f"{'output' if name.startswith('->') else 'input'}{next(kinds[name.startswith('->')])}" for name in names}
    return {keys[name]: {"name": name.removeprefix("->"), "dtype": dtypes[name], "paramType": "required"} for name in names}


def tables() -> dict[str, Any]:
    """All combinations that graphs are checked against, by operator."""
    merged: dict[str, list[Any]] = {}
    for fact in table().rows:
        if fact.what == TYPES and not fact.package and fact.holds(CHIP, RELEASE, ()):
            for operator in fact.operators:
                merged.setdefault(operator, []).extend(fact.columns)
    return {operator: definition(columns) for operator, columns in merged.items()}


def headers() -> str:
    """All forms that graphs are checked against, as CANN's headers register them, with an input behind them that nobody needs."""
    words = {"required": "", "optional": "OPTIONAL_", "dynamic": "DYNAMIC_"}
    blocks = []
    for fact, operator in forms(CHIP, RELEASE, ()):
        parts = [f".{words[kind]}INPUT({name}, TensorType({{DT_INT8, DT_BF16}}))" for name, kind in fact.inputs.items()]
        parts += [".OPTIONAL_INPUT(of_a_later_release, TensorType::ALL())", "/* .INPUT(in_a_comment, TensorType::ALL()) */"]
        parts += [f".{words[kind]}OUTPUT({name}, TensorType({{DT_INT8}}))" for name, kind in fact.outputs.items()]
        parts += [f".ATTR({name}, {kind}, 0)" for name, kind in fact.attributes.items()]
        blocks.append("\n    ".join([f"REG_OP({operator})", *parts, f".OP_END_FACTORY_REG({operator})"]))
    return "\n\n".join(blocks)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A CANN of files."""
    root = tmp_path / "cann"
    for folder, file in ((f"{TBE}/kernel/{CHIP}/add", "add.o"), ("compiler/ccec_compiler/bin", "bisheng")):
        (root / folder).mkdir(parents=True)
        (root / folder / file).touch(mode=0o755)
    (root / "compiler" / "version.info").write_text(f"Version={RELEASE}.0\n")
    config = root / TBE / "config" / CHIP
    config.mkdir(parents=True)
    (config / f"aic-{CHIP}-ops-info.json").write_text(json.dumps(tables()))
    (root / HEADERS).mkdir(parents=True)
    (root / HEADERS / "all.h").write_text(headers())
    for module in ("te_fusion", "tbe"):
        package = root / "python" / "site-packages" / module
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (root / "python" / "site-packages" / "te_fusion" / "fusion_manager.py").write_text("import json\n")
    put_library(root, "math", sorted(functions(CHIP, RELEASE))[::2])
    put_library(root, "nn", sorted(functions(CHIP, RELEASE))[1::2])
    return root


def put_library(root: Path, name: str, called: Sequence[str]) -> None:
    """A library of CANN with these functions and a stray one."""
    (root / "lib64").mkdir(exist_ok=True)
    source = "".join(f"void {function}GetWorkspaceSize(void) {{}}\n" for function in ("aclnnOfNobody", *called))
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(root / "lib64" / f"libopapi_{name}.so"), "-"]
    subprocess.run(command, input=source.encode(), check=True)


def environment(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(home / "python" / "site-packages"), **more}


def advice(home: Path, torch_npu: str = "2.13.0", **more: str) -> dict[str, str]:
    """What is wrong, by what was looked at."""
    items = inventory(home, environment(home, **more), [Platform(CHIP, RELEASE)], torch_npu)
    return {item.name: item.advice for item in items if item.advice}


def test_nothing_is_wrong_with_a_whole_one(home: Path) -> None:
    assert advice(home) == {}


def test_what_the_compiler_imports_is_named(home: Path) -> None:
    (home / "python" / "site-packages" / "te_fusion" / "fusion_manager.py").write_text("import decorator_of_nobody\n")
    items = {item.name: item for item in inventory(home, environment(home), [], "2.13.0")}
    item = items["Python of CANN's compiler"]
    assert item.found == "ModuleNotFoundError: No module named 'decorator_of_nobody'"
    assert "pip install 'npucompile[npu-run]'" in item.advice


def test_a_shell_without_set_env_is_told_so(home: Path) -> None:
    assert "set_env.sh" in advice(home, PYTHONPATH="")["Python of CANN's compiler"]


def test_a_runtime_without_its_toolkit_is_named(home: Path) -> None:
    (home / "compiler" / "ccec_compiler" / "bin" / "bisheng").unlink()
    assert "toolkit" in advice(home)["bisheng"]


def test_kernels_of_another_chip_are_no_kernels_of_this_one(home: Path) -> None:
    shutil.move(home / TBE / "kernel" / CHIP, home / TBE / "kernel" / "ascend910b")
    told = advice(home)[f"kernels of {CHIP}"]
    assert "has kernels of ascend910b" in told
    assert f"kernels package of this CANN for {CHIP}" in told


@pytest.mark.parametrize(
    ("torch_npu", "cann", "said"),
    [
        ("2.13.0", "8.5.0", "the newest published pair has CANN 9.1"),
        ("2.11.0", "9.0.0", "torch_npu 2.11 is published for CANN 9.1"),
        ("2.9.0", "8.5.0", "torch_npu 2.9 is published for CANN 9.0"),
    ],
)
def test_a_pair_that_nobody_publishes_is_said(home: Path, torch_npu: str, cann: str, said: str) -> None:
    (home / "compiler" / "version.info").write_text(f"Version={cann}\n")
    assert said in advice(home, torch_npu)["torch_npu and CANN"]


def test_a_vendor_that_redefines_an_operator_is_named(home: Path, tmp_path: Path) -> None:
    put_vendor(tmp_path / "vendor", CHIP, ["MoeGatingTopK", "OfTheirOwn"])
    told = advice(home, **{VARIABLE: str(tmp_path / "vendor")})[f"vendors on {VARIABLE}, {CHIP}"]
    assert "MoeGatingTopK" in told
    assert "OfTheirOwn" not in told


def test_functions_that_this_cann_lacks_are_named(home: Path, tmp_path: Path) -> None:
    called = sorted(functions(CHIP, RELEASE))
    assert {"aclnnMm", "aclnnTopk"} <= set(called)
    put_library(home, "nn", [function for function in called[1::2] if function not in ("aclnnMm", "aclnnTopk")])
    put_library(home, "math", [function for function in called[::2] if function not in ("aclnnMm", "aclnnTopk")])
    told = advice(home)[f"functions of {CHIP}"]
    assert "not there are aclnnMm; aclnnTopk: captured graphs that call them end with `not in libopapi.so`" in told
    put_library(tmp_path, "own", ["aclnnMm", "aclnnTopk"])
    assert advice(home, LD_LIBRARY_PATH=f":{tmp_path / 'lib64'}") == {}
    items = inventory(home, environment(home), [Platform(CHIP, RELEASE)], "2.13.0", captured=False)
    assert f"functions of {CHIP}" not in {item.name for item in items}


def test_functions_without_a_row_for_the_release_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: SimpleNamespace(runs=name) for name in ("aclnnMm", "aclnnOfNoRow", "MatMul")}
    monkeypatch.setattr(f"{functions.__module__}.torch_operators", lambda: rows)
    assert functions(CHIP, RELEASE) == {"aclnnMm"}


def test_libraries_that_are_none_are_said_to_be(home: Path) -> None:
    (home / "lib64" / "libopapi_nn.so").write_text("no library")
    assert "libopapi_nn.so is not a shared library" in advice(home)[f"functions of {CHIP}"]
    shutil.rmtree(home / "lib64")
    assert "source set_env.sh" in advice(home)[f"functions of {CHIP}"]


def test_dtypes_that_this_cann_does_not_take_are_named_by_their_row(home: Path) -> None:
    file = home / TBE / "config" / CHIP / f"aic-{CHIP}-ops-info.json"
    rows = json.loads(file.read_text())
    del rows["RotaryMul"]
    gone = rows["ApplyRotaryPosEmb"]
    for operand in gone.values():
        operand["dtype"] = ",".join(dtype for dtype in operand["dtype"].split(",") if dtype != "bfloat16")
    file.write_text(json.dumps(rows))
    told = advice(home)[f"operators of {CHIP}"]
    assert "not there are RotaryMul" in told
    assert "ApplyRotaryPosEmb: query bf16, key bf16" in told


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_table_that_is_broken_is_said_to_be(home: Path, text: str) -> None:
    (home / TBE / "config" / CHIP / f"aic-{CHIP}-ops-info.json").write_text(text)
    assert "cannot be read" in advice(home)[f"operators of {CHIP}"]


def test_a_cann_without_tables_is_said_to_be(home: Path) -> None:
    shutil.rmtree(home / TBE / "config")
    assert "has no aic-*-ops-info.json" in advice(home)[f"operators of {CHIP}"]


@pytest.mark.parametrize("version", [None, "Version=master\n"])
def test_a_cann_that_states_no_release_is_compared_with_the_newest(home: Path, version: str | None) -> None:
    file = home / "compiler" / "version.info"
    file.write_text(version) if version else file.unlink()
    items = {item.name: item for item in inventory(home, environment(home), [Platform(CHIP)], "2.13.0")}
    assert items["torch_npu and CANN"].found == "2.13.0 and a CANN without a version"
    assert items[f"operators of {CHIP}"].advice == ""


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (".INPUT(x1, ", ".INPUT(left, ", "inputs x1, x2"),
        (".ATTR(transpose_x1, ", ".ATTR(turned, ", "attributes transpose_x1 are not there"),
        (".OUTPUT(y, ", ".DYNAMIC_OUTPUT(y, ", "outputs y beside y"),
        (".OPTIONAL_INPUT(of_a_later_release, ", ".INPUT(asked_for, ", "beside x1, x2, scale, offset, bias, pertoken_scale, asked_for"),
    ],
)
def test_an_operator_that_is_registered_otherwise_is_named(home: Path, before: str, after: str, told: str) -> None:
    file = home / HEADERS / "all.h"
    start = (text := file.read_text()).index("REG_OP(QuantBatchMatmulV3)")
    assert before in text[start:]
    file.write_text(text[:start] + text[start:].replace(before, after, 1))
    (said,) = advice(home).values()
    assert "QuantBatchMatmulV3: " in said
    assert told in said


def test_a_cann_without_headers_is_not_judged_by_them(home: Path) -> None:
    (home / HEADERS / "all.h").unlink()
    items = {item.name: item for item in inventory(home, environment(home), [Platform(CHIP, RELEASE)], "2.13.0")}
    assert (items[f"prototypes of {CHIP}"].found[:13], items[f"prototypes of {CHIP}"].advice) == ("not looked at", "")

"""What a machine's CANN has of what graphs need, read from its files and from one process of Python: no device is opened."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ...graphs.errors import LoweringError
from ..platform import CANN_RELEASES, Platform
from . import prototypes, vendors
from .legality.table import DTYPES as DTYPES_ALONE
from .legality.table import TYPES, release, table
from .legality.torch_operators import torch_operators
from .toolchain.elf import read_symbols

TBE = "opp/built-in/op_impl/ai_core/tbe"
COMPILER = ("te_fusion.fusion_manager", "tbe")
"""Python modules that GE imports into this interpreter to compile operators (hicann/ge@ffdcbc9 python_adapter_manager.cc)."""

COMPILERS = ("compiler/ccec_compiler/bin", "tools/bisheng_compiler/bin", "bin")
"""Directories of CANN where `bisheng` is, by release."""

OFFICIAL = {"2.12": "9.1", "2.11": "9.1", "2.10": "9.1", "2.9": "9.0"}
"""Release of CANN that a minor version of torch_npu is published for (Ascend/pytorch COMPATIBILITY.en.md, August 2026)."""

DTYPES = {
    "float16": "f16", "float": "f32", "float32": "f32", "bfloat16": "bf16", "double": "f64", "bool": "bool",
    **{f"{sign}int{bits}": f"{letter}{bits}" for sign, letter in (("", "i"), ("u", "u")) for bits in (4, 8, 16, 32, 64)},
}  # fmt: skip
IMPORT_S = 120.0
MOST_NAMED = 3


@dataclass(frozen=True)
class Item:
    """One thing that was looked at.

    Attributes:
        found: what is there.
        advice: what is wrong with it, and the next command; "" where nothing is.
    """

    name: str
    found: str
    advice: str = ""


def inventory(
    home: Path, environment: Mapping[str, str], platforms: Sequence[Platform], torch_npu: str, *, captured: bool = True
) -> Iterator[Item]:
    """Looks at a CANN.

    Args:
        home: where it is installed.
        environment: variables of the ranks.
        platforms: what graphs were built for, or all that this machine may have.
        torch_npu: version of the installed one, or "".
        captured: whether graphs call torch's operators, which GE's do not.
    """
    yield _compiler(environment)
    yield _bisheng(home, environment)
    yield _pair(home, torch_npu)
    for platform in platforms:
        yield _kernels(home, platform.chip)
        yield _vendors(environment, platform)
        yield _definitions(home, platform)
        yield _prototypes(home, platform)
        if captured:
            yield _functions(home, environment, platform)


def cann_release(home: Path) -> str:
    """The version that a CANN states, or "" where it states none."""
    for file in (home / "compiler" / "version.info", *sorted(home.glob("*/ascend_toolkit_install.info"))):
        if file.is_file() and (match := re.search(r"^[Vv]ersion=(\d+\.\d+\S*)", file.read_text(errors="replace"), re.MULTILINE)):
            return match.group(1)
    return ""


def _compiler(environment: Mapping[str, str]) -> Item:
    name, words = "Python of CANN's compiler", f"import {', '.join(COMPILER)}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", words], env=dict(environment), capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Item(name, "hangs", f"`{words}` has not returned after {IMPORT_S:.0f} s; GE imports the same when it compiles")
    if done.returncode == 0:
        return Item(name, "can be imported")
    said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    lacking = re.search(r"No module named '([^'.]+)", said)
    if lacking and lacking[1] in {module.partition(".")[0] for module in COMPILER}:
        return Item(name, said, "source CANN's set_env.sh: its Python is not on PYTHONPATH, and GE compiles nothing (E40020)")
    return Item(
        name, said, "pip install 'npucompile[npu-run]': GE imports CANN's compiler into this interpreter, and compiles nothing (E40020)"
    )


def _bisheng(home: Path, environment: Mapping[str, str]) -> Item:
    places = [str(home / place) for place in COMPILERS]
    found = shutil.which("bisheng", path=":".join([*places, environment.get("PATH", "")]))
    if found:
        return Item("bisheng", found)
    return Item("bisheng", "none", "install the toolkit package of this CANN: without its compiler GE runs prebuilt kernels alone")


def _pair(home: Path, torch_npu: str) -> Item:
    name, own, minor = "torch_npu and CANN", cann_release(home), ".".join(torch_npu.split(".")[:2])
    found = f"{torch_npu or 'no torch_npu'} and {own or 'a CANN without a version'}"
    wanted = OFFICIAL.get(minor, max(OFFICIAL.values(), key=release))
    if not own or release(own) >= release(wanted):
        return Item(name, found)
    said = f"torch_npu {minor} is published for CANN {wanted}" if minor in OFFICIAL else f"the newest published pair has CANN {wanted}"
    return Item(name, found, f"{said}; with an older one functions that it calls may not be there: install CANN {wanted}")


def _kernels(home: Path, chip: str) -> Item:
    name, folder = f"kernels of {chip}", home / TBE / "kernel"
    count = sum(1 for _ in (folder / chip).rglob("*.o"))
    if count:
        return Item(name, f"{count} prebuilt")
    others = ", ".join(sorted(path.name for path in folder.glob("ascend*"))) or "no chip"
    return Item(name, "none", f"{folder} has kernels of {others}; install the kernels package of this CANN for {chip}")


def _vendors(environment: Mapping[str, str], platform: Platform) -> Item:
    variable = environment.get(vendors.VARIABLE, "")
    name = f"vendors on {vendors.VARIABLE}, {platform.chip}"
    try:
        vendors.check_vendors(variable, platform)
    except LoweringError as error:
        return Item(name, variable, str(error))
    return Item(name, variable or "none")


def operator_definitions(home: Path, chip: str) -> list[Path]:
    """CANN's own tables of a chip's kernels."""
    return sorted((home / TBE / "config" / chip).glob("aic-*-ops-info*.json"))


class Beside(NamedTuple):
    """Our rows of dtypes beside CANN's table of kernels.

    Attributes:
        rows: how many of ours hold.
        absent: operators of them that the table does not have.
        wrong: rows, operators and combinations of dtypes that it does not have.
    """

    rows: int
    absent: list[str]
    wrong: list[str]


def beside_table(machine: Mapping[str, Any], chip: str, cann: str, packages: Collection[str] = ()) -> Beside:
    """Compares every row of dtypes that holds for a chip and release with a table of CANN's, by operator type."""
    rows = [(fact, operator) for fact in table().rows if fact.what == TYPES and fact.holds(chip, cann, tuple(packages))
            for operator in fact.operators if not fact.package]  # fmt: skip
    absent = sorted({operator for _, operator in rows if operator not in machine})
    wrong = [f"row {fact.number}, {operator}: {column}" for fact, operator in rows if operator in machine
             for column in _unknown(fact.columns, machine[operator])]  # fmt: skip
    return Beside(len(rows), absent, wrong)


def _definitions(home: Path, platform: Platform) -> Item:
    """Rows of dtypes that graphs are checked against, beside CANN's own table of kernels."""
    name, folder = f"operators of {platform.chip}", home / TBE / "config" / platform.chip
    try:
        files = operator_definitions(home, platform.chip)
        machine = {operator: row for file in files for operator, row in json.loads(file.read_bytes()).items()}
    except (OSError, ValueError, AttributeError) as error:
        return Item(name, str(folder), f"cannot be read: {error}; install this CANN anew")
    if not machine:
        return Item(name, "none", f"{folder} has no aic-*-ops-info.json; install the kernels package of this CANN for {platform.chip}")
    beside = beside_table(machine, platform.chip, cann_release(home) or platform.cann or CANN_RELEASES[-1], platform.packages)
    absent, wrong = beside.absent, beside.wrong
    found = f"{beside.rows - len(absent)} of {beside.rows} rows of dtypes are in CANN's table"
    told = [f"not there are {_few(absent)}"] * bool(absent) + [f"CANN takes otherwise {_few(wrong)}"] * bool(wrong)
    return Item(name, found, f"{'; '.join(told)}: build with --cann of this release, and send back what bringup packs" if told else "")


def _prototypes(home: Path, platform: Platform) -> Item:
    """Forms that graphs are checked against, beside the operators that CANN's headers register with GE."""
    title, folder = f"prototypes of {platform.chip}", home / prototypes.HEADERS
    try:
        theirs = prototypes.registered(home)
    except OSError as error:
        return Item(title, str(folder), f"cannot be read: {error}; install this CANN anew")
    if not theirs:
        return Item(title, f"not looked at: {folder} has no headers")
    rows = prototypes.forms(platform.chip, cann_release(home) or platform.cann or CANN_RELEASES[-1], platform.packages)
    there = [(fact, operator) for fact, operator in rows if operator in theirs]
    wrong = [
        f"row {fact.number}, {operator}: {text}" for fact, operator in there if (text := prototypes.difference(fact, theirs[operator]))
    ]
    advice = f"CANN registers otherwise {_few(wrong)}: build with --cann of this release, and send back what bringup packs"
    return Item(title, f"{len(there)} of {len(rows)} forms are in CANN's headers", advice if wrong else "")


def _functions(home: Path, environment: Mapping[str, str], platform: Platform) -> Item:
    """Functions that torch's operators call, in CANN's libraries; these are read and not loaded. Which function launches a kernel that the
    table has by its type depends on the release of op-plugin, and is not looked for."""
    name = f"functions of {platform.chip}"
    if find_spec("elftools") is None:
        return Item(name, "not looked at: pyelftools is not installed")
    places = [home / "lib64", *map(Path, filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")))]
    files = {file.resolve() for place in places for file in place.glob("libopapi*.so")}
    if not files:
        return Item(name, "none", f"no libopapi*.so in {home / 'lib64'} and on LD_LIBRARY_PATH; source set_env.sh of a CANN with operators")
    try:
        there = {symbol for file in files for symbol in read_symbols(file).defined}
    except LoweringError as error:
        return Item(name, "cannot be read", f"{error}; install this CANN anew")
    own = cann_release(home) or platform.cann or CANN_RELEASES[-1]
    wanted = functions(platform.chip, own)
    absent = sorted(function for function in wanted if f"{function}GetWorkspaceSize" not in there)
    advice = f"not there are {_few(absent)}: captured graphs that call them end with `not in libopapi.so`; build with --backend ge"
    return Item(name, f"{len(wanted) - len(absent)} of {len(wanted)} in {len(files)} libraries", advice if absent else "")


def functions(chip: str, cann: str) -> frozenset[str]:
    """The functions that torch operators of the table call in a release."""
    called = {row.runs for row in torch_operators().values() if row.runs.startswith("aclnn")}
    return frozenset(name for name in called if any(fact.what in (TYPES, DTYPES_ALONE) for fact in table().facts(name, chip, cann)))


def _unknown(columns: Sequence[Mapping[str, str]], row: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Combinations of dtypes that CANN's row of an operator does not have; operands that one of both leaves out may be anything."""
    theirs: dict[str, list[str]] = {}
    for key, operand in row.items():
        if re.fullmatch(r"(in|out)put\d+", key) and {"name", "dtype"} <= operand.keys():
            arrow = "->" if key.startswith("out") else ""
            theirs[arrow + operand["name"]] = [DTYPES.get(dtype.strip(), dtype.strip()) for dtype in operand["dtype"].split(",")]
    count = min(map(len, theirs.values()), default=0)
    legal: list[Callable[[str], str]] = [lambda name, i=i: theirs[name][i] for i in range(count)]  # type: ignore[misc]
    for column in columns if count else ():
        both = [name for name in column if name in theirs]
        if not any(all(dtype_of(name) == column[name] for name in both) for dtype_of in legal):
            yield ", ".join(f"{name} {column[name]}" for name in both)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return "; ".join(names[:MOST_NAMED]) + more

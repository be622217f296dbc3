"""Reads profiled operators: msprof's `op_summary` tables, and those of msopmodeling (PyPI), which has some 40,000 of public chips.

Rows of one operator with the same operands are one form, whose time is their median.
"""

from __future__ import annotations

import ast
import csv
import io
import statistics
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...graphs.errors import SpecError
from ...lowering.ascend.operators.table import BY_TYPE
from ...lowering.ascend.operators.tensor_type import TensorType

CHIPS = ("910B4", "910B1", "A3")
"""As names of files say them; a table that names none is of `Profiles.chip`."""
_DTYPES = {
    "bfloat16": "bf16", "bf16": "bf16", "float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "int8": "i8", "int32": "i32",
    "int64": "i64", "uint64": "u64", "uint8": "u8", "bool": "bool", "int4": "i4", "quint4x2": "i4",
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """A form of an operator.

    Attributes:
        chip: one of `CHIPS`.
        type: GE's name.
        inputs, outputs: what it was called with.
        seconds: median from its start to its end.
        launches: how many were measured.
    """

    chip: str
    type: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    seconds: float
    launches: int


def read(paths: Iterable[Path], chip: str) -> tuple[list[Profile], Counter[str]]:
    """The forms of all tables, and how many rows were not read, by reason.

    Args:
        paths: of CSV files, of directories with some, or of wheels.
        chip: of tables whose file does not name one.

    Raises:
        SpecError: there is no table.
    """
    times, unread = defaultdict[tuple[str, str, tuple[TensorType, ...], tuple[TensorType, ...]], list[float]](list), Counter[str]()
    tables = 0
    for name, text in (table for path in paths for table in _tables(path)):
        tables += 1
        own = next((each for each in CHIPS if each in name), chip)
        for row in csv.DictReader(io.StringIO(text)):
            try:
                kind, seconds, inputs, outputs = _row(row)
            except (KeyError, ValueError, SyntaxError) as error:
                unread[f"{type(error).__name__} {error}"[:60]] += 1
                continue
            if seconds > 0:
                times[own, _name(kind), inputs, outputs].append(seconds)
    if not tables:
        raise SpecError(
            f"no table in {', '.join(map(str, paths))}; legal are CSV files of msprof (op_summary) and directories or wheels of them"
        )
    return [Profile(*form, statistics.median(each), len(each)) for form, each in times.items()], unread


def _tables(path: Path) -> Iterator[tuple[str, str]]:
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".csv") and _is_profile(text := archive.read(name).decode("utf-8-sig", "replace")):
                    yield Path(name).name, text
        return
    for file in sorted(path.rglob("*.csv")) if path.is_dir() else [path]:
        if _is_profile(text := file.read_text("utf-8-sig", "replace")):
            yield file.name, text


def _name(kind: str) -> str:
    """An operator's first name: versions of a product are one operator here."""
    kind = kind.removesuffix("AiCore")
    return next(iter(BY_TYPE[kind].ge), kind) if kind in BY_TYPE else kind


def _is_profile(text: str) -> bool:
    head = text.partition("\n")[0]
    return "Input Shapes" in head or "profiling_time" in head


def _row(row: Mapping[str, str]) -> tuple[str, float, tuple[TensorType, ...], tuple[TensorType, ...]]:
    if "Input Shapes" in row:
        kind = row.get("OP Type") or row["Type"]
        us = row.get("Task Duration(us)") or row["Duration(us)"]
        sides = [(_sizes(row[f"{side} Shapes"]), row[f"{side} Data Types"].split(";")) for side in ("Input", "Output")]
    else:
        kind, us = row.get("kernel_type") or row.get("name") or row["op_name"].partition("_")[0], row["profiling_time"]
        sides = [(ast.literal_eval(row[f"{side}_shape"]), ast.literal_eval(row[f"{side}_dtype"])) for side in ("inputs", "outputs")]
    inputs, outputs = (tuple(TensorType(_dtype(each), tuple(shape)) for shape, each in zip(*side, strict=False)) for side in sides)
    return kind, float(us) * 1e-6, inputs, outputs


def _sizes(text: str) -> list[list[int]]:
    """Of msprof: "8,4096;4096"."""
    return [[int(size) for size in shape.split(",") if size] for shape in text.strip().strip('"').split(";")]


def _dtype(name: str) -> str:
    return _DTYPES[name.lower().removeprefix("torch.").removeprefix("dt_")]

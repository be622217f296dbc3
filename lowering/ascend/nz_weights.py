"""Which operands of a GE graph are stored in the tiled format NZ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .ge_file import GeFile
from .ge_operators import by_kind, read
from .operators.table import BY_TYPE

# Width of a tile by the number of a dtype in GE's messages: bfloat16, float16, int8, and int32 that holds eight int4 (`to_nz`).
_TILE_WIDTHS = {27: 16, 2: 16, 3: 32, 7: 8}
_INT4, _INT8 = 29, 3


def weight_operands(ge_file: GeFile, *, needed: bool = False) -> tuple[int, ...]:
    """Operands and derived values worth storing in NZ: all their readers are matrix products that take them as the weight, and no tile
    needs padding.

    Args:
        needed: those alone that a product takes in NZ alone.
    """
    ops = read(ge_file.graph)
    words, readers, weights = int4_words(ops), dict[str, list[bool]](), by_kind(_weights)
    only = {name for op in ops if only_nz(op) for name, weight in zip(op.input, weights(op), strict=False) if weight} if needed else set()
    data = {f"{op.name}:0": op for op in ops if op.type == "Data"}
    watched = data.keys() | words.keys()
    for op in ops:
        if not watched.isdisjoint(op.input) and (op.type != "Bitcast" or f"{op.name}:0" not in words):
            # An absent input is "" and has a description; control inputs come last and have none.
            for name, weight in zip(op.input, weights(op), strict=False):
                readers.setdefault(words.get(name, name), []).append(weight and not (name in words and _beside_floats(op)))
    if needed:
        data = {name: op for name, op in data.items() if name in only and op.output_desc[0].dtype == _INT8}
    indices = [op.attr["index"].i for name, op in data.items() if all(readers.get(name, [False])) and fills_tiles(op.output_desc[0])]
    return tuple(sorted(ge_file.data[index] for index in indices))


def _weights(op: Any) -> list[bool]:
    """Whether each input is the weight of a matrix product."""
    return [is_weight(op.type, described.name) for described in op.input_desc]


def _beside_floats(op: Any) -> bool:
    """Whether a product of int4 weights has activations of floats: it then takes the weights in ND alone, as its definition says.

    torchair writes the dtype of the result where activations are int8, and else -1, which stands for theirs.
    """
    return "dtype" in op.attr and int(op.attr["dtype"].i) == -1


def int4_words(ops: Iterable[Any]) -> dict[str, str]:
    """int4 tensor -> the operand or derived value whose int32 words it holds."""
    data = {f"{op.name}:0" for op in ops if op.type == "Data"}
    return {f"{op.name}:0": op.input[0] for op in ops if op.type == "Bitcast" and op.attr["type"].dt == _INT4 and op.input[0] in data}


def is_weight(op_type: str, name: str) -> bool:
    """Whether an operator takes an input of that name as the weight of a matrix product."""
    operator = BY_TYPE.get(op_type)
    return operator is not None and bool(operator.weight) and re.fullmatch(operator.weight + r"\d*", name) is not None


def only_nz(op: Any) -> bool:
    """Whether a product takes int8 weights in NZ alone."""
    operator = BY_TYPE.get(op.type)
    return operator is not None and operator.only_nz is not None and operator.only_nz(op)


def fills_tiles(described: Any) -> bool:
    """Whether a described tensor divides into tiles of 16 rows of 32 bytes; padding would make it larger than the memory plan says."""
    width = _TILE_WIDTHS.get(described.dtype)
    shape = list(described.shape.dim)
    return width is not None and len(shape) > 1 and shape[-2] % 16 == 0 and shape[-1] % width == 0

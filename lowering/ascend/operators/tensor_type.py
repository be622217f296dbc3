"""The type of a tensor of an NPU graph: dtype, sizes and storage format."""

from __future__ import annotations

import math
from dataclasses import dataclass

ND, NZ = "ND", "NZ"
"""Row-major memory, and the tiled format of matrix units."""
BITS = {
    "i4": 4, "i8": 8, "u8": 8, "bool": 8, "f8e4m3": 8, "f8e5m2": 8, "i16": 16, "u16": 16, "f16": 16, "bf16": 16,
    "i32": 32, "u32": 32, "f32": 32, "i64": 64, "u64": 64, "f64": 64,
}  # fmt: skip
"""Size of an element by the short name of its dtype."""
DTYPES = {
    "DT_FLOAT": "f32",
    "DT_FLOAT16": "f16",
    "DT_BF16": "bf16",
    "DT_DOUBLE": "f64",
    "DT_INT4": "i4",
    "DT_INT8": "i8",
    "DT_UINT8": "u8",
    "DT_INT16": "i16",
    "DT_UINT16": "u16",
    "DT_INT32": "i32",
    "DT_UINT32": "u32",
    "DT_INT64": "i64",
    "DT_UINT64": "u64",
    "DT_BOOL": "bool",
}
"""Short name of a dtype by its name in GE's messages."""
ATTRIBUTE_DTYPES = {
    0: "f32", 1: "f16", 2: "i8", 3: "i32", 4: "u8", 6: "i16", 7: "u16", 8: "u32", 9: "i64", 10: "u64", 11: "f64", 12: "bool", 27: "bf16",
    29: "i4",
}  # fmt: skip
"""Short name of a dtype by its number in attributes, which is that of GE's own enumeration (torchair.ge.DataType)."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """What an operator is told of a tensor.

    Attributes:
        dtype: short name, one of `BITS`.
        shape: sizes in elements; of an int4 tensor its int4 elements.
        format: "ND", "NZ", or the name that a TransData gives.
    """

    dtype: str
    shape: tuple[int, ...]
    format: str = ND

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return (self.elements * BITS[self.dtype] + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]" + ("" if self.format == ND else f" {self.format}")

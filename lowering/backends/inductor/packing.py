"""Packs parameters when they are loaded: once for all packages of a process that read the same layout of the same tensor."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import huge_pages

KINDS: Mapping[str, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.int32}
"""Layout -> dtype of the weights that it is made of."""


class Layout(NamedTuple):
    """How the bytes of one parameter lie.

    Attributes:
        kind: a name of `KINDS`.
        matrices: that lie one behind the other.
        rows, columns: of each, as stored.
    """

    kind: str
    matrices: int
    rows: int
    columns: int


_ALIGNED = 64

_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> layout -> the tensor that was made of it. A parameter that is packed must not be changed."""


class Packer:
    """The library of a package that packs parameters (lowering/cpp/pack.cpp).

    Args:
        library: its bytes.

    Raises:
        OSError: it is no library of this machine.
    """

    def __init__(self, library: bytes) -> None:
        self._library = _loaded(library)

    def pack(self, params: Sequence[torch.Tensor], wanted: Mapping[int, Layout]) -> dict[int, torch.Tensor]:
        """The packed parameters by position: tensors of the parameters' shapes and dtypes, with the bytes of their layouts."""
        missing = {i: layout for i, layout in wanted.items() if layout not in _KNOWN.get(params[i], {})}
        sizes = [-(-self._bytes(layout) // _ALIGNED) * _ALIGNED for layout in missing.values()]
        memory, at = huge_pages.joined_later(sum(sizes)) if missing else torch.empty(0), 0
        for (i, layout), size in zip(missing.items(), sizes, strict=True):
            made = memory[at : at + size]
            self._function("npuc_pack", layout)(_pointer(params[i]), layout.matrices, layout.rows, layout.columns, _pointer(made))
            same = made.view(params[i].dtype)[: params[i].numel()].view(params[i].shape)
            _KNOWN.setdefault(params[i], {})[layout] = same
            at += size
        return {i: _KNOWN[params[i]][layout] for i, layout in wanted.items()}

    def _bytes(self, layout: Layout) -> int:
        function = self._function("npuc_packed", layout)
        function.restype = ctypes.c_int64
        return layout.matrices * int(function(layout.rows, layout.columns))

    def _function(self, prefix: str, layout: Layout) -> Any:
        function = getattr(self._library, f"{prefix}_{layout.kind}")
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = (size, size) if prefix == "npuc_packed" else (pointer, size, size, size, pointer)
        return function


@functools.cache
def _loaded(library: bytes) -> ctypes.CDLL:
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        return ctypes.CDLL(file.name)


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()

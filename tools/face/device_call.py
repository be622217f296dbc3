"""A compiled function on one device: operands in its memory, and results read back."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ...graphs.errors import LoweringError
from ...graphs.types import Signature
from ...lowering.device import open_device


class DeviceCall:
    """An executable on the first device of this machine, compiled for operands that stay where they are.

    Args:
        kind: of device, "npu" or "emulated".
        data: bytes of the executable.
        suffix: of its file.
        signature: of its graph, all of whose operands are inputs.
        packages: operator packages that it was built for.

    Raises:
        LoweringError: the device is not there, or refuses the graph.
    """

    def __init__(self, kind: str, data: bytes, suffix: str, signature: Signature, packages: Sequence[str]) -> None:
        self._device = open_device(kind)
        weakref.finalize(self, self._device.close)
        self._device.enter()
        self._device.load_packages(packages)
        with tempfile.TemporaryDirectory(prefix="npucompile-") as directory:
            file = Path(directory) / f"function.{suffix}"
            file.write_bytes(data)
            self._executable = self._device.open(file, 0, {})
        if self._executable.derived(()):
            raise LoweringError("the graph reads values that are derived from parameters; legal is a function, which has none")
        reads = self._executable.reads
        self._operands = [
            self._device.empty(leaf.aval.shape, leaf.aval.dtype) if i in reads else None for i, leaf in enumerate(signature.operands)
        ]
        self._executable.compile(self._operands)

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs it with operands in the host's memory, and returns results there.

        Raises:
            LoweringError: the device failed.
        """
        self._device.enter()
        for operand, value in zip(self._operands, values, strict=True):
            if operand is not None:
                operand.copy_(value)
        results = self._executable(self._operands)
        self._device.record().wait()
        return [result.cpu() for result in results]

"""A fault of an emulated device: what it does in place of one of its steps, as devices were reported to do."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import torch

from ....graphs.errors import LoweringError, SpecError
from .stream import Stream

RAISES, ABORTS, HANGS, MEMORY = "raises", "aborts", "hangs", "memory"
KINDS = (RAISES, ABORTS, HANGS, MEMORY)


@dataclass(frozen=True)
class Fault:
    """A fault of a device, once.

    Attributes:
        step: at which it happens, from 1 on, of all graphs of the device.
        kind: the call raises, and the device answers nothing else; the process aborts; the call never returns; or it finds no memory.
        text: what is raised.
    """

    step: int
    kind: str
    text: str = "EZ9999: Inner Error! The error from device: there is an aivec error exception, error code is 507015"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"a fault is {self.kind!r}; legal are {', '.join(KINDS)}")

    def strike(self, step: int, stream: Stream) -> None:
        """Happens, if it is its step.

        Raises:
            RuntimeError: as torch_npu does.
        """
        if step != self.step:
            return
        if self.kind == ABORTS:
            os.abort()
        if self.kind == HANGS:
            threading.Event().wait()
        if self.kind == MEMORY:
            raise torch.OutOfMemoryError(f"NPU out of memory. Tried to allocate 2.00 GiB ({stream.name}; 61.28 GiB total capacity)")
        stream.launch("a kernel", _lost)
        raise RuntimeError(self.text)


def _lost() -> None:
    raise LoweringError("the context of the device is lost: 507015")

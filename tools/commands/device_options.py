"""The options of every command that runs an artifact: on which kind of device, with which weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..serve.options import CHECKPOINT, DEVICE


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--device` and `--checkpoint`."""
    return DEVICE.as_decorator()(CHECKPOINT.as_decorator()(command))

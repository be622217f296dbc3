"""The options of every command that runs an artifact: on which kind of device, with which weights, without what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..serve.options import CHECKPOINT, DEVICE, OFF


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--device`, `--checkpoint` and `--off`."""
    return DEVICE.as_decorator()(CHECKPOINT.as_decorator()(replace(OFF, seldom=False).as_decorator()(command)))

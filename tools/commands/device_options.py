"""The options of every command that runs an artifact: on which kind of device, with which weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEVICES = ("auto", "cpu", "npu", "emulated")


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--device` and `--checkpoint`."""
    device = click.option(
        "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
        help="Where an artifact runs: auto is what it was built for; emulated interprets the graphs of an artifact for NPUs on this CPU.",
    )  # fmt: skip
    checkpoint = click.option(
        "--checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Read the weights of an artifact for NPUs from this directory.  [default: where the build found them]",
    )  # fmt: skip
    return device(checkpoint(command))

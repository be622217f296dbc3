"""Compares the CANN and the chip that an artifact is opened on with those that its graphs were built for.

Torchair asks the installed CANN whether it knows an operator's inputs and attributes when it converts a graph; on a machine without CANN
that question has no answer (toolchain/harness.py), so it is asked again where the graph is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ....graphs.errors import LoweringError
from ...platform import CANN_RELEASES, Platform
from ..acl_graph.file import AclFile
from ..ge_file import GeFile
from . import check
from .table import release

_CHIPS = {"ascend910_93": r"Ascend910_93\w*", "ascend910b": r"Ascend910B\w*"}


def chip_of(version: str) -> str:
    """The chip of a device by its `version`, as CANN's operator definitions name it; "" where nothing is known of it."""
    return next((chip for chip, pattern in _CHIPS.items() if re.fullmatch(f"cann-.*-{pattern}", version)), "")


def check_running(version: str, platform: Platform, graphs: Iterable[Callable[[], GeFile | AclFile]]) -> None:
    """Refuses a device whose CANN is older than the one that graphs were built for, or newer and takes them no longer.

    Args:
        version: of the device (`lowering.device.Device`), "cann-9.1.0-Ascend910_9391"; a device without CANN is not compared.
        platform: what the graphs were built for.
        graphs: read the graphs, which happens only where the running release is newer.

    Raises:
        LoweringError: naming both releases, or both chips.
    """
    match = re.fullmatch(r"cann-(\d+\.\d+)\S*?-(Ascend\w+)", version)
    if match is None or not platform.chip:
        return
    running, chip = match[1], match[2]
    if not re.fullmatch(_CHIPS[platform.chip], chip):
        raise LoweringError(f"the artifact was built for {platform.chip}, and this machine has {chip}; legal is {_CHIPS[platform.chip]}")
    if release(running) < release(platform.cann):
        raise LoweringError(
            f"the artifact was built for CANN {platform.cann}, and CANN {running} runs here; legal is {platform.cann} or newer, or a build"
            f" with --cann {running}"
        )
    known = [known for known in CANN_RELEASES if release(known) <= release(running)]
    if release(known[-1]) > release(platform.cann):
        newer = Platform(platform.chip, known[-1], platform.packages)
        for read in graphs:
            check.prove(read(), newer, sizes=False)

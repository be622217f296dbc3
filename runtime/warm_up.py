"""The start of buckets on a device: each is compiled and runs a step of padding before steps are served, in one order on all ranks.

GE loads a graph at its first run: it takes the memory of its intermediate values (the feature map), streams, events and links of its
communicators then, for seconds (torchair, static_npu_graph_executor.cpp). That memory is the first kept block that is large enough, or
else a new one that is kept for ever (memory/Allocator.cpp): in order of falling size all graphs share one, in another the blocks add up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..graphs.errors import LoweringError
from ..graphs.types import Bucket
from ..lowering.artifact.manifest import GraphEntry
from ..lowering.device import Device, DeviceExecutable

log = logging.getLogger(__name__)

LIMIT_S = 300.0
"""How long a bucket's first step may take."""

COMPILED, CACHED = "compiled", "cached"
BEGINS = ""
Report = Callable[[Bucket, float, str], None]
"""Called with each bucket before it starts (`BEGINS`) and after: its seconds, and `COMPILED`, `CACHED` or why it cannot run."""
Agree = Callable[[str, float | None], str]
"""Waits for all ranks, so many seconds at most, each of which says why it could not do something, or ""; returns what the first such
rank said."""


@dataclass(frozen=True)
class WarmUp:
    """Starts buckets.

    Attributes:
        agree: of all ranks.
        cache_dir: an existing directory of compiled graphs; None keeps none.
        limit_s: how long a first step may take; None waits for ever.
    """

    device: Device
    agree: Agree
    cache_dir: Path | None
    limit_s: float | None

    def start(self, entry: GraphEntry, executable: DeviceExecutable, operands: Sequence[torch.Tensor | None]) -> str:
        """Compiles a bucket and runs one step of what lies in its inputs; returns `COMPILED`, `CACHED` or why some rank cannot.

        Raises:
            LoweringError: the device failed, a rank is late, or one cannot run what this one has queued, which would wait for it.
        """
        began, before, outcome = time.monotonic(), self.device.used_bytes(), ""

        def compile_graph() -> None:
            nonlocal outcome
            outcome = COMPILED if executable.compile(operands, self.cache_dir) else CACHED

        for act in (lambda: executable.warm_up(operands), compile_graph, lambda: executable(operands)):
            own, acted = "", time.monotonic()
            try:
                act()
            except LoweringError as error:
                own = str(error)
            # Compilers take as long as they need.
            if reason := self.agree(own, None if act is compile_graph else self.limit_s):
                if entry.collectives and not own and act is not compile_graph:
                    raise LoweringError(f"{entry.bucket.name}: {reason}; on this rank the step waits for that one")
                return reason
            self.device.record().wait(self.limit_s)
        seconds, more = time.monotonic() - began, self.device.used_bytes() - before
        text = "%s: %s and warm after %.1f s, of which its first step took %.1f s; %.1f MiB of device memory more"
        log.info(text, entry.bucket.name, outcome, seconds, time.monotonic() - acted, more / 2**20)
        return outcome


def in_order(entries: Iterable[GraphEntry]) -> list[GraphEntry]:
    """Graphs in the order in which they start: that with the largest intermediate values first."""
    return sorted(entries, key=lambda entry: (-entry.memory["peak_bytes"], entry.bucket))

"""What the backends for NPUs share: they convert with torch_npu wherever it is installed, and run where CANN is too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend import Backend
from .toolchain import harness
from .toolchain.stubs import cann


class NpuBackend(Backend):
    """Files name operators and no processor: what is built on x86-64 opens on aarch64.

    Attributes:
        graph: what a file of the backend holds, in the words of a message.
    """

    graph: str
    host_bound = False
    build_only = tuple(name for name in harness.DISTRIBUTIONS if name != "torch_npu")

    def options(self, threads: int) -> Mapping[str, Any]:
        """The sources that make and check executables."""
        from . import sources

        return {"sources": sources.digest()}

    def versions(self) -> Mapping[str, str]:
        """Versions of torch_npu and the distributions that it needs."""
        versions = harness.installed()
        return {name: versions.get(name, "") for name in harness.DISTRIBUTIONS}

    def compiles_here(self) -> str | None:
        """Says which part of torch_npu is missing."""
        return harness.available()

    def runs_here(self) -> str | None:
        """Says that CANN or a part of torch_npu is missing."""
        if reason := harness.lacking(harness.installed()):
            return reason
        return None if cann(None) else f"running {self.graph} needs CANN and an NPU, and this machine has no CANN"

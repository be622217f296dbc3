"""How the processes of an artifact's ranks run, the same on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import Store

from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact
from ...lowering.device import CPU, EMULATED, NPU, Device, open_device

SILENCE_MARGIN_S = 10.0
STEP_TIMEOUT_S = {CPU: 60.0, NPU: 60.0, EMULATED: 1800.0}
"""By device. An interpreted step of a model with many layers takes minutes where many ranks share few cores."""
OpenDevice = Callable[[str, int], Device]
"""Opens a device of that kind and number; ranks that are started get it pickled."""

Cores = tuple[tuple[int, ...], ...]
"""Cores of each rank of a machine, by its number there."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands among all ranks of a mesh.

    Attributes:
        local_rank: its number on its machine, which is also that of its device.
        store: shared by all ranks, for the process groups and the start of buckets.
        address: of its machine, as the other ranks reach it.
    """

    mesh: Mesh
    rank: int
    local_rank: int
    store: Store
    address: str


BeforeLoading = Callable[[Artifact, Device, RankPlace, Mapping[str, str]], object]
"""Called with the artifact, a rank's device, its place and its communicators by symbol; ranks that are started get it pickled."""


@dataclass(frozen=True)
class RankSettings:
    """How ranks run.

    Attributes:
        threads: CPU threads of each rank; None divides the cores of this machine.
        join_timeout_s: how long ranks wait for each other at the start.
        step_timeout_s: how long a rank waits for the slowest one within a step, and for its device; None is as long as the device needs.
        device: "cpu", "npu" or "emulated".
        checkpoint: directory to read weights from in place of the one that the artifact names.
        expert_map: file of a map of experts, or its JSON text, in place of the one that the artifact was built with.
        cache: directory of compiled graphs, which outlives the process; None keeps none.
        random_weights: whether to draw weights in place of reading them, where the artifact has none.
        before_loading: called on each rank of several with its device, its place and its communicators, before anything is loaded.
        ship_compiled: whether compiled graphs are kept in the artifact, in place of `cache`.
        open_device: opens the device of a rank, `lowering.device.open_device` but for devices with faults.
        host_address: of this machine, as the other machines reach it; None finds it by the route to them.
        off: switches that are off (`lowering.switches`).
        bucket: one that is started although those of its kind are not.
        without: buckets that are not started where others of their kind are.
        cores: that each rank of this machine is bound to, by its number there (binding.py); () binds none.
    """

    threads: int | None = None
    join_timeout_s: float = 60.0
    step_timeout_s: float | None = None
    device: str = CPU
    checkpoint: Path | None = None
    expert_map: str | None = None
    cache: Path | None = None
    random_weights: bool = False
    before_loading: BeforeLoading | None = None
    ship_compiled: bool = False
    host_address: str | None = None
    open_device: OpenDevice = open_device
    cores: Cores = ()
    off: frozenset[str] = frozenset()
    bucket: str = ""
    without: frozenset[str] = frozenset()

    @property
    def step_limit_s(self) -> float:
        """`step_timeout_s`, or the default of the device."""
        return STEP_TIMEOUT_S[self.device] if self.step_timeout_s is None else self.step_timeout_s

    @property
    def silence_s(self) -> float:
        """How long a rank may be silent. Compiled code holds the GIL while it waits in a collective, so no heartbeat is sent."""
        return self.step_limit_s + SILENCE_MARGIN_S

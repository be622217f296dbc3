"""The environment of a rank's process: what its artifact plans, where the user has not set it himself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.manifest import Variable
from ...lowering.ascend import vendors
from ...lowering.device import CPU
from ...lowering.platform import Platform
from ...lowering.switches import AIV
from ..cli import Home
from ..progress import Progress
from .rank_settings import RankSettings

OTHER_NAMES = {"PYTORCH_NPU_ALLOC_CONF": "PYTORCH_ALLOC_CONF", "HCCL_IF_IP": "HCCL_SOCKET_IFNAME"}
"""Variables that say the same. torch_npu ends the process when both of its own are set (TorchNPU, PYTORCH_NPU_ALLOC_CONF); HCCL prefers
the address to the interface, so that one of ours would overrule an interface of the user's (CANN, HCCL_IF_IP)."""

EXPANSION_MODE = "HCCL_OP_EXPANSION_MODE"
"""Of which one that is not set means HCCL's own choice."""

ILLEGAL = {("TASK_QUEUE_ENABLE", "2")}
"""Values under which what an artifact plans another one for does not run at all."""

V = TypeVar("V")


@dataclass(frozen=True)
class MergedEnvironment:
    """What to do about the variables of an artifact.

    Attributes:
        variables: to set before torch_npu is imported; none of them is set yet.
        notes: a sentence for each planned variable that keeps a value of the user's.
    """

    variables: Mapping[str, str]
    notes: tuple[str, ...]


def merged(planned: Mapping[str, Variable], environment: Mapping[str, str]) -> MergedEnvironment:
    """Compares the plan of an artifact (`Manifest.environment`) with a process's environment; a variable that is set keeps its value.

    Raises:
        SpecError: the value is one of `ILLEGAL`.
    """
    variables, notes = {}, []
    for name, setting in sorted(planned.items()):
        present = next((other for other in (name, OTHER_NAMES.get(name, name)) if other in environment), None)
        if present is None:
            variables[name] = setting.value
        elif (name, environment[present]) in ILLEGAL:
            raise SpecError(f"{name} is {environment[present]!r} in this environment; legal is {setting.value}: {setting.why}")
        elif (present, environment[present]) != (name, setting.value):
            notes.append(
                f"{present} is {environment[present]!r} in this environment and stays so; the artifact plans {name}={setting.value}: "
                f"{setting.why}"
            )
    return MergedEnvironment(variables, tuple(notes))


def under(off: Collection[str], variables: Mapping[str, V]) -> dict[str, V]:
    """The variables that are set where these switches are off."""
    return {name: value for name, value in variables.items() if name != EXPANSION_MODE or AIV not in off}


def applied(home: Home, artifact: Artifact, settings: RankSettings, progress: Progress, address: str = "") -> Home:
    """Sets the variables of an artifact for NPUs in this process, and for those that it starts; says which ones keep the user's value.

    Args:
        address: of this machine, as the other machines reach it; "" where there are none.

    Raises:
        SpecError: a variable has a value under which the artifact does not run.
        LoweringError: a vendor in the user's environment redefines operators of CANN (`vendors.check_vendors`).
    """
    if settings.device == CPU:
        return home
    vendors.check_vendors(home.environment.get(vendors.VARIABLE, ""), Platform.of(artifact.manifest.platform))
    own = {"HCCL_IF_IP": Variable(address, "by it the other machines reach this one")} if address else {}
    if AIV in settings.off:
        home = home.without_variable(EXPANSION_MODE)
    environment = merged({**under(settings.off, artifact.manifest.environment), **own}, home.environment)
    for note in environment.notes:
        progress.say(note)
    return home.with_variables(environment.variables)

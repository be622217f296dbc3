"""What there is to run on: the device, its versions, and the environment that the artifact plans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ....lowering.artifact.artifact import Artifact
from ....lowering.ascend.inventory import inventory
from ....lowering.ascend.toolchain.harness import ASSUMED_CANN, installed
from ....lowering.device import Device
from ....lowering.platform import Platform
from ....lowering.toolchain import toolchain
from ...host import read_host
from ...ranks.environment import merged, under
from .device_graph import Host
from .results import ENVIRONMENT, BringupFailure, Judgement

DRIVER = Path("/usr/local/Ascend/driver/version.info")
"""Where the Ascend driver writes its version."""


@dataclass(frozen=True)
class EnvironmentCase:
    """The environment of an artifact.

    Attributes:
        path: of the artifact.
        environment: of the process that started this one.
    """

    path: Path
    environment: Mapping[str, str]
    name, assumption = ENVIRONMENT, "device"

    def judge(self, host: Host) -> Judgement:
        """Looks at it."""
        failures, facts = check_environment(Artifact.open(self.path, check=False), host, self.environment)
        return Judgement(failures, facts=facts)


def check_environment(artifact: Artifact, host: Host, environment: Mapping[str, str]) -> tuple[list[BringupFailure], dict[str, Any]]:
    """The device answers, its CANN is not older than the one that graphs were converted for, and planned variables are set.

    Args:
        environment: of this process.
    """
    device, planned = host.device, merged(under(host.off, artifact.manifest.environment), environment)
    host_settings = read_host()
    facts: dict[str, Any] = {
        "device": device.name,
        "device_version": device.version,
        "toolchain": dict(toolchain()),
        "built_with": dict(artifact.manifest.toolchain),
        "driver": driver_version(DRIVER),
        "ranks": Mesh.parse(artifact.manifest.mesh).size,
        "environment": {name: environment.get(name, "") for name in artifact.manifest.environment},
        "notes": [*planned.notes, *(f"{found.name} is {found.found}; {found.advice}" for found in host_settings if found.advice)],
        "host": {found.name: found.found for found in host_settings},
    }
    failures = []
    if planned.variables:
        missing = ", ".join(f"{name}={value}" for name, value in planned.variables.items())
        failures.append(BringupFailure("toolchain", "environment", f"not set in this process: {missing}"))
    if (release := cann_release(device)) is not None and release < _numbers(ASSUMED_CANN):
        message = f"{device.name} has {device.version}; graphs were converted for CANN {ASSUMED_CANN}: build with this CANN's number"
        failures.append(BringupFailure("toolchain", "CANN", message))
    if home := environment.get("ASCEND_HOME_PATH"):
        platform, captured = Platform.of(artifact.manifest.platform), artifact.manifest.backend != "ge"
        items = [*inventory(Path(home), environment, [platform], installed().get("torch_npu", ""), captured=captured)]
        facts["inventory"] = {item.name: item.found for item in items}
        failures += [BringupFailure("toolchain", item.name, f"{item.found}: {item.advice}") for item in items if item.advice]
    try:
        failures += _memory(host)
    except LoweringError as error:
        failures.append(BringupFailure("device", "copies", str(error)))
    return failures, facts


def _memory(host: Host) -> list[BringupFailure]:
    """Copies to the device and back, through page-locked memory."""
    value = torch.arange(4096, dtype=torch.int32)
    memory = host.device.empty((4096,), torch.int32)
    host.write(memory, value)
    zeros = host.read(host.device.zeros((16,), torch.float32))
    if torch.equal(host.read(memory), value) and not bool(zeros.any()):
        return []
    return [BringupFailure("device", "copies", "what was copied to the device came back as something else")]


def driver_version(path: Path) -> str:
    """The version in the driver's file, or "" where there is none."""
    if not path.is_file():
        return ""
    match = re.search(r"^Version=(\S+)", path.read_text(errors="replace"), re.MULTILINE)
    return match.group(1) if match else ""


def cann_release(device: Device) -> tuple[int, ...] | None:
    """The release of CANN in a device's version; None for one that has no CANN."""
    match = re.match(r"cann-(\d+)\.(\d+)", device.version)
    return (int(match[1]), int(match[2])) if match else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])

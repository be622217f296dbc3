"""What a machine needs to build and to run, a record a check, and what to install where it is not there."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..graphs.control_group import processors
from ..graphs.errors import LoweringError
from ..lowering import isa
from ..lowering.ascend import inventory
from ..lowering.ascend.legality.table import CHIPS
from ..lowering.ascend.toolchain.harness import DISTRIBUTIONS, installed, lacking
from ..lowering.ascend.toolchain.stubs import cann, find_compiler
from ..lowering.backends.inductor import unpacking
from ..lowering.backends.inductor.aoti import compiler
from ..lowering.platform import Platform
from .bench.machine import CPUINFO, cpu_model
from .heap import available_bytes
from .host import HostFinding

MEMINFO, DEVICES = Path("/proc/meminfo"), Path("/dev")
NEEDED_MEMORY_BYTES = 2 * 2**30
"""Enough to compile a bucket of the bundled model, torch included."""
OK, MISSING, ABSENT = "ok", "missing", "-"
"""A check passed; failed; or is about hardware that is optional."""
NEEDS = {
    "cpu": "Build and serve on this CPU",
    "ascend": "Build for Ascend (no NPU needed)",
    "npu": "Run on NPUs here",
}
"""What checks are needed for; each also needs what the ones before it need."""
Environment = Mapping[str, str]


@dataclass(frozen=True)
class Check:
    """One thing that a machine may have.

    Attributes:
        needed_for: one of `NEEDS`.
        look: its version, size or path, and what to install or do where that will not do; None where the check does not apply. A
            LoweringError says that there is none.
    """

    name: str
    needed_for: str
    look: Callable[[Environment], tuple[str, str] | None]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        state: `OK`, `MISSING` or `ABSENT`.
        advice: what to install or do, or "".
    """

    name: str
    state: str
    found: str
    needed_for: str
    advice: str


def examine(environment: Environment) -> list[Finding]:
    """All checks that apply to this machine; those that everything needs come first.

    Args:
        environment: variables of this process; `ASCEND_HOME_PATH` is read.
    """
    findings = []
    for check in CHECKS:
        try:
            result = check.look(environment)
        except LoweringError as error:
            result = "none", str(error)
        if result is not None:
            present, advice = result
            state = OK if not advice else ABSENT if check.needed_for == "npu" else MISSING
            findings.append(Finding(check.name, state, present, check.needed_for, advice))
    return findings


def inventory_of(environment: Environment) -> list[Finding]:
    """What this machine's CANN has of what graphs need, for each chip that it has kernels of; nothing where there is no CANN.

    Args:
        environment: variables of this process, which ranks get too.
    """
    if not (path := environment.get("ASCEND_HOME_PATH")):
        return []
    home = Path(path)
    there = [chip for chip in CHIPS if (home / inventory.TBE / "kernel" / chip).is_dir()]
    items = inventory.inventory(home, environment, [Platform(chip) for chip in there or CHIPS], installed().get("torch_npu", ""))
    return [Finding(item.name, ABSENT if item.advice else OK, item.found, "npu", item.advice) for item in items]


def of_host(findings: Sequence[HostFinding]) -> list[Finding]:
    """Settings of the kernel as findings: any will do, those that are advised are faster on NPUs."""
    return [Finding(found.name, ABSENT if found.advice else OK, found.found, "npu", found.advice) for found in findings]


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether this machine can build and serve on its CPU."""
    return not any(finding.state == MISSING for finding in findings if finding.needed_for == "cpu")


def verdict(findings: Sequence[Finding]) -> list[str]:
    """Whether this machine can do each of `NEEDS`."""
    lines = []
    for number, title in enumerate(NEEDS.values()):
        needs = list(NEEDS)[: number + 1]
        lacking_here = [finding.name for finding in findings if finding.needed_for in needs and finding.state != OK]
        lines.append(f"{title}: {'no, see ' + ', '.join(lacking_here) if lacking_here else 'yes'}")
    return lines


def pinned(requirements: Sequence[str], name: str) -> str:
    """The version in `name==version` among requirements as package metadata has them, or "" where any will do."""
    matches = [re.match(rf"{name}\s*==\s*([^\s;,]+)", requirement) for requirement in requirements]
    return next((match.group(1) for match in matches if match), "")


def npu_files(devices: Path) -> list[str]:
    """Names of the device files of the Ascend driver, one per NPU."""
    names = [path.name for path in devices.glob("davinci*") if re.fullmatch(r"davinci\d+", path.name)]
    return sorted(names, key=lambda name: int(name.removeprefix("davinci")))


def _python(_: Environment) -> tuple[str, str]:
    version, wanted = platform.python_version(), str(importlib.metadata.metadata("npucompile")["Requires-Python"]).removeprefix(">=")
    return version, "" if _numbers(version) >= _numbers(wanted) else f"install Python {wanted} or newer"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _torch(_: Environment) -> tuple[str, str]:
    version = installed().get("torch", "not installed")
    wanted = pinned(importlib.metadata.requires("npucompile") or [], "torch")
    # The part after the plus names the build ("+cpu").
    return version, "" if wanted in ("", version.split("+")[0]) else f"pip install torch=={wanted}"


def _cpu(_: Environment) -> tuple[str, str]:
    model = cpu_model(CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else "")
    hidden = f" by {isa.SWITCH}" if isa.ISA else ""
    return f"{model}, {processors()} cores, {isa.described()}{hidden}", ""


def _cxx(_: Environment) -> tuple[str, str]:
    path, version = compiler()
    return f"{version} at {path}", ""


def _memory(_: Environment) -> tuple[str, str]:
    available = available_bytes(MEMINFO.read_text(encoding="utf-8") if MEMINFO.is_file() else "")
    if not available:
        return "this system does not say", ""
    advice = f"free some: a build needs {NEEDED_MEMORY_BYTES // 2**30} GiB" if available < NEEDED_MEMORY_BYTES else ""
    return f"{available / 2**30:.1f} GiB available", advice


def _temporary(environment: Environment) -> tuple[str, str]:
    directory = environment.get("TMPDIR") or "/tmp"
    return directory, unpacking.problem(Path(directory)) or ""


def _extra(_: Environment) -> tuple[str, str]:
    versions = installed()
    present = ", ".join(f"{name} {versions[name]}" for name in DISTRIBUTIONS[:2] if name in versions)
    return present or "not installed", lacking(versions) or ""


def _cann(environment: Environment) -> tuple[str, str] | None:
    path = cann(environment.get("ASCEND_HOME_PATH"))
    return (path, "") if path else None


def _cann_runtime(environment: Environment) -> tuple[str, str] | None:
    advice = "to run on NPUs, install CANN and source its set_env.sh; building does without"
    return None if _cann(environment) else ("none; stub libraries stand in for it when building", advice)


def _npus(environment: Environment) -> tuple[str, str] | None:
    if not _cann(environment):
        return None
    if not (files := npu_files(DEVICES)):
        return "none", "the Ascend driver shows no /dev/davinci0; in a container, pass the devices in"
    return f"{len(files)} ({files[0]} to {files[-1]})", ""


CHECKS = (
    Check("python", "cpu", _python),
    Check("torch", "cpu", _torch),
    Check("cpu", "cpu", _cpu),
    Check("C++ compiler", "cpu", _cxx),
    Check("memory", "cpu", _memory),
    Check("temporary files", "cpu", _temporary),
    Check("torch_npu extra", "ascend", _extra),
    Check("CANN", "ascend", _cann),
    Check("C compiler for stub CANN libraries", "ascend", lambda environment: None if _cann(environment) else (find_compiler(), "")),
    Check("CANN runtime", "npu", _cann_runtime),
    Check("NPU devices", "npu", _npus),
)

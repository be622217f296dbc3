"""Turns what is known of a machine into what it can build and run, line by line, with what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..graphs.errors import LoweringError
from ..lowering.ascend.toolchain.harness import DISTRIBUTIONS, installed, lacking
from ..lowering.ascend.toolchain.stubs import cann, find_compiler
from ..lowering.backends.inductor.aoti import compiler
from .bench.machine import CPUINFO, cpu_model

MEMINFO = Path("/proc/meminfo")
DEVICES = Path("/dev")

NEEDED_MEMORY_BYTES = 2 * 2**30
"""What compiling a bucket of the bundled model takes beside torch itself, with room to spare."""

OK, MISSING, ABSENT = "ok", "missing", "-"
"""A check passed; failed; or is of hardware that need not be there."""


@dataclass(frozen=True)
class Machine:
    """What the checks look at; nothing else is asked.

    Attributes:
        python: version of the interpreter.
        wanted_python: oldest version that will do.
        versions: installed versions, by distribution.
        wanted_torch: the one version of torch this npucompile works with.
        cpu: name of the CPU, and cores this process may use.
        cxx: the C++ compiler, or why there is none.
        cc: path of the C compiler, or why there is none.
        cann: what says that CANN is here, or None.
        npus: device files of NPUs.
        memory_bytes: main memory that can be had now; 0 where the system does not say.
    """

    python: str
    wanted_python: str
    versions: Mapping[str, str]
    wanted_torch: str
    cpu: str
    cxx: str | LoweringError
    cc: str | LoweringError
    cann: str | None
    npus: tuple[str, ...]
    memory_bytes: int


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        name: what was looked at.
        state: `OK`, `MISSING` or `ABSENT`.
        found: what is there.
        needed_for: "cpu": building and serving here; "ascend": building for Ascend; "npu": running on an NPU.
        advice: what to install or do; "" when nothing.
    """

    name: str
    state: str
    found: str
    needed_for: str
    advice: str = ""


def look(environment: Mapping[str, str]) -> Machine:
    """This machine, now.

    Args:
        environment: variables of this process; read is `ASCEND_HOME_PATH`.
    """
    project = importlib.metadata.metadata("npucompile")
    return Machine(
        python=platform.python_version(),
        wanted_python=str(project["Requires-Python"]).removeprefix(">="),
        versions=installed(),
        wanted_torch=pinned(project.get_all("Requires-Dist") or [], "torch"),
        cpu=f"{cpu_model(CPUINFO.read_text(encoding='utf-8') if CPUINFO.is_file() else '')}, {len(os.sched_getaffinity(0))} cores",
        cxx=_cxx(),
        cc=_cc(),
        cann=cann(environment.get("ASCEND_HOME_PATH")),
        npus=tuple(npu_files(DEVICES)),
        memory_bytes=available_bytes(MEMINFO.read_text(encoding="utf-8") if MEMINFO.is_file() else ""),
    )


def examine(machine: Machine) -> list[Check]:
    """All checks, those that everything needs first."""
    return [
        _python(machine),
        _torch(machine),
        Check("cpu", OK, f"{machine.cpu}, {torch.backends.cpu.get_cpu_capability()}", "cpu"),
        _compiler("C++ compiler", machine.cxx, "cpu"),
        _memory(machine),
        *_lowering(machine),
        *_npu(machine),
    ]


def healthy(checks: list[Check]) -> bool:
    """Whether this machine can build and serve on its CPU."""
    return not [check for check in checks if check.needed_for == "cpu" and check.state == MISSING]


def verdict(checks: list[Check]) -> list[str]:
    """One sentence for each thing npucompile does."""
    titles = {
        "cpu": "Build and serve on this CPU",
        "ascend": "Build for Ascend (no NPU needed)",
        "npu": "Run on NPUs here",
    }
    told = []
    for need, title in titles.items():
        # Each needs what comes before it, too.
        before = list(titles)[: list(titles).index(need) + 1]
        lacking_here = [check.name for check in checks if check.needed_for in before and check.state != OK]
        told.append(f"{title}: {'yes' if not lacking_here else 'no, see ' + ', '.join(lacking_here)}")
    return told


def pinned(requirements: list[str], name: str) -> str:
    """The version in `name==version` among requirements as package metadata has them, or "" where any will do."""
    found = [re.match(rf"{name}\s*==\s*([^\s;,]+)", requirement) for requirement in requirements]
    return next((match.group(1) for match in found if match), "")


def available_bytes(meminfo: str) -> int:
    """Memory a new process can have, from the text of /proc/meminfo; 0 where it does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def npu_files(devices: Path) -> list[str]:
    """Names of the device files that the Ascend driver makes, one per NPU."""
    found = [path.name for path in devices.glob("davinci*") if re.fullmatch(r"davinci\d+", path.name)]
    return sorted(found, key=lambda name: int(name.removeprefix("davinci")))


def _python(machine: Machine) -> Check:
    fits = _numbers(machine.python) >= _numbers(machine.wanted_python)
    return Check(
        "python", OK if fits else MISSING, machine.python, "cpu", "" if fits else f"install Python {machine.wanted_python} or newer"
    )


def _torch(machine: Machine) -> Check:
    held = machine.versions.get("torch", "not installed")
    # What follows the plus says how it was built ("+cpu"), not which version it is.
    fits = not machine.wanted_torch or held.split("+")[0] == machine.wanted_torch
    return Check("torch", OK if fits else MISSING, held, "cpu", "" if fits else f"pip install torch=={machine.wanted_torch}")


def _compiler(name: str, found: str | LoweringError, needed_for: str) -> Check:
    if isinstance(found, LoweringError):
        return Check(name, MISSING, "none", needed_for, str(found))
    return Check(name, OK, found, needed_for)


def _memory(machine: Machine) -> Check:
    if not machine.memory_bytes:
        return Check("memory", OK, "this system does not say", "cpu")
    told = f"{machine.memory_bytes / 2**30:.1f} GiB available"
    if machine.memory_bytes < NEEDED_MEMORY_BYTES:
        return Check("memory", MISSING, told, "cpu", f"free some: a build needs {NEEDED_MEMORY_BYTES // 2**30} GiB")
    return Check("memory", OK, told, "cpu")


def _lowering(machine: Machine) -> list[Check]:
    reason = lacking(machine.versions)
    held = ", ".join(f"{name} {machine.versions[name]}" for name in DISTRIBUTIONS[:2] if name in machine.versions)
    extra = Check("torch_npu extra", MISSING if reason else OK, held or "not installed", "ascend", reason or "")
    if machine.cann is not None:
        return [extra, Check("CANN", OK, machine.cann, "ascend")]
    return [extra, _compiler("C compiler for stub CANN libraries", machine.cc, "ascend")]


def _npu(machine: Machine) -> list[Check]:
    if machine.cann is None:
        advice = "to run on NPUs, install CANN and source its set_env.sh; building does without"
        return [Check("CANN runtime", ABSENT, "none; stub libraries stand in for it when building", "npu", advice)]
    count = f"{len(machine.npus)} ({machine.npus[0]} to {machine.npus[-1]})" if machine.npus else "none"
    advice = "" if machine.npus else "the Ascend driver shows no /dev/davinci0; in a container, pass the devices in"
    return [Check("NPU devices", OK if machine.npus else ABSENT, count, "npu", advice)]


def _cxx() -> str | LoweringError:
    try:
        path, version = compiler()
    except LoweringError as error:
        return error
    return f"{version} at {path}"


def _cc() -> str | LoweringError:
    try:
        return find_compiler()
    except LoweringError as error:
        return error


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])

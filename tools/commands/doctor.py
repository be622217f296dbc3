"""`npucompile doctor`: what this machine can build and run, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from ...graphs.errors import LoweringError
from ...lowering.ascend.toolchain.harness import DISTRIBUTIONS, installed, lacking
from ...lowering.ascend.toolchain.stubs import cann, find_compiler
from ...lowering.backends.inductor.aoti import compiler
from ..bench.machine import CPUINFO, cpu_model
from ..cli import Home
from ..heap import available_bytes

MEMINFO = Path("/proc/meminfo")
DEVICES = Path("/dev")

NEEDED_MEMORY_BYTES = 2 * 2**30
"""Enough to compile a bucket of the bundled model, torch included."""

OK, MISSING, ABSENT = "ok", "missing", "-"
"""A check passed; failed; or is about hardware that is optional."""


@dataclass(frozen=True)
class Host:
    """The properties of this machine that the checks read.

    Attributes:
        python: version of the interpreter.
        wanted_python: oldest version that will do.
        versions: installed versions, by distribution.
        wanted_torch: the one version of torch this npucompile works with.
        cpu: name of the CPU, and cores this process may use.
        cxx: the C++ compiler, or why there is none.
        cc: path of the C compiler, or why there is none.
        cann: how CANN was found, or None.
        npus: device files of NPUs.
        memory_bytes: available memory; 0 where the system does not report it.
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
    """One line of the report.

    Attributes:
        name: of the thing checked.
        state: `OK`, `MISSING` or `ABSENT`.
        found: its version, size or path.
        needed_for: "cpu": building and serving here; "ascend": building for Ascend; "npu": running on an NPU.
        advice: what to install or do, or "".
    """

    name: str
    state: str
    found: str
    needed_for: str
    advice: str = ""


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine can build and run, and what to install for the rest; fails when it cannot serve on its CPU."""
    home: Home = ctx.obj
    checks = examine(look(home.environment))
    if as_json:
        click.echo(json.dumps({"healthy": healthy(checks), "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        click.echo("\n".join([*table(checks), "", *verdict(checks)]))
    if not healthy(checks):
        ctx.exit(1)


def table(checks: list[Check]) -> list[str]:
    """One line a check, and one below it where there is something to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<8} {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<8} {'':<{width}}  {check.advice}")
    return lines


def look(environment: Mapping[str, str]) -> Host:
    """Properties of this machine.

    Args:
        environment: variables of this process; `ASCEND_HOME_PATH` is read.
    """
    project = importlib.metadata.metadata("npucompile")
    return Host(
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


def examine(host: Host) -> list[Check]:
    """All checks; those that everything needs come first."""
    return [
        _python(host),
        _torch(host),
        Check("cpu", OK, f"{host.cpu}, {torch.backends.cpu.get_cpu_capability()}", "cpu"),
        _compiler("C++ compiler", host.cxx, "cpu"),
        _memory(host),
        *_lowering(host),
        *_npu(host),
    ]


def healthy(checks: list[Check]) -> bool:
    """Whether this machine can build and serve on its CPU."""
    return not [check for check in checks if check.needed_for == "cpu" and check.state == MISSING]


def verdict(checks: list[Check]) -> list[str]:
    """For building and serving here, building for Ascend, and running on NPUs, whether this machine can."""
    titles = {
        "cpu": "Build and serve on this CPU",
        "ascend": "Build for Ascend (no NPU needed)",
        "npu": "Run on NPUs here",
    }
    lines = []
    for need, title in titles.items():
        # Each also needs what the ones before it need.
        needs = list(titles)[: list(titles).index(need) + 1]
        lacking_here = [check.name for check in checks if check.needed_for in needs and check.state != OK]
        lines.append(f"{title}: {'yes' if not lacking_here else 'no, see ' + ', '.join(lacking_here)}")
    return lines


def pinned(requirements: list[str], name: str) -> str:
    """The version in `name==version` among requirements as package metadata has them, or "" where any will do."""
    matches = [re.match(rf"{name}\s*==\s*([^\s;,]+)", requirement) for requirement in requirements]
    return next((match.group(1) for match in matches if match), "")


def npu_files(devices: Path) -> list[str]:
    """Names of the device files of the Ascend driver, one per NPU."""
    names = [path.name for path in devices.glob("davinci*") if re.fullmatch(r"davinci\d+", path.name)]
    return sorted(names, key=lambda name: int(name.removeprefix("davinci")))


def _python(host: Host) -> Check:
    fits = _numbers(host.python) >= _numbers(host.wanted_python)
    return Check("python", OK if fits else MISSING, host.python, "cpu", "" if fits else f"install Python {host.wanted_python} or newer")


def _torch(host: Host) -> Check:
    version = host.versions.get("torch", "not installed")
    # The part after the plus names the build ("+cpu").
    fits = not host.wanted_torch or version.split("+")[0] == host.wanted_torch
    return Check("torch", OK if fits else MISSING, version, "cpu", "" if fits else f"pip install torch=={host.wanted_torch}")


def _compiler(name: str, found: str | LoweringError, needed_for: str) -> Check:
    if isinstance(found, LoweringError):
        return Check(name, MISSING, "none", needed_for, str(found))
    return Check(name, OK, found, needed_for)


def _memory(host: Host) -> Check:
    if not host.memory_bytes:
        return Check("memory", OK, "this system does not say", "cpu")
    available = f"{host.memory_bytes / 2**30:.1f} GiB available"
    if host.memory_bytes < NEEDED_MEMORY_BYTES:
        return Check("memory", MISSING, available, "cpu", f"free some: a build needs {NEEDED_MEMORY_BYTES // 2**30} GiB")
    return Check("memory", OK, available, "cpu")


def _lowering(host: Host) -> list[Check]:
    reason = lacking(host.versions)
    versions = ", ".join(f"{name} {host.versions[name]}" for name in DISTRIBUTIONS[:2] if name in host.versions)
    extra = Check("torch_npu extra", MISSING if reason else OK, versions or "not installed", "ascend", reason or "")
    if host.cann is not None:
        return [extra, Check("CANN", OK, host.cann, "ascend")]
    return [extra, _compiler("C compiler for stub CANN libraries", host.cc, "ascend")]


def _npu(host: Host) -> list[Check]:
    if host.cann is None:
        advice = "to run on NPUs, install CANN and source its set_env.sh; building does without"
        return [Check("CANN runtime", ABSENT, "none; stub libraries stand in for it when building", "npu", advice)]
    count = f"{len(host.npus)} ({host.npus[0]} to {host.npus[-1]})" if host.npus else "none"
    advice = "" if host.npus else "the Ascend driver shows no /dev/davinci0; in a container, pass the devices in"
    return [Check("NPU devices", OK if host.npus else ABSENT, count, "npu", advice)]


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

"""graphs/control_group.py: limits of both versions of control groups, of a container and of a group within others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npucompile.graphs import control_group
from npucompile.tools.heap import available_bytes

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the files of groups, and which of them this process is in."""
    monkeypatch.setattr(control_group, "ROOT", tmp_path)
    monkeypatch.setattr(control_group, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def write(own: str, **files: str) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


def test_without_limits_there_are_none(groups) -> None:
    groups("", x="")
    assert (control_group.memory_limit(), control_group.free_memory(), control_group.processors()) == (None, None, 16)
    groups("0::/a\n", a__memory_dot_max="max\n", a__cpu_dot_max="max 100000\n")
    assert (control_group.memory_limit(), control_group.processors()) == (None, 16)
    groups("4:memory:/\n1:cpu:/\n", memory__memory_dot_limit_in_bytes="9223372036854771712\n", cpu__cpu_dot_cfs_quota_us="-1\n")
    assert (control_group.memory_limit(), control_group.processors()) == (None, 16)


def test_a_group_has_no_more_than_those_that_it_is_in(groups) -> None:
    files = {"a__memory_dot_max": str(4 * GIB), "a__b__memory_dot_max": "max", "a__cpu_dot_max": "250000 100000"}
    groups("0::/a/b\n", **files, a__b__cpu_dot_max="400000 100000", a__b__memory_dot_current=str(3 * GIB))
    assert (control_group.memory_limit(), control_group.processors()) == (4 * GIB, 2)
    assert control_group.free_memory() == GIB
    groups("0::/a/b\n", **files, a__b__memory_dot_stat=f"anon 1\ninactive_file {GIB}\n")
    assert control_group.free_memory() == 2 * GIB
    assert available_bytes(f"MemAvailable: {64 * 2**20} kB\n") == 2 * GIB
    assert available_bytes("MemAvailable: 1024 kB\n") == 2**20


def test_of_a_container_the_root_is_its_own_group(groups) -> None:
    """The path is that of the host, which is not there."""
    limits = {
        "memory__memory_dot_limit_in_bytes": str(2 * GIB),
        "cpu__cpu_dot_cfs_quota_us": "50000",
        "cpu__cpu_dot_cfs_period_us": "100000",
    }
    groups("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n", **limits, memory__memory_dot_usage_in_bytes=str(GIB))
    assert (control_group.memory_limit(), control_group.free_memory(), control_group.processors()) == (2 * GIB, GIB, 1)
    groups("0::/../../abc\n", memory_dot_max=str(GIB))
    assert control_group.memory_limit() == GIB


def test_a_build_takes_the_memory_of_the_group_and_a_command_its_threads(tmp_path: Path) -> None:
    """In a process of its own: both are read when modules are loaded."""
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(str(3 * GIB))
    (tmp_path / "cpu.max").write_text("100000 100000")
    program = f"""
import os
from pathlib import Path
from npucompile.graphs import control_group
control_group.ROOT, control_group.OWN = Path({str(tmp_path)!r}), Path({str(tmp_path / "own")!r})
os.sched_getaffinity = lambda _: set(range(8))
from click.testing import CliRunner
from npucompile.tools import cli
CliRunner().invoke(cli.main, ["import", "--help"])
print(os.environ.get("OMP_NUM_THREADS"))
from npucompile.tools.builder.targets import MACHINE_BYTES
print(MACHINE_BYTES)
"""
    for given, threads in ({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3"):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | given
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
        assert ran.stdout.split() == [threads, str(3 * GIB)]

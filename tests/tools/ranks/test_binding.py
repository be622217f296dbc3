"""tools/ranks/binding.py: cores of each rank, and ranks that run on them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npucompile.tools.progress import Progress
from npucompile.tools.ranks.binding import bound, choose_cores, npu_addresses
from npucompile.tools.ranks.rank_settings import RankSettings

SMI = """\
+------------------------------------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 91.8        41                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3404 / 65536         |
| 1     910B3               | OK            | 90.1        42                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3403 / 65536         |
| 2     910B3               | OK            | 90.5        41                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3403 / 65536         |
+---------------------------+---------------+----------------------------------------------------+
"""
DEVICES = ["0000:C1:00.0", "0000:01:00.0", "0000:C2:00.0"]


def machine(root: Path, nodes: dict[str, int], cores: dict[int, str]) -> Path:
    """A fake /sys with the nodes of devices and the cores of nodes."""
    for bus, node in nodes.items():
        (device := root / "sys/bus/pci/devices" / bus.lower()).mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for node, text in cores.items():
        (place := root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (place / "cpulist").write_text(f"{text}\n")
    return root


def test_ranks_share_the_node_of_their_devices(tmp_path: Path) -> None:
    root = machine(tmp_path, dict(zip(DEVICES, (1, 0, 1), strict=True)), {0: "0-3", 1: "4-7"})
    chosen, said = choose_cores(3, DEVICES, range(8), root)
    assert chosen == ((4, 5), (0, 1, 2, 3), (6, 7))
    assert said == "cores, on the NUMA node of its device: rank 0 on 4-5, rank 1 on 0-3, rank 2 on 6-7"
    # A container may have a part of each node.
    assert choose_cores(3, DEVICES, (2, 5, 6), root)[0] == ((5,), (2,), (6,))


@pytest.mark.parametrize(
    ("devices", "nodes", "allowed"),
    [([], (), range(6)), (DEVICES[:2], (0, 0), range(6)), (DEVICES, (0, -1, 1), range(6)), (DEVICES, (1, 1, 1), (0, 1, 2, 3, 4, 8))],
)
def test_without_a_node_of_each_device_all_cores_are_shared(
    tmp_path: Path, devices: list[str], nodes: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    root = machine(tmp_path, dict(zip(devices, nodes, strict=True)), {0: "0-3", 1: "8-9"})
    chosen, said = choose_cores(3, devices, allowed, root)
    assert [len(cores) for cores in chosen] == [2, 2, 2]
    assert sorted(core for cores in chosen for core in cores) == sorted(allowed)
    assert "an even part of all" in said


def test_more_ranks_than_cores_share_them(tmp_path: Path) -> None:
    assert choose_cores(3, [], (4, 9), tmp_path)[0] == ((4,), (9,), (4,))
    chosen, said = choose_cores(1, [], (4, 5, 6, 9), tmp_path)
    assert (chosen, said) == (((4, 5, 6, 9),), "cores, all: no NUMA node of its device is known: rank 0 on 4-6,9")


def test_devices_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}END\n")
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.defpath}"
    assert npu_addresses({"PATH": path}) == DEVICES
    assert npu_addresses({"PATH": path, "ASCEND_RT_VISIBLE_DEVICES": "2,0"}) == ["0000:C2:00.0", "0000:C1:00.0"]
    assert npu_addresses({"PATH": str(tmp_path / "none")}) == []
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert npu_addresses({"PATH": path}) == []


def test_what_is_chosen_is_said_and_goes_to_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    settings = bound(RankSettings(device="emulated"), 1, {}, Progress())
    assert settings.cores == (tuple(sorted(os.sched_getaffinity(0))),)
    assert "rank 0 on " in capsys.readouterr().err


def test_every_thread_of_a_process_is_bound() -> None:
    """In a process of its own, with a thread that began before and one that begins after."""
    first = min(os.sched_getaffinity(0))
    code = f"""
import os, threading
from npucompile.tools.progress import Progress
from npucompile.tools.ranks.binding import bind
begun, go = threading.Event(), threading.Event()
threads = [threading.Thread(target=lambda: (begun.set(), go.wait()))]
threads[0].start(); begun.wait()
bind((), 0)
assert os.sched_getaffinity(0) == {set(os.sched_getaffinity(0))}
bind(((), ({first},)), 1)
threads.append(threading.Thread(target=go.wait)); threads[1].start()
print([sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")])
go.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    bound_to = eval(done.stdout)
    assert len(bound_to) >= 3
    assert bound_to == [[first]] * len(bound_to)


def affinities(pid: int) -> set[frozenset[int]]:
    """Cores of all threads of a process."""
    return {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir(f"/proc/{pid}/task")}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks on one core are on the same")
@pytest.mark.long
def test_two_emulated_ranks_run_each_on_its_own_cores(server, npu_artifact) -> None:  # type: ignore[no-untyped-def]
    two = server(npu_artifact("tp=2"), "--device", "emulated", "--cpu-binding")
    first, second = affinities(two.process.pid), affinities(two.others[0])
    assert (len(first), len(second)) == (1, 1)
    (mine,), (theirs,) = first, second
    assert not mine & theirs
    assert mine | theirs == os.sched_getaffinity(0)
    assert "cores, an even part of all: no NUMA node of each device is known: rank 0 on " in two.output
    assert len(asyncio.run(two.ask(4, [1, 2, 3]))) == 4

"""tools/host.py: what a kernel is set to, read from a tree of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.tools.host import SETTINGS, UNSAID, device_node, node_cores, parse_cores, read_host

GOVERNOR = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"


def tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


TUNED = {
    GOVERNOR.format(0): "performance", GOVERNOR.format(1): "performance", "proc/sys/vm/swappiness": "10",
    "proc/sys/kernel/numa_balancing": "0", "sys/kernel/debug/sched/migration_cost_ns": "50000",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "proc/self/status": "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7", "sys/devices/system/cpu/online": "0-15",
}  # fmt: skip


def test_a_machine_that_is_set_as_guides_say_has_nothing_to_do(tmp_path: Path) -> None:
    found = {each.name: each for each in read_host(tree(tmp_path, TUNED))}
    assert [each.advice for each in found.values()] == [""] * (len(SETTINGS) + 1)
    assert (found["vm.swappiness"].found, found["vm.swappiness"].wanted) == ("10", "0")
    assert found["transparent huge pages"].found == "madvise"
    assert found["kernel.sched_migration_cost_ns"].path == "/sys/kernel/debug/sched/migration_cost_ns"
    assert found["cores of this process"].found == "0-7 of 0-15"


@pytest.mark.parametrize(
    ("files", "name", "found", "command"),
    [
        ({GOVERNOR.format(1): "schedutil"}, "CPU frequency governor", "performance, schedutil",
         "echo performance | tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"),
        ({"proc/sys/vm/swappiness": "60"}, "vm.swappiness", "60", "sysctl -w vm.swappiness=0"),
        ({"proc/sys/kernel/numa_balancing": "1"}, "kernel.numa_balancing", "1", "sysctl -w kernel.numa_balancing=0"),
        # An older kernel has it among its parameters, which come first.
        ({"proc/sys/kernel/sched_migration_cost_ns": "500000"}, "kernel.sched_migration_cost_ns", "500000",
         "sysctl -w kernel.sched_migration_cost_ns=50000"),
        ({"sys/kernel/debug/sched/migration_cost_ns": "500000"}, "kernel.sched_migration_cost_ns", "500000",
         "echo 50000 | tee /sys/kernel/debug/sched/migration_cost_ns"),
        ({"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, "transparent huge pages", "never",
         "echo always | tee /sys/kernel/mm/transparent_hugepage/enabled"),
    ],
)  # fmt: skip
def test_another_value_is_said_with_its_command(tmp_path: Path, files: dict[str, str], name: str, found: str, command: str) -> None:
    (advised,) = (each for each in read_host(tree(tmp_path, TUNED | files)) if each.advice)
    assert (advised.name, advised.found) == (name, found)
    assert advised.advice.endswith(f": {command}")


def test_what_no_file_says_is_no_fault(tmp_path: Path) -> None:
    assert {(each.found, each.advice) for each in read_host(tmp_path)} == {(UNSAID, "")}


def test_this_machine_is_read() -> None:
    found = {each.name: each.found for each in read_host()}
    assert found["vm.swappiness"] == Path("/proc/sys/vm/swappiness").read_text().strip()
    assert found["cores of this process"].count(" of ") == 1


def test_cores_and_nodes_are_read(tmp_path: Path) -> None:
    assert parse_cores("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cores("") == []
    tree(tmp_path, {"sys/devices/system/node/node1/cpulist": "4-7", "sys/bus/pci/devices/0000:c1:00.0/numa_node": "1",
                    "sys/bus/pci/devices/0000:c2:00.0/numa_node": "-1"})  # fmt: skip
    assert (node_cores(tmp_path, 1), node_cores(tmp_path, 2)) == ([4, 5, 6, 7], [])
    assert [device_node(tmp_path, f"0000:{bus}:00.0") for bus in ("C1", "C2", "C3")] == [1, None, None]

"""What a machine's kernel is set to, beside what public guides for NPUs set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNSAID = "this system does not say"
"""Found where no file says it, as in virtual machines, which have no governor."""


@dataclass(frozen=True)
class HostSetting:
    """A setting of the kernel.

    Attributes:
        paths: of its file below the root, in the order that kernels have them; a pattern stands for a file of each core.
        wanted: values that will do, the one to set first.
        why: what another value costs.
    """

    name: str
    paths: tuple[str, ...]
    wanted: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class HostFinding:
    """A setting as it was found.

    Attributes:
        path: of its file, or the pattern of several.
        wanted: the value to set; "" where every value will do.
        advice: the command that sets it, as root, and why; "" where nothing is to do.
    """

    name: str
    path: str
    found: str
    wanted: str = ""
    advice: str = ""


SETTINGS = (
    HostSetting(
        "CPU frequency governor", ("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",), ("performance",),
        "a core that slept while the device worked starts the next step slowly",
    ),
    HostSetting(
        "vm.swappiness", ("proc/sys/vm/swappiness",), tuple(map(str, range(11))),
        "buffers that a device copies from may have been swapped out",
    ),
    HostSetting(
        "kernel.numa_balancing", ("proc/sys/kernel/numa_balancing",), ("0",),
        "the kernel unmaps pages to see which node reads them, and threads that launch steps wait for the faults",
    ),
    HostSetting(
        "kernel.sched_migration_cost_ns",
        ("proc/sys/kernel/sched_migration_cost_ns", "sys/kernel/debug/sched/migration_cost_ns"), ("50000",),
        "a thread that wakes up waits for the core that it ran on while another is idle",
    ),
    HostSetting(
        "transparent huge pages", ("sys/kernel/mm/transparent_hugepage/enabled",), ("always", "madvise"),
        "weights that the host reads take a translation for every 4 KiB",
    ),
)  # fmt: skip
"""The first four are those of SGLang's guide for Ascend (docs.sglang.io, Ascend NPU Optimization, System-Level Optimizations), which sets a
swappiness of 0; its launch scripts set 10, too."""


def read_host(root: Path = Path("/")) -> list[HostFinding]:
    """All settings of a machine, and which of its cores this process may run on.

    Args:
        root: of its file system.
    """
    return [*(_found(setting, root) for setting in SETTINGS), _affinity(root)]


def _found(setting: HostSetting, root: Path) -> HostFinding:
    for path in setting.paths:
        texts = sorted({text for file in root.glob(path) if (text := _text(file))})
        if texts:
            # A file of choices has the chosen one in brackets.
            values = [text.partition("[")[2].partition("]")[0] or text for text in texts]
            fits = set(values) <= set(setting.wanted)
            advice = "" if fits else f"{setting.why}: {_command(path, setting.wanted[0])}"
            return HostFinding(setting.name, f"/{path}", ", ".join(values), setting.wanted[0], advice)
    return HostFinding(setting.name, f"/{setting.paths[0]}", UNSAID, setting.wanted[0])


def _command(path: str, value: str) -> str:
    name = path.removeprefix("proc/sys/")
    return f"sysctl -w {name.replace('/', '.')}={value}" if name != path else f"echo {value} | tee /{path}"


def _affinity(root: Path) -> HostFinding:
    allowed = next((line.partition(":")[2].strip() for line in _text(root / "proc/self/status").splitlines()
                    if line.startswith("Cpus_allowed_list:")), "")  # fmt: skip
    online = _text(root / "sys/devices/system/cpu/online")
    return HostFinding("cores of this process", "/proc/self/status", f"{allowed} of {online}" if allowed and online else UNSAID)


def parse_cores(text: str) -> list[int]:
    """Numbers in the notation of the kernel, as in "0-3,8"."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return [core for first, _, last in parts for core in range(int(first), int(last or first) + 1)]


def node_cores(root: Path, node: int) -> list[int]:
    """Cores of a NUMA node; none where there is no such node."""
    return parse_cores(_text(root / f"sys/devices/system/node/node{node}/cpulist"))


def device_node(root: Path, bus: str) -> int | None:
    """NUMA node of the device at a PCI address, or None where the kernel does not say."""
    text = _text(root / "sys/bus/pci/devices" / bus.lower() / "numa_node")
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

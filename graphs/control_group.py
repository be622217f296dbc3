"""What the control groups of this process leave it of the machine, as containers and job schedulers set them: memory, and processor time.

Source of the files: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/; a group has no more than those that it is in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 2**60
"""Version 1 writes that there is no limit as the largest number of pages."""


def memory_limit() -> int | None:
    """Bytes that this process and those beside it in its group may take; None where no group limits them."""
    limits = [
        *(_number(place / "memory.max") for place in _places("")),
        *(_number(place / "memory.limit_in_bytes") for place in _places("memory")),
    ]
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)


def free_memory() -> int | None:
    """Bytes of the limit that nobody takes; pages of files that can be dropped count as free. None where there is no limit."""
    if (limit := memory_limit()) is None:
        return None
    used = 0
    for controller, name, kept in (("", "memory.current", "inactive_file "), ("memory", "memory.usage_in_bytes", "total_inactive_file ")):
        for place in _places(controller):
            if (taken := _number(place / name)) is not None:
                stat = _text(place / "memory.stat")
                dropped = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(kept)), 0)
                used = max(used, taken - dropped)
                break
    return max(limit - used, 0)


def processors() -> int:
    """Processors that this process may keep busy: those that it may run on, and no more than its groups have time for."""
    quotas = [len(os.sched_getaffinity(0)) * 1.0]
    for place in _places(""):
        quota, _, period = _text(place / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            quotas.append(int(quota) / int(period))
    for place in _places("cpu"):
        quota_us, period_us = _number(place / "cpu.cfs_quota_us"), _number(place / "cpu.cfs_period_us")
        if quota_us and period_us and quota_us > 0:
            quotas.append(quota_us / period_us)
    return max(1, int(min(quotas)))


def _places(controller: str) -> Iterator[Path]:
    """Directories of the group of this process, and of those that it is in, innermost first; "" is version 2."""
    for line in _text(OWN).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names != controller and controller not in names.split(","):
            continue
        root = ROOT / controller if controller else ROOT
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # In a container the path may be that of the host, and the root the container's own group.
        yield from (root.joinpath(*parts[:end]) for end in range(len(parts), -1, -1))


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.removeprefix("-").isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

"""One archive of a bring-up to send back: what was found, of which machine, and what CANN wrote meanwhile; at most `MOST_BYTES`."""

from __future__ import annotations

import io
import json
import lzma
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ....lowering.ascend.inventory import cann_release, operator_definitions
from .environment import DRIVER, driver_version

NAME = "bringup.tar.xz"
MOST_BYTES = 5 * 10**6
"""As it is sent; what does not fit is left out, and named in `LEFT_OUT`."""
LEFT_OUT = "left-out.txt"
TAIL_LINES = 200
"""Of each log of CANN."""
_SHOWN = re.compile(r"(ASCEND|HCCL|ACL|NPU|NPUCOMPILE|GE|TNG|OMP|TORCH|TASK_QUEUE|PYTORCH)_|(LD_LIBRARY_PATH|PYTHONPATH|PATH)$")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_PACKAGES = re.compile(r"torch|npucompile|numpy|protobuf|mooncake|vllm|sgl|ascend|te|hccl|op[_-]", re.IGNORECASE)


class Member(NamedTuple):
    """A file of the archive."""

    name: str
    content: bytes


def write(directory: Path, reports: Sequence[Path], environment: Mapping[str, str], chip: str, since: float) -> Path:
    """Writes the archive beside the reports; returns its path.

    Args:
        reports: files with what was found, the most useful first.
        environment: of this process. Variables of CANN, torch and paths are told, none that a secret may be in.
        chip: name of the NPU in CANN's operator definitions.
        since: seconds of the epoch; logs that did not change after are left out.
    """
    file = directory / NAME
    members, left = _that_fit([*_reports(reports), _machine(environment), *_definitions(environment, chip), *_logs(environment, since)])
    if left:
        members.append(Member(LEFT_OUT, "".join(f"{name}: no room in {MOST_BYTES} bytes\n" for name in left).encode()))
    with tarfile.open(file.with_suffix(".new"), "w:xz") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    file.with_suffix(".new").replace(file)
    return file


def _that_fit(members: Iterable[Member]) -> tuple[list[Member], list[str]]:
    """Members in order as long as there is room; each counts as if it were compressed alone, which is never less."""
    kept, left, total = list[Member](), list[str](), 0
    for member in members:
        size = len(lzma.compress(member.content)) + tarfile.BLOCKSIZE
        if total + size <= MOST_BYTES:
            kept.append(member)
            total += size
        else:
            left.append(member.name)
    return kept, left


def _reports(paths: Sequence[Path]) -> Iterator[Member]:
    for path in paths:
        if path.is_file():
            yield Member(path.name, path.read_bytes())


def _machine(environment: Mapping[str, str]) -> Member:
    """Versions and variables."""
    home = environment.get("ASCEND_HOME_PATH", "")
    facts = {
        "cann": cann_release(Path(home)) if home else "",
        "driver": driver_version(DRIVER),
        "packages": {
            name: each.version for each in metadata.distributions() if (name := each.metadata["Name"] or "") and _PACKAGES.match(name)
        },
        "environment": {name: value for name, value in sorted(environment.items()) if _SHOWN.match(name) and not _SECRET.search(name)},
    }
    return Member("machine.json", json.dumps(facts, indent=1, sort_keys=True).encode())


def _definitions(environment: Mapping[str, str], chip: str) -> Iterator[Member]:
    """CANN's own tables of operators: what ends most assumptions of ours."""
    if home := environment.get("ASCEND_HOME_PATH"):
        for path in operator_definitions(Path(home), chip):
            yield Member(f"ops-info/{path.name}", path.read_bytes())


def _logs(environment: Mapping[str, str], since: float) -> Iterator[Member]:
    """The ends of CANN's logs, of those that were written last first."""
    root = Path(environment.get("ASCEND_PROCESS_LOG_PATH") or Path(environment.get("HOME", "/root"), "ascend", "log"))
    logs = [(path.stat().st_mtime, path) for path in root.rglob("*.log") if path.is_file()] if root.is_dir() else []
    for changed, path in sorted(logs, reverse=True):
        if changed >= since:
            lines = path.read_bytes().splitlines(keepends=True)[-TAIL_LINES:]
            yield Member(f"plog/{path.relative_to(root)}", b"".join(lines))

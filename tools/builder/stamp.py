"""Stamps: digests of everything that decides a build, or one of its buckets, taken before torch is loaded or anything is traced.

A build or bucket whose stamp is unchanged is not built again. A bucket whose stamp changed is staged, and compiled only if the key of
its graph changed too (lowering/artifact/artifact.py, `graph_key`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ... import ISA

ROOT = Path(__file__).resolve().parents[2]

STAMP = ".{name}.stamp.json"
"""Lies beside the artifact, not in it, because it contains file times. It only saves a build; nothing is trusted because of it."""
MANIFEST = "manifest.msgpack"
FORMAT = 1

FOLDERS = ("graphs", "models", "lowering", "runtime", "server", "tools")
BUNDLED = "models/bundled"
SOURCES = (".html", ".py", ".json", ".cpp", ".h")
"""Suffixes of the package's source files, bundled models excepted."""
DISTRIBUTIONS = (
    "torch", "torch_npu", "protobuf", "safetensors", "msgpack", "numpy", "tokenizers", "packaging", "PyYAML", "click", "npucompile",
)  # fmt: skip
"""Distributions whose versions, or absence, decide the result of a build."""


GRAPH_SOURCES = ("graphs", "models", "lowering", "tools/builder/stages.py", "tools/builder/pool.py")
"""Folders and files that decide graphs, and what an artifact stores of them."""


@functools.cache
def source_digest(root: Path = ROOT) -> str:
    """sha256 over names and contents of all Python files that decide graphs."""
    digest = hashlib.sha256()
    for part in GRAPH_SOURCES:
        path = root / part
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(f"{file.relative_to(root).as_posix()} {_sha256(file)}\0".encode())
    return digest.hexdigest()


def bucket_stamp(*facts: object) -> str:
    """Digest of one bucket: of the sources that decide graphs, and of facts with a complete `repr`.

    The digest of a user's own family file is among the facts.
    """
    return hashlib.sha256(repr((source_digest(), *facts)).encode()).hexdigest()


def fingerprint(options: Mapping[str, Any], package_root: Path, model_files: Iterable[Path], source_files: Iterable[Path] = ()) -> str:
    """Digest of everything that decides a build.

    The package's sources and the file of a user's own family count by content; models, which may be large, by size and modification time.

    Args:
        options: of the command; None counts as absent.
        package_root: the directory with npucompile's folders.
        model_files: files and directories of the checkpoint; empty for a preset without one.
        source_files: the file of a user's own family; one that cannot be read counts as absent, and the build says so.
    """
    digest = hashlib.sha256()
    own = (_own_source(file) for file in source_files)
    for fact in (_options(options), *_sources(package_root), *own, *_models(package_root / BUNDLED, *model_files), *_machine()):
        # The length separates facts, so that no two lists of facts give the same bytes.
        digest.update(f"{len(fact)}:".encode() + fact)
    return digest.hexdigest()


def matches(artifact_dir: Path, fingerprint: str) -> bool:
    """Whether the artifact was built with this fingerprint and its files are unchanged since."""
    try:
        stamp = json.loads(stamp_file(artifact_dir).read_bytes())
        if stamp["format"] != FORMAT or stamp["fingerprint"] != fingerprint or stamp["manifest"] != _sha256(artifact_dir / MANIFEST):
            return False
        return all(_state(artifact_dir / name) == state for name, state in stamp["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Without a readable stamp the build itself finds out what changed.
        return False


def write(artifact_dir: Path, fingerprint: str, files: Iterable[str]) -> None:
    """Writes the stamp of a complete artifact.

    Args:
        files: paths of its files within the directory; the manifest is included in any case.

    Raises:
        OSError: a file is missing.
    """
    states = {name: _state(artifact_dir / name) for name in sorted(files)}
    stamp = {"format": FORMAT, "fingerprint": fingerprint, "manifest": _sha256(artifact_dir / MANIFEST), "files": states}
    file = stamp_file(artifact_dir)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(stamp, indent=1, sort_keys=True), encoding="utf-8")
    os.replace(part, file)


def stamp_file(artifact_dir: Path) -> Path:
    """Path of an artifact's stamp."""
    return artifact_dir.with_name(STAMP.format(name=artifact_dir.name))


def _options(options: Mapping[str, Any]) -> bytes:
    present = {name: value for name, value in options.items() if value is not None}
    return json.dumps(present, sort_keys=True, default=str).encode()


def _sources(root: Path) -> Iterator[bytes]:
    for path in sorted(
        [root / "__init__.py", *(file for folder in FOLDERS for file in (root / folder).rglob("*") if _is_source(root, file))]
    ):
        yield f"{path.relative_to(root).as_posix()} {_sha256(path)}".encode()


def _own_source(file: Path) -> bytes:
    try:
        return f"{file} {_sha256(file)}".encode()
    except OSError:
        return f"{file} absent".encode()


def _is_source(root: Path, file: Path) -> bool:
    return file.suffix in SOURCES and not file.is_relative_to(root / BUNDLED) and file.is_file()


def _models(*paths: Path) -> Iterator[bytes]:
    for path in paths:
        for file in sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]:
            try:
                size, changed = _state(file)
            except OSError:
                size, changed = -1, -1
            yield f"{file} {size} {changed}".encode()


def _machine() -> Iterator[bytes]:
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        yield f"{name} {version}".encode()
    yield f"{sys.version} {platform.system()} {platform.machine()}".encode()
    yield f"{_cpu_flags()} {ISA}".encode()


def _cpu_flags() -> str:
    """Sorted features of the first CPU, "" if unknown; x86 calls them "flags", Arm "Features"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    features = [line.partition(":")[2].split() for line in lines if line.partition(":")[0].strip() in ("flags", "Features")]
    return " ".join(sorted(features[0])) if features else ""


def _state(file: Path) -> list[int]:
    """[size, modification time in ns] of a file."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""An artifact on disk: a directory of content-addressed files and one manifest, written atomically and checked when opened.

manifest.msgpack             description of all (lowering/artifact/manifest.py)
.checked                     what was compared with its digest (lowering/artifact/checked.py)
graphs/<digest>.graph        eager graph of a bucket
graphs/<digest>.pt2          its executable, once compiled (.ge: its GE graph)
stages/<digest>.json.z       texts of its stages
weights/<digest>.safetensors parameters, named as the graphs' operands
tokenizer/<digest>.json      tokenizer.json of the checkpoint
tokenizer/<digest>.jinja     its chat template
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...graphs.errors import ArtifactError, ArtifactMissing, ArtifactStale, ArtifactTampered
from ..backend import backend
from ..toolchain import differences, missing_features
from .checked import Checked, now_ns
from .lock import exclusive, lock_of
from .manifest import FileRecord, GraphEntry, Manifest, decode, encode

MANIFEST = "manifest.msgpack"
_MIB = 1024**2

Stamp = tuple[int, int] | None
"""Modification time and inode of a manifest; every publish changes them. None where there is no manifest."""


class Artifact:
    """An opened artifact directory.

    Args:
        path: the directory.
        manifest: its description.
        digest: sha256 of the manifest's bytes.
        stamp: the manifest's stamp when it was read.
    """

    def __init__(self, path: Path, manifest: Manifest, digest: str, stamp: Stamp = None) -> None:
        self.path, self.manifest, self.digest, self._stamp = path, manifest, digest, stamp

    @staticmethod
    def open(path: Path, *, check: bool = True, again: bool = False) -> Artifact:
        """Reads a directory.

        Args:
            check: compare every file's size and sha256 with the manifest.
            again: also those of files that were compared before and have not changed since (`checked`).

        Raises:
            ArtifactMissing: there is no artifact.
            ArtifactTampered: the manifest or a file does not match its digest; names the file and both digests.
            ArtifactStale: the manifest has another format.
        """
        # Taken before the bytes are read, so that `reload` notices a manifest that is published in between.
        before = stamp(path)
        try:
            data = (path / MANIFEST).read_bytes()
        except OSError:
            raise ArtifactMissing(f"{path} is not an artifact: it has no {MANIFEST}; `npucompile build` makes one") from None
        artifact = Artifact(path, decode(data, str(path / MANIFEST)), hashlib.sha256(data).hexdigest(), before)
        if check:
            artifact._check_files(again)
        return artifact

    def _check_files(self, again: bool) -> None:
        checked = Checked(self.path)
        for name, record in self.manifest.files.items():
            if again or not checked.holds(name, record):
                began_ns = now_ns()
                check_file(self.path / name, record)
                checked.compared(name, record, began_ns)
        checked.save()

    def check_runnable(self) -> None:
        """Refuses an artifact whose executables were built with another toolchain or need CPU features that this machine lacks.

        Raises:
            ArtifactStale: naming the field, the built and the running value.
        """
        if not any(entry.compiled for entry in self.manifest.graphs):
            return
        chosen = backend(self.manifest.backend)
        changed = differences(self.manifest.toolchain, host_bound=chosen.host_bound, build_only=chosen.build_only)
        if changed:
            text = "; ".join(f"{name} was {built!r} and is {running!r}" for name, built, running in changed)
            raise ArtifactStale(f"{self.path} was built elsewhere: {text}; build it again here")
        lacking = missing_features(self.manifest.cpu_features)
        if lacking:
            raise ArtifactStale(f"{self.path} needs a CPU with {', '.join(lacking)}, which this one lacks; build it again here")

    def load_weights(self) -> dict[str, torch.Tensor]:
        """Parameters by operand name, memory-mapped: pages are read on first use and shared by the processes of a machine.

        Raises:
            ArtifactError: the artifact was built without weights.
            ArtifactTampered: the file cannot be read, or its tensors differ from the manifest's.
        """
        if self.manifest.weights is None:
            raise ArtifactError(f"{self.path} was built without weights: it can be inspected, and not run; build a checkpoint directory")
        file = self.path / self.manifest.weights
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ArtifactTampered(f"{file}: {error}") from None
        for leaf in self.manifest.params:
            tensor = tensors.get(leaf.name)
            if tensor is None or tuple(tensor.shape) != leaf.aval.shape or tensor.dtype != leaf.aval.dtype:
                stored = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ArtifactTampered(f"{file}: holds {stored} as {leaf.name}; the manifest says {leaf.aval}")
        return dict(tensors)

    def reload(self) -> Artifact | None:
        """Opens the artifact again if a build has published since, and checks its new files; None where nothing changed.

        Raises:
            ArtifactError: the new artifact cannot be used.
        """
        if stamp(self.path) == self._stamp:
            return None
        newer = Artifact.open(self.path, check=False)
        if newer.digest == self.digest:
            self._stamp = newer._stamp
            return None
        for name, record in newer.manifest.files.items():
            if name not in self.manifest.files:
                check_file(newer.path / name, record)
        return newer


class ArtifactWriter:
    """Adds files to an artifact and publishes manifests; an artifact has one writer at a time.

    A new artifact is written to a sibling directory, which the first `publish` renames; a build that fails before leaves nothing.
    Files are named by their content and never rewritten; a manifest is replaced atomically.

    Args:
        path: the artifact's directory.

    Raises:
        ArtifactError: another build of this artifact is running, or something else is at `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous: Artifact | None = None
        self.published: Manifest | None = None
        self.files: dict[str, FileRecord] = {}

    def __enter__(self) -> ArtifactWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(exclusive(lock_of(self.path), str(self.path)))
            self._fresh = not (self.path / MANIFEST).exists()
            if self._fresh and self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
                raise ArtifactError(f"{self.path} exists and is not an artifact; legal is a new or empty directory, or an artifact")
            self.root = self.path.with_name(f".{self.path.name}.new") if self._fresh else self.path
            if self._fresh:
                shutil.rmtree(self.root, ignore_errors=True)
                self.root.mkdir()
            else:
                self.previous = _open_or_none(self.path)
            self._locked = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._locked:
            if self._fresh:
                shutil.rmtree(self.root, ignore_errors=True)
            elif error is not None and (manifest := self.published or (self.previous and self.previous.manifest)):
                self.collect(manifest)

    def add(self, folder: str, data: bytes, suffix: str) -> str:
        """Stores bytes under their digest; returns the path in the artifact."""
        digest = hashlib.sha256(data).hexdigest()
        name = f"{folder}/{digest[:32]}.{suffix}"
        self.files[name] = FileRecord(digest, len(data))
        target = self.root / name
        if not (target.exists() and target.stat().st_size == len(data) and _sha256(target) == digest):
            target.parent.mkdir(exist_ok=True)
            _replace(target, data)
        return name

    def add_parts(self, folder: str, parts: Iterable[tuple[int, bytes | memoryview]], suffix: str) -> str:
        """Stores a file under its digest without holding all of it in memory; returns the path in the artifact.

        Args:
            parts: (offset, bytes) in any order, covering the file without gap or overlap. The digest is computed as they arrive; only
                a part that arrived out of order is read back for it.

        Raises:
            ValueError: the parts leave a gap or overlap.
        """
        scratch = self.root / folder / f".parts.{suffix}"
        scratch.parent.mkdir(exist_ok=True)
        try:
            with scratch.open("w+b") as stream:
                digest, size = _write_parts(stream, parts)
                _sync(stream)
            name = f"{folder}/{digest[:32]}.{suffix}"
            os.replace(scratch, self.root / name)
        finally:
            scratch.unlink(missing_ok=True)
        self.files[name] = FileRecord(digest, size)
        return name

    def keep(self, name: str) -> bool:
        """Takes over a file of the previous artifact if it still matches its record; returns whether it does."""
        record = self.previous.manifest.files.get(name) if self.previous else None
        if record is None:
            return False
        try:
            check_file(self.path / name, record)
        except ArtifactError:
            return False
        self.files[name] = record
        return True

    def publish(self, manifest: Manifest) -> Manifest:
        """Writes the artifact's manifest, completed with the records of all files that it names; returns it."""
        named = {manifest.weights, manifest.tokenizer, manifest.chat_template}
        for entry in (*manifest.graphs, *manifest.references):
            named |= set(entry.files)
        manifest = replace(manifest, files={name: self.files[name] for name in sorted(n for n in named if n)})
        _replace(self.root / MANIFEST, encode(manifest))
        self.published = manifest
        if self._fresh:
            if self.path.exists():
                self.path.rmdir()
            os.replace(self.root, self.path)
            self.root, self._fresh = self.path, False
        return manifest

    def collect(self, manifest: Manifest) -> None:
        """Deletes files that the manifest does not name."""
        for folder in ("graphs", "stages", "weights", "tokenizer"):
            for file in sorted((self.path / folder).glob("*")):
                if f"{folder}/{file.name}" not in manifest.files:
                    file.unlink()


def stamp(path: Path) -> Stamp:
    """The stamp of the artifact at `path` as it is now."""
    try:
        status = (path / MANIFEST).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def check_file(file: Path, record: FileRecord) -> None:
    """Compares a file with its record.

    Raises:
        ArtifactTampered: naming the file, and the sizes or digests that differ.
    """
    try:
        size = file.stat().st_size
    except OSError:
        raise ArtifactTampered(f"{file} is missing; the manifest says {record.size_bytes} bytes") from None
    if size != record.size_bytes:
        raise ArtifactTampered(f"{file} has {size} bytes; the manifest says {record.size_bytes}")
    digest = _sha256(file)
    if digest != record.sha256:
        raise ArtifactTampered(f"{file} has sha256 {digest}; the manifest says {record.sha256}")


def graph_key(lowered_text: str, backend: str, options: Mapping[str, Any], toolchain: Mapping[str, str]) -> str:
    """Digest of everything that decides an executable's bytes; equal keys mean that it is up to date."""
    parts = (lowered_text, backend, sorted(options.items()), sorted(toolchain.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_parts(stream: BinaryIO, parts: Iterable[tuple[int, bytes | memoryview]]) -> tuple[str, int]:
    """Writes parts at their offsets; returns the digest and size of all."""
    hasher, hashed = hashlib.sha256(), 0
    early: dict[int, int] = {}  # begin -> end of the parts behind the first gap
    for begin, data in parts:
        if begin < hashed or begin in early:
            raise ValueError(f"a part begins at byte {begin}, which another part covers")
        stream.seek(begin)
        stream.write(data)
        if begin == hashed:
            hasher.update(data)
            hashed += len(data)
        else:
            early[begin] = begin + len(data)
        del data  # frees it before the generator computes the next part
        while (end := early.pop(hashed, None)) is not None:
            stream.seek(hashed)
            for offset in range(hashed, end, _MIB):
                hasher.update(stream.read(min(_MIB, end - offset)))
            hashed = end
    if early:
        raise ValueError(f"no part begins at byte {hashed}; parts behind it begin at {sorted(early)[:3]}")
    return hasher.hexdigest(), hashed


def _replace(target: Path, data: bytes) -> None:
    """Replaces a file atomically: a reader, or the machine after a crash, sees either the old file or the new one."""
    part = target.with_name(f".{target.name}.part")
    with part.open("wb") as stream:
        stream.write(data)
        _sync(stream)
    os.replace(part, target)


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _open_or_none(path: Path) -> Artifact | None:
    """The earlier artifact at `path`, to take files over from; None where it cannot be read."""
    try:
        return Artifact.open(path, check=False)
    except ArtifactError:
        return None


__all__ = ["MANIFEST", "Artifact", "ArtifactWriter", "GraphEntry", "Manifest", "Stamp", "check_file", "graph_key", "stamp"]

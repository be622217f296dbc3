"""Turns an artifact into device state and one executable per bucket, swapped in as they are finished."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from ..graphs import compile_count
from ..graphs.errors import SpecError
from ..graphs.types import COORDS, Bucket, Limits, Mesh, Rules, Signature
from ..lowering.artifact.artifact import Artifact, GraphEntry
from ..lowering.artifact.shards import load_shard, local_leaves, local_signature
from ..lowering.executable import Executable, check_operands, load_compiled

log = logging.getLogger(__name__)

COMPILERS = ("torch._inductor.compile_fx", "torch._dynamo.convert_frame")
"""Modules that a process loads only in order to compile."""

"""Input of a sharded graph that the rank itself knows: its indices on dp and tp, int32 [2]."""


class Executor:
    """Parameters, state pools and executables of one artifact on this machine's CPU.

    A bucket runs its compiled executable where the artifact has one that is loaded, else the eager reference graph of the
    same step; `backends` says which. Pools are allocated once; every bucket runs over the same ones.

    Of an artifact for several devices it holds and runs the part of one rank. Its steps meet those of the other ranks in
    collectives, so all ranks run the same buckets in the same order, over groups that are bound (`process_groups.Groups`).

    Args:
        artifact: opened and checked.
        prefer_eager: never load compiled executables.
        rank: which part; None where there is only one.

    Raises:
        ArtifactError: when a file is missing or is not what the manifest says.
        SpecError: when the artifact is for several devices and no rank is given, or has no such rank.
    """

    def __init__(self, artifact: Artifact, *, prefer_eager: bool = False, rank: int | None = None) -> None:
        self.artifact = artifact
        mesh, rules = Mesh.parse(artifact.manifest.mesh), Rules.of(artifact.manifest.rules)
        if rank is None and mesh.size > 1:
            raise SpecError(f"{artifact.path} is for mesh {mesh}: it runs as {mesh.size} ranks, a process each, and not in this one alone")
        self.limits: Limits = artifact.manifest.limits
        self.vocab_size = int(artifact.manifest.model["vocab_size"])
        self.max_logprobs = max((entry.max_logprobs for entry in artifact.manifest.graphs), default=0)
        self.backends: dict[str, str] = {}
        self._prefer_eager = prefer_eager
        self._held = _operands(artifact)
        params = load_shard(artifact, rank or 0)
        self._params = [params[leaf.name] for leaf in artifact.manifest.params]
        self._state = [torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in local_leaves(artifact.manifest.state, mesh, rules)]
        self._own = {COORDS: mesh.coords(rank or 0)}
        self._entries = {entry.bucket: entry for entry in artifact.manifest.graphs}
        self._signatures = {bucket: local_signature(artifact.manifest, entry) for bucket, entry in self._entries.items()}
        self._names = {bucket: [leaf.path for leaf in s.inputs] for bucket, s in self._signatures.items()}
        self._outputs = {bucket: [leaf.path for leaf in s.outputs] for bucket, s in self._signatures.items()}
        self._executables = {bucket: self._load(entry) for bucket, entry in self._entries.items()}
        self._modules = self._compilers_loaded()
        self._counted = compile_count.count()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What `run` takes."""
        return tuple(sorted(self._entries))

    def run(self, bucket: Bucket, inputs: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
        """Runs one step and advances the state.

        Args:
            bucket: one of `buckets`.
            inputs: arrays by name, as `buckets.pack` makes them.

        Returns:
            `tokens` int32 [B, W], in decode `counts` int32 [B], and what else the bucket's outputs are (models/step.py).

        Raises:
            SpecError: for a bucket the artifact does not have.
        """
        if bucket not in self._executables:
            raise SpecError(f"no bucket {bucket.name}; the artifact has {', '.join(b.name for b in self.buckets)}")
        given = [self._own[name] if name in self._own else torch.from_numpy(inputs[name]) for name in self._names[bucket]]
        results = self._executables[bucket]([*self._params, *self._state, *given])
        return {name: value.numpy() for name, value in zip(self._outputs[bucket], results, strict=True)}

    def refresh(self) -> bool:
        """Loads executables that a build finished since the last look; returns whether any bucket changed.

        A directory that was built anew from other weights or for other sizes is left to the next process.

        Raises:
            NpucompileError: what the build left cannot be loaded; its buckets stay as they are until it publishes again.
        """
        newer = self.artifact.reload()
        if newer is None:
            return False
        # Set before anything can fail: what cannot be loaded is reported once, not at every look.
        self.artifact = newer
        if self._prefer_eager:
            return False
        if _operands(newer) != self._held:
            log.warning("%s was built anew from other weights or for other sizes; a restarted server will serve that", newer.path)
            return False
        newer.check_runnable()
        changed = False
        for entry in newer.manifest.graphs:
            old = self._entries.get(entry.bucket)
            if old is None or entry.compiled in (None, old.compiled) or entry.eager != old.eager:
                continue
            self._executables[entry.bucket] = self._load(entry)
            self._entries[entry.bucket] = entry
            changed = True
        return changed

    def compiles(self) -> int:
        """Traces and compiles of this process since it was ready, and compilers it loaded since."""
        return compile_count.count() - self._counted + self._compilers_loaded() - self._modules

    @property
    def state_bytes(self) -> int:
        """Bytes of all state pools."""
        return sum(t.numel() * t.element_size() for t in self._state)

    def _load(self, entry: GraphEntry) -> Executable:
        executable = self._open(entry)
        signature: Signature = self._signatures[entry.bucket]
        blank = [torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in signature.inputs]
        check_operands([*self._params, *self._state, *blank], signature)
        self.backends[entry.bucket.name] = executable.backend
        return executable

    def _open(self, entry: GraphEntry) -> Executable:
        if entry.compiled is None or self._prefer_eager:
            return load_compiled(self.artifact.path / entry.reference, "eager")
        return load_compiled(self.artifact.path / entry.compiled.file, entry.compiled.backend)

    @staticmethod
    def _compilers_loaded() -> int:
        return sum(name in sys.modules for name in COMPILERS)


def _operands(artifact: Artifact) -> tuple[object, ...]:
    """What an executor holds between steps; executables over anything else would misread it."""
    manifest = artifact.manifest
    return manifest.weights, manifest.params, manifest.state, manifest.limits, manifest.mesh, manifest.rules

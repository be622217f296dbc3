"""The executor on this machine's CPU: state pools and one executable per bucket of an artifact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ..graphs.errors import SpecError
from ..graphs.steps.request_slot import start as request_slot_start
from ..graphs.steps.table import kind_of
from ..graphs.types import COORDS, Bucket, Limits, Mesh, Rules
from ..lowering.artifact import mapped
from ..lowering.artifact.artifact import Artifact, GraphEntry
from ..lowering.artifact.fixed_cost import fixed_tokens
from ..lowering.artifact.manifest import Manifest
from ..lowering.artifact.shards import load_shard, local_leaves, local_signature
from ..lowering.backend import open_executable
from ..lowering.executable import Executable, HostExecutable, check_operands
from .executor import FinishedStep, Inputs, Numbers, Outputs, check_step, clear_state, compile_evidence, has_recurrent_states, segment_sizes
from .kv_transfer.layout import Region, regions
from .kv_transfer.transfer_engine import RegisteredMemory
from .pool_memory import PoolMemory
from .steps.pack import with_all_rows
from .steps.resized import long_enough, sizes_of, whole_steps

log = logging.getLogger(__name__)


class CpuExecutor:
    """Parameters, state pools and executables of one artifact on this machine's CPU.

    A bucket runs its compiled executable if the artifact has one that can be loaded, else the eager reference graph of the same step;
    `backends` says which. Pools are reserved once, every bucket runs over the same ones, and they take the memory of what was written
    (`pool_memory`). A step runs while it is launched.

    Executables of a kind that takes any size run steps at the sizes that these have. Before one is compiled such steps run in buckets, as
    many rows at a time as these hold (`resized.whole_steps`).

    For an artifact of several devices the executor holds and runs the part of one rank, so it has one dp group: its own. Its
    collectives need the steps of the other ranks, so all ranks must run the same buckets in the same order, with their process groups
    registered (`distributed.process_groups`).

    Args:
        artifact: opened and checked.
        rank: whose part to load; None for an artifact of one device.

    Raises:
        ArtifactError: when a file is missing or does not match the manifest.
        SpecError: when the artifact is for several devices and no rank is given, or it has no such rank.
    """

    groups, run_ahead, max_ranked = 1, 0, 0

    def __init__(self, artifact: Artifact, *, rank: int | None = None) -> None:
        self.artifact = artifact
        manifest = artifact.manifest
        mesh, rules = Mesh.parse(manifest.mesh), Rules.of(manifest.rules)
        if rank is None and mesh.size > 1:
            raise SpecError(f"{artifact.path} is for mesh {mesh}: it runs as {mesh.size} ranks, a process each, and not in this one alone")
        self.limits: Limits = manifest.limits
        self.vocab_size = int(manifest.model["vocab_size"])
        self.max_logprobs = max((entry.max_logprobs for entry in manifest.graphs), default=0)
        self.recurrent = has_recurrent_states(manifest.state)
        self.fixed_tokens = fixed_tokens(manifest)
        self.segments = segment_sizes(manifest)
        self.backends: dict[str, str] = {}
        self._operand_layout = _operand_layout(artifact)
        params = load_shard(artifact, rank or 0)
        self._params = [params[leaf.name] for leaf in manifest.params]
        self._leaves = local_leaves(manifest.state, mesh, rules)
        self._pools = PoolMemory(self._leaves)
        self._state = self._pools.tensors
        self._request_slots = next(pool for leaf, pool in zip(manifest.state, self._state, strict=True) if leaf.path == "request_slots")
        self._coords = mesh.coords(rank or 0)
        self.missing: Mapping[Bucket, str] = _left_out(manifest)
        self._entries = {entry.bucket: entry for entry in manifest.graphs if entry.bucket not in self.missing}
        self._signatures = {bucket: local_signature(manifest, entry) for bucket, entry in self._entries.items()}
        self._input_rows = {bucket: {leaf.path: leaf.aval.shape[0] for leaf in s.inputs} for bucket, s in self._signatures.items()}
        self._output_names = {bucket: [leaf.path for leaf in s.outputs] for bucket, s in self._signatures.items()}
        self._places = {bucket: manifest.operands(bucket) for bucket in self._entries}
        any_size = {entry.bucket.kind for entry in manifest.graphs if entry.any_size and mesh.size == 1 and kind_of(entry.bucket).dynamic}
        self.any_size = frozenset(any_size)
        self._any_size: dict[tuple[str, int], Bucket] = {}
        self._opened: dict[str, HostExecutable] = {}
        self._derived: dict[Bucket, set[int]] = {}
        self._executables = {bucket: self._load(entry) for bucket, entry in self._entries.items()}
        self._release()
        self._compiles_before_ready = compile_evidence()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What `launch` takes."""
        return tuple(sorted(self._entries))

    @property
    def regions(self) -> tuple[Region, ...]:
        """Where this rank's pools lie (`Executor.regions`)."""
        addresses = {leaf.path: pool.data_ptr() for leaf, pool in zip(self._leaves, self._state, strict=True)}
        return regions(self._leaves, self.limits, addresses, Rules.of(self.artifact.manifest.rules))

    @property
    def areas(self) -> tuple[RegisteredMemory, ...]:
        """Each pool (`Executor.areas`)."""
        return tuple(RegisteredMemory(region.address, region.nbytes) for region in self.regions)

    def enter(self) -> None:
        """Does nothing: all threads have the same memory."""

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> FinishedStep:
        """Runs one step, which advances the state in place.

        Args:
            bucket: one of `buckets`.
            inputs: one item: arrays by name (`Executor.launch`).

        Returns:
            `tokens` int32 [B, W], in decode `counts` int32 [B], and the bucket's other outputs (models/step.py); of an encode bucket
            `finite` int32 [B].

        Raises:
            SpecError: for a bucket that the artifact does not have, or inputs for more than one dp group or of more tokens than it has.
        """
        check_step(self, bucket, inputs)
        arrays = inputs[0]
        if bucket.kind not in self.any_size:
            whole = self._input_rows[bucket]
            return FinishedStep([self._run(bucket, {name: with_all_rows(arrays[name], whole[name]) for name in whole if name != COORDS})])
        step = sizes_of(bucket, arrays)
        if step.tokens > bucket.tokens:
            raise SpecError(f"a step of {step.batch} rows of {step.q_len} tokens in {bucket.name}; legal are up to {bucket.tokens} tokens")
        if (any_size := self._any_size.get(_kind(bucket))) and not self._entries[bucket].refused:
            outputs = self._run(any_size, long_enough(step, arrays, self.limits, logprobs=self.max_logprobs > 0))
            return FinishedStep([_as_wide(step, outputs)])
        parts = whole_steps(bucket, arrays, self.buckets, self.limits, logprobs=self.max_logprobs > 0)
        results = [(len(part.rows), self._run(part.bucket, part.inputs)) for part in parts]
        return FinishedStep([_as_wide(step, {name: np.concatenate([of[name][:own] for own, of in results]) for name in results[0][1]})])

    def _run(self, bucket: Bucket, arrays: Inputs) -> Outputs:
        """The outputs of a bucket's executable."""
        tensors = [self._coords if name == COORDS else torch.from_numpy(arrays[name]) for name in self._input_rows[bucket]]
        executable = self._executables[bucket]
        results = executable([*self._operands(bucket), *tensors])
        return {name: value.numpy() for name, value in zip(self._output_names[bucket], results, strict=True)}

    def start_decoding(self, group: int, request_slot: int, state_slot: int, position: int, token: int, offset: int = 0) -> None:
        """Writes the request slot of the one dp group (`Executor.start_decoding`)."""
        if not position:
            clear_state(self._leaves, self._state, state_slot)
        self._request_slots[request_slot] = request_slot_start(position, [token], self.limits, offset)

    def receive(self, group: int, numbers: Numbers, ready: Callable[[], None]) -> None:
        """Nothing runs while this is called (`Executor.receive`)."""
        ready()

    def landed(self, group: int, numbers: Numbers) -> None:
        """What peers write is in the memory that steps read (`Executor.landed`)."""

    def refresh(self) -> bool:
        """Loads executables that a build has finished since the last call; returns whether any bucket changed.

        A directory that was rebuilt from other weights or for other sizes is left to the next process.

        Raises:
            NpucompileError: when what the build published cannot be loaded; the buckets stay as they are until the next publication.
        """
        reloaded = self.artifact.reload()
        if reloaded is None:
            return False
        # Set first, so that an artifact that cannot be loaded is reported once and not at every refresh.
        self.artifact = reloaded
        if _operand_layout(reloaded) != self._operand_layout:
            log.warning("%s was rebuilt from other weights or for other sizes; restart the server to serve it", reloaded.path)
            return False
        reloaded.check_runnable()
        changed = False
        for entry in reloaded.manifest.graphs:
            old = self._entries.get(entry.bucket)
            if old is None or entry.compiled in (None, old.compiled) or entry.eager != old.eager:
                continue
            self._executables[entry.bucket] = self._load(entry)
            self._entries[entry.bucket] = entry
            changed = True
        if changed:
            self._release()
        return changed

    def give_back(self, numbers: Sequence[Numbers]) -> None:
        """Returns memory of pages and state slots of the one dp group to the system."""
        self._pools.give_back(numbers[0])

    def compiles(self) -> int:
        """Traces and compiles of this process since it was ready, and compiler modules that it imported since."""
        return compile_evidence() - self._compiles_before_ready

    @property
    def state_bytes(self) -> int:
        """Bytes of all state pools."""
        return sum(t.numel() * t.element_size() for t in self._state)

    def _load(self, entry: GraphEntry) -> Executable:
        executable = self._open(entry)
        signature = self._signatures[entry.bucket]
        blank = [torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in signature.inputs]
        operands, (places, _) = self._operands(entry.bucket), self._places[entry.bucket]
        check_operands([*operands, *blank], signature)
        self._derived[entry.bucket] = {places[i] for i in executable.prepare(operands[: len(places)])}
        self.backends[entry.bucket.name] = executable.backend
        if entry.any_size and entry.compiled:
            self._any_size.setdefault(_kind(entry.bucket), entry.bucket)
        return executable

    def _operands(self, bucket: Bucket) -> list[torch.Tensor]:
        """Parameters and pools that a bucket's executable takes."""
        params, state = self._places[bucket]
        return [*(self._params[i] for i in params), *(self._state[i] for i in state)]

    def _release(self) -> None:
        """Gives back the memory of parameters that no bucket reads as they are stored; they stay mapped."""
        reads = {bucket: set(self._places[bucket][0]) - derived for bucket, derived in self._derived.items()}
        mapped.release(self._params[i] for i in sorted(set(range(len(self._params))) - set().union(*reads.values())))

    def _open(self, entry: GraphEntry) -> HostExecutable:
        if entry.compiled is None:
            return open_executable(self.artifact.path / entry.reference, "eager")
        # Buckets of a kind have the same one.
        if entry.compiled.file not in self._opened:
            self._opened[entry.compiled.file] = open_executable(self.artifact.path / entry.compiled.file, entry.compiled.backend)
        return self._opened[entry.compiled.file]


def _as_wide(step: Bucket, outputs: Outputs) -> Outputs:
    """The outputs of a step of these sizes that ran with more tokens a row."""
    kind = kind_of(step)
    return {name: value[(slice(None), *kind.live(name, step.q_len))] for name, value in outputs.items()} if kind.wide else outputs


def _left_out(manifest: Manifest) -> dict[Bucket, str]:
    """Buckets without an executable, as it was wrong, whose steps a larger one runs faster than their eager graph; each with the reason."""
    compiled = [entry.bucket for entry in manifest.graphs if entry.compiled]
    return {
        entry.bucket: entry.refused
        for entry in manifest.graphs
        if entry.refused and any(_kind(other) == _kind(entry.bucket) and _holds(other, entry.bucket) for other in compiled)
    }


def _holds(bucket: Bucket, other: Bucket) -> bool:
    return bucket.batch >= other.batch and bucket.q_len >= other.q_len


def _kind(bucket: Bucket) -> tuple[str, int]:
    """Buckets of which one executable runs all: decode steps of a width, and prefill steps."""
    return bucket.kind, 0 if kind_of(bucket).ragged else bucket.q_len


def _operand_layout(artifact: Artifact) -> tuple[object, ...]:
    """What the parameters and state that an executor keeps depend on; executables built for another layout would misread them."""
    manifest = artifact.manifest
    return manifest.weights, manifest.params, manifest.state, manifest.limits, manifest.mesh, manifest.rules

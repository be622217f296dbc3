"""The manifest of an artifact: its records, and their encoding as bytes, equal for equal manifests.

The bytes are msgpack: `{"format", "manifest", "sha256"}`, where `manifest` is packed bytes and `sha256` their digest. The digest
detects damage; it is no signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ...graphs.errors import ArtifactError, ArtifactStale, ArtifactTampered
from ...graphs.steps.table import kind_of
from ...graphs.types import DTYPE_NAMES, DTYPES, PICTURE_ROWS, Aval, Bucket, Leaf, Limits, Signature

FORMAT = 8


@dataclass(frozen=True)
class FileRecord:
    """Digest and size that a file of the artifact must have."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ExecutableRecord:
    """The file of a graph's executable.

    Attributes:
        backend: name of the backend that compiled it.
        file: path in the artifact.
        key: digest of lowered graph, backend, options and toolchain; equal keys mean equal executables.
    """

    backend: str
    file: str
    key: str


@dataclass(frozen=True)
class Variable:
    """A variable of the environment of the processes that run the artifact: its value, and why it is set."""

    value: str
    why: str


@dataclass(frozen=True)
class GraphEntry:
    """The graph of one bucket.

    Attributes:
        inputs, outputs: leaves of the step's inputs and outputs; params and state are those of the manifest.
        eager: path of the eager graph; None where the artifact's target cannot run one.
        stages: path of the compressed texts of its stages.
        digest: `artifact.graph_key` of its lowered text, backend, options and toolchain.
        compiled: record of its executable; None while it is not compiled.
        cost: flops, read_bytes, write_bytes of one step whose page tables are full; cached_flops, the part of flops that is for cached
            tokens.
        memory: params_bytes, state_bytes, inputs_bytes, peak_bytes.
        collectives: (collective, group, type) in program order.
        verified: measured differences between the executable and the reference; empty while it is not compiled.
        stamp: digest of everything that decides the bucket's graph; while it is equal the bucket need not be traced again.
        census: number of operators of the executable by type, where its backend counts them.
        any_size: its executable, once it has one, runs steps of any rows and tokens a row: sizes are values that its operands tell.
        refused: how the executable that was compiled for it disagreed with the reference, so that it was left out.
    """

    bucket: Bucket
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    eager: str | None
    stages: str
    digest: str
    compiled: ExecutableRecord | None
    cost: Mapping[str, int]
    memory: Mapping[str, int]
    collectives: tuple[tuple[str, str, str], ...]
    verified: Mapping[str, float]
    stamp: str = ""
    census: Mapping[str, int] = field(default_factory=dict)
    any_size: bool = False
    refused: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files it names."""
        names = (self.eager, self.stages, self.compiled.file if self.compiled else None)
        return tuple(name for name in names if name)

    @property
    def reference(self) -> str:
        """Path of the eager graph.

        Raises:
            ArtifactError: the artifact was built for another kind of device, so the bucket cannot run on this machine.
        """
        if self.eager is None:
            raise ArtifactError(
                f"{self.bucket.name} was built for another kind of device and nothing of it runs here; legal is a build with --target cpu"
            )
        return self.eager

    @property
    def backend(self) -> str:
        """Name of the backend that runs this bucket now."""
        return self.compiled.backend if self.compiled else "eager"

    @property
    def max_logprobs(self) -> int:
        """Number of most likely tokens whose log probabilities the step returns; 0 where it returns none."""
        return next((leaf.aval.shape[-1] for leaf in self.outputs if leaf.path == "top_ids"), 0)

    @property
    def tells_experts(self) -> bool:
        """Whether steps return the experts of their tokens."""
        return any(leaf.path == "experts" for leaf in self.outputs)


@dataclass(frozen=True)
class Manifest:
    """Everything about an artifact except the contents of its files.

    Attributes:
        model: name, family, config (its config.json), vocab_size, eos_ids, special_tokens (texts that the chat template names), sampling
            (what its generation_config.json recommends); `draft_model` (name, config, parts, checkpoint) where its draft
            head is of a second checkpoint, whose parameters are among `params`; `origin` (name, revision) where the checkpoint is a copy of
            a hub's; `family_file` (name, sha256, path, text) where its family
            is of a file of the user's; `tower` (key; `processor`, fields of `server.pictures.processor.PictureProcessor`; `ids`,
            tokens of pictures by their names in config.json) where the build takes pictures.
        dtype: name of the dtype that the model computes in.
        mesh: e.g. "dp=8,tp=2"; "1" is one device.
        rules: logical axis to mesh axes.
        target: kind of machine it is for (tools/builder/targets.py).
        backend: name of the backend that the build compiles with.
        params, state: flat operands of all graphs, each of which takes those that are for its kind of bucket (`operands`).
        graphs: buckets that are served.
        references: eager graphs of one row, with which rows of larger buckets are compared; not served.
        weights, tokenizer, chat_template: paths, or None where the artifact was built without them.
        checkpoint: directory of the checkpoint that the weights are read from when they are loaded; None where they are in the artifact, or
            there are none.
        files: path to record, for every file but the manifest.
        toolchain: versions and machine that the executables were built with.
        cpu_features: CPU features that the executables need, by torch's names.
        source_digest: digest of the checkpoint that the weights were read from, the draft model's included.
        build_arguments: command line that builds the artifact again.
        quantization: name of the scheme that parameters are stored in; "none" where they are floats.
        formats: fields of `models.quant.formats.Formats`: which matrices are stored as integers.
        deployment: id of the named deployment that it was built for, or "".
        memory: memory plan of each device (tools/builder/memory.py), where the target has a limit of its own.
        environment: variables that the processes of all ranks run with, by name, where the target needs any.
        communicator_bytes: size of one buffer of each communicator, by its symbol in GE graphs, where the target has communicators.
        platform: fields of `lowering.platform.Platform`: what the graphs were lowered for.
        decided_by: who decided each setting of the build, by the option that sets it (tools/builder/decisions.py).
        reasons: sentences with the figures by which the plan decided settings, by their options.
    """

    model: Mapping[str, Any]
    dtype: str
    mesh: str
    rules: Mapping[str, tuple[str, ...]]
    target: str
    backend: str
    limits: Limits
    params: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    graphs: tuple[GraphEntry, ...]
    references: tuple[GraphEntry, ...]
    weights: str | None
    tokenizer: str | None
    files: Mapping[str, FileRecord]
    toolchain: Mapping[str, str]
    cpu_features: tuple[str, ...]
    source_digest: str
    build_arguments: tuple[str, ...]
    quantization: str = "none"
    formats: Mapping[str, Any] = field(default_factory=dict)
    deployment: str = ""
    memory: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    chat_template: str | None = None
    environment: Mapping[str, Variable] = field(default_factory=dict)
    communicator_bytes: Mapping[str, int] = field(default_factory=dict)
    platform: Mapping[str, Any] = field(default_factory=dict)
    decided_by: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def operands(self, bucket: Bucket) -> tuple[list[int], list[int]]:
        """Which of `params` and of `state` the graph of a bucket takes, in its order.

        Encode buckets read the vision tower and write the pool of rows of pictures, and nothing else; others take all but the tower.
        """
        encodes, prefix = kind_of(bucket).tower, f"{self.model.get('tower', {}).get('key')}."
        params = [i for i, leaf in enumerate(self.params) if leaf.path.startswith(prefix) == encodes]
        return params, [i for i, leaf in enumerate(self.state) if not encodes or leaf.aval.axes[0] == PICTURE_ROWS]

    def signature(self, entry: GraphEntry) -> Signature:
        """Calling convention of one graph."""
        params, state = self.operands(entry.bucket)
        return Signature(tuple(self.params[i] for i in params), tuple(self.state[i] for i in state), entry.inputs, entry.outputs)


def encode(manifest: Manifest) -> bytes:
    """msgpack with sorted keys."""
    inner = msgpack.packb(_sorted(_plain(manifest)))
    packed: bytes = msgpack.packb({"format": FORMAT, "manifest": inner, "sha256": hashlib.sha256(inner).hexdigest()})
    return packed


def decode(data: bytes, where: str) -> Manifest:
    """Reads a manifest.

    Raises:
        ArtifactTampered: when the bytes are no manifest, or differ from those that were written.
        ArtifactStale: when the manifest has another format.
    """
    try:
        outer = msgpack.unpackb(data, strict_map_key=False)
        version = outer["format"]
    except Exception as error:
        raise ArtifactTampered(f"{where}: {len(data)} bytes are not a manifest: {type(error).__name__}: {error}") from None
    if version != FORMAT:
        raise ArtifactStale(f"{where}: manifest format is {version!r}, this npucompile reads {FORMAT}; build the artifact again")
    try:
        inner, expected = bytes(outer["manifest"]), str(outer["sha256"])
        digest = hashlib.sha256(inner).hexdigest()
        plain = msgpack.unpackb(inner) if digest == expected else None
        manifest = _manifest(plain) if plain is not None else None
    except Exception as error:
        raise ArtifactTampered(f"{where}: lacks fields of format {FORMAT}: {type(error).__name__}: {error}") from None
    if manifest is None:
        raise ArtifactTampered(f"{where} has sha256 {digest} inside; it says {expected}")
    return manifest


def plain_entry(entry: GraphEntry) -> dict[str, Any]:
    """An entry as plain values that msgpack can pack."""
    packed: dict[str, Any] = _plain(entry)
    return packed


def entry_of(plain: dict[str, Any]) -> GraphEntry:
    """The inverse of `plain_entry`."""
    return _entry(plain)


def plain_value(value: Any) -> Any:
    """A field of a manifest as strings, numbers, lists and dictionaries."""
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Leaf):
        return [value.name, list(value.aval.shape), DTYPE_NAMES[value.aval.dtype], list(value.aval.axes)]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _sorted(value[k]) for k in sorted(value)}
    if isinstance(value, list):
        return [_sorted(v) for v in value]
    return value


def _leaves(plain: list[Any]) -> tuple[Leaf, ...]:
    return tuple(Leaf(name, Aval(tuple(shape), DTYPES[dtype], tuple(axes))) for name, shape, dtype, axes in plain)


def _entry(plain: dict[str, Any]) -> GraphEntry:
    compiled = plain["compiled"]
    return GraphEntry(
        **{
            **plain,
            "bucket": Bucket(**plain["bucket"]),
            "inputs": _leaves(plain["inputs"]),
            "outputs": _leaves(plain["outputs"]),
            "compiled": ExecutableRecord(**compiled) if compiled else None,
            "collectives": tuple((a, b, c) for a, b, c in plain["collectives"]),
        }
    )


def _manifest(plain: dict[str, Any]) -> Manifest:
    return Manifest(
        **{
            **plain,
            "rules": {k: tuple(v) for k, v in plain["rules"].items()},
            "limits": Limits(**plain["limits"]),
            "params": _leaves(plain["params"]),
            "state": _leaves(plain["state"]),
            "graphs": tuple(_entry(entry) for entry in plain["graphs"]),
            "cpu_features": tuple(plain["cpu_features"]),
            "build_arguments": tuple(plain["build_arguments"]),
            "references": tuple(_entry(entry) for entry in plain["references"]),
            "files": {k: FileRecord(**v) for k, v in plain["files"].items()},
            "environment": {k: Variable(**v) for k, v in plain["environment"].items()},
        }
    )

"""Turns the description of an artifact into bytes, the same bytes for the same description, and back.

The bytes are msgpack: `{"format", "manifest", "sha256"}`, the manifest packed by itself and its digest beside it. The digest
finds damage; it is no signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ...graphs.errors import ArtifactError, ArtifactStale, ArtifactTampered
from ...graphs.types import DTYPE_NAMES, DTYPES, Aval, Bucket, Leaf, Limits, Signature

FORMAT = 5


@dataclass(frozen=True)
class FileRecord:
    """What a file of the artifact must be."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Compiled:
    """The executable of a graph.

    Attributes:
        backend: who made it.
        file: path in the artifact.
        key: digest of lowered graph, backend, options and toolchain; equal keys are equal executables.
    """

    backend: str
    file: str
    key: str


@dataclass(frozen=True)
class GraphEntry:
    """One bucket.

    Attributes:
        inputs, outputs: its step's inputs and outputs; params and state are the artifact's.
        eager: path of the eager graph; None where the artifact is for a device that no eager graph runs on.
        stages: path of the compressed texts of its stages.
        digest: `artifact.graph_key` of what the build compiles: lowered text, backend, options and toolchain.
        compiled: its executable; None while there is none.
        cost: flops, read_bytes, write_bytes of one step.
        memory: params_bytes, state_bytes, inputs_bytes, peak_bytes.
        collectives: (collective, group, type) in program order.
        verified: what comparing the executable with the reference measured; empty while there is none.
        stamp: digest of all that decided this bucket before it was traced; of an equal stamp it need not be traced again.
        census: operators of the executable by type, where its backend tells.
    """

    bucket: Bucket
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    eager: str | None
    stages: str
    digest: str
    compiled: Compiled | None
    cost: Mapping[str, int]
    memory: Mapping[str, int]
    collectives: tuple[tuple[str, str, str], ...]
    verified: Mapping[str, float]
    stamp: str = ""
    census: Mapping[str, int] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all its files."""
        names = (self.eager, self.stages, self.compiled.file if self.compiled else None)
        return tuple(name for name in names if name)

    @property
    def reference(self) -> str:
        """Path of the eager graph.

        Raises:
            ArtifactError: nothing of the bucket runs on this machine.
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
        """Of how many most likely tokens the step tells log probabilities; 0 tells none at all."""
        return next((leaf.aval.shape[-1] for leaf in self.outputs if leaf.path == "top_ids"), 0)


@dataclass(frozen=True)
class Manifest:
    """All that is to be known of an artifact without its files.

    Attributes:
        model: name, family, config (its config.json), vocab_size, eos_ids.
        dtype: name of the computing dtype.
        mesh: e.g. "dp=8,tp=2"; "1" is one device.
        rules: logical axis to mesh axes.
        target: kind of machine it is for (tools/build/targets.py).
        backend: name of the backend that the build compiles for.
        params, state: flat operands shared by all graphs.
        graphs: buckets that are served.
        references: eager graphs of one row, to compare rows of larger buckets with; not served.
        weights, tokenizer: paths, where the artifact has them.
        files: path to record, for every file but the manifest.
        toolchain: versions and machine the executables were built with.
        cpu_features: what they need of a CPU, by torch's names.
        source_digest: what the weights were read from.
        build_arguments: command line that builds this again.
        quantization: name of the scheme that parameters are held in; "none" where they are floats.
        deployment: id of the named deployment it was built for, or "".
        memory: plan of each device's memory (tools.memory), where the target has a limit of its own.
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
    deployment: str = ""
    memory: Mapping[str, Any] = field(default_factory=dict)

    def signature(self, entry: GraphEntry) -> Signature:
        """Calling convention of one graph."""
        return Signature(self.params, self.state, entry.inputs, entry.outputs)


def encode(manifest: Manifest) -> bytes:
    """msgpack with sorted keys."""
    inner = msgpack.packb(_sorted(_plain(manifest)))
    packed: bytes = msgpack.packb({"format": FORMAT, "manifest": inner, "sha256": hashlib.sha256(inner).hexdigest()})
    return packed


def decode(data: bytes, where: str) -> Manifest:
    """Reads a manifest.

    Raises:
        ArtifactTampered: when the bytes are no manifest, or not the ones that were written.
        ArtifactStale: when they are one of another format.
    """
    try:
        outer = msgpack.unpackb(data, strict_map_key=False)
        built_format = outer["format"]
    except Exception as error:
        raise ArtifactTampered(f"{where}: {len(data)} bytes are not a manifest: {type(error).__name__}: {error}") from None
    if built_format != FORMAT:
        raise ArtifactStale(f"{where}: manifest format is {built_format!r}, this npucompile reads {FORMAT}; build the artifact again")
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
    """An entry in values that msgpack packs."""
    packed: dict[str, Any] = _plain(entry)
    return packed


def entry_of(plain: dict[str, Any]) -> GraphEntry:
    """The entry of `plain_entry`."""
    return _entry(plain)


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
            "compiled": Compiled(**compiled) if compiled else None,
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
        }
    )

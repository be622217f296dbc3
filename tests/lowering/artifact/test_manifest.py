"""lowering/artifact/manifest.py: equal manifests have equal bytes, read back equal, and any damage is detected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import ArtifactError, ArtifactStale, ArtifactTampered
from npucompile.graphs.types import DTYPES, Aval, Bucket, Leaf, Limits
from npucompile.lowering.artifact.manifest import (
    FORMAT,
    ExecutableRecord,
    FileRecord,
    GraphEntry,
    Manifest,
    Variable,
    decode,
    encode,
    entry_of,
    plain_entry,
)

ENTRY = GraphEntry(
    bucket=Bucket("decode", 4, 1),
    inputs=(Leaf("inputs.tokens", Aval((4, 1), torch.int32)),),
    outputs=(Leaf("outputs.logits", Aval((4, 1, 9), torch.float32)),),
    eager="graphs/a.graph",
    stages="stages/b.json.z",
    digest="d" * 64,
    compiled=ExecutableRecord("inductor", "graphs/c.pt2", "k" * 64),
    cost={"flops": 10, "read_bytes": 2**40},
    memory={"peak_bytes": 7},
    collectives=(("all_reduce", "tp", "f32[4]"),),
    verified={"logits_error": 1e-6},
)
MANIFEST = Manifest(
    model={"name": "tiny", "config": {"layers": 2, "ratio": 0.25, "names": ["a", None, True]}},
    dtype="f32",
    mesh="dp=2,tp=2",
    rules={"experts": ("dp", "tp")},
    target="cpu",
    backend="inductor",
    limits=Limits(16, 9, 5, 64, 2, 1),
    params=(Leaf("params.w", Aval((9, 4), torch.bfloat16, ("vocab", None))),),
    state=(Leaf("state.kv", Aval((9, 16, 1, 4), torch.bfloat16)),),
    graphs=(ENTRY,),
    references=(replace(ENTRY, compiled=None, verified={}),),
    weights="weights/w.safetensors",
    tokenizer=None,
    files={"graphs/a.graph": FileRecord("e" * 64, 3), "weights/w.safetensors": FileRecord("f" * 64, 4)},
    toolchain={"torch": "2.13.0"},
    cpu_features=("avx2",),
    source_digest="s" * 64,
    build_arguments=("--buckets", "4"),
    environment={"HCCL_BUFFSIZE": Variable("400", "room for 64 tokens a rank")},
    communicator_bytes={"tp": 2**20},
)


def test_a_manifest_reads_back_equal() -> None:
    assert decode(encode(MANIFEST), "m") == MANIFEST


def test_order_of_mappings_does_not_reach_the_bytes() -> None:
    turned = replace(MANIFEST, model=dict(reversed(MANIFEST.model.items())), files=dict(reversed(MANIFEST.files.items())))
    assert encode(turned) == encode(MANIFEST)


def test_the_signature_of_a_bucket_joins_both() -> None:
    signature = MANIFEST.signature(ENTRY)
    assert (signature.params, signature.state) == (MANIFEST.params, MANIFEST.state)
    assert (signature.inputs, signature.outputs) == (ENTRY.inputs, ENTRY.outputs)


def test_a_bucket_runs_on_eager_until_compiled() -> None:
    assert (ENTRY.backend, replace(ENTRY, compiled=None).backend) == ("inductor", "eager")


def test_of_how_many_tokens_log_probabilities_are_told_is_what_the_outputs_hold() -> None:
    leaf = Leaf("outputs.top_ids", Aval((4, 1, 5), torch.int32))
    assert (ENTRY.max_logprobs, replace(ENTRY, outputs=(*ENTRY.outputs, leaf)).max_logprobs) == (0, 5)


DEVICE_ENTRY = replace(
    ENTRY, eager=None, compiled=ExecutableRecord("ge", "graphs/c.ge", "k" * 64), verified={}, stamp="p" * 64, census={"MatMul": 3, "Add": 1}
)
DEVICE = replace(
    MANIFEST,
    target="ascend-a3",
    graphs=(DEVICE_ENTRY,),
    references=(),
    weights=None,
    quantization="w4a8",
    deployment="a-row",
    memory={"target": "ascend-a3", "parts": [{"name": "KV pages", "nbytes": 2**36, "why": "9 pages"}], "fits": True},
)


def test_what_is_for_a_device_reads_back_equal() -> None:
    assert decode(encode(DEVICE), "m") == DEVICE
    assert encode(decode(encode(DEVICE), "m")) == encode(DEVICE)


def test_an_entry_alone_is_plain_and_reads_back_equal() -> None:
    for entry in (ENTRY, DEVICE_ENTRY, replace(DEVICE_ENTRY, compiled=None)):
        assert entry_of(msgpack.unpackb(msgpack.packb(plain_entry(entry)))) == entry


def test_a_bucket_for_a_device_has_no_graph_that_runs_here_and_says_so() -> None:
    assert ENTRY.reference == ENTRY.eager
    with pytest.raises(ArtifactError, match=r"decode-b4-q1 was built for another kind of device.*legal is a build with --target cpu"):
        _ = DEVICE_ENTRY.reference


NAMES = st.text("abcdef.", min_size=1, max_size=8)
LEAVES = st.lists(
    st.builds(
        lambda name, shape, dtype: Leaf(name, Aval(tuple(shape), dtype, tuple("x" if i % 2 else None for i, _ in enumerate(shape)))),
        NAMES,
        st.lists(st.integers(1, 2**40), max_size=4),
        st.sampled_from(list(DTYPES.values())),
    ),
    max_size=4,
).map(tuple)
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    params=LEAVES, state=LEAVES, inputs=LEAVES, model=st.dictionaries(st.text(), PLAIN), verified=st.dictionaries(NAMES, st.floats(0, 1))
)
def test_any_manifest_reads_back_equal(
    params: tuple[Leaf, ...], state: tuple[Leaf, ...], inputs: tuple[Leaf, ...], model: dict[str, Any], verified: dict[str, float]
) -> None:
    entry = replace(ENTRY, inputs=inputs, verified=verified, eager=None, census={name: 1 for name in verified})
    manifest = replace(MANIFEST, params=params, state=state, model=model, graphs=(entry, ENTRY))
    again = decode(encode(manifest), "m")
    assert again == manifest
    assert encode(again) == encode(manifest)


DATA = encode(MANIFEST)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(at: int, change: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= change
    with pytest.raises((ArtifactTampered, ArtifactStale), match="here/manifest"):
        decode(bytes(damaged), "here/manifest")


@given(st.integers(0, len(DATA) - 1))
def test_any_truncation_is_found(length: int) -> None:
    with pytest.raises(ArtifactTampered, match=f"{length} bytes are not a manifest"):
        decode(DATA[:length], "m")


@given(st.binary(max_size=40))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises((ArtifactTampered, ArtifactStale)):
        decode(data, "m")


def test_another_format_is_stale_and_says_both() -> None:
    with pytest.raises(ArtifactStale, match=f"format is 1, this npucompile reads {FORMAT}"):
        decode(msgpack.packb({"format": 1, "model": {}}), "m")


def test_a_damaged_inside_names_both_digests() -> None:
    outer = msgpack.unpackb(DATA)
    outer["sha256"] = "0" * 64
    with pytest.raises(ArtifactTampered, match=r"has sha256 [0-9a-f]{64} inside; it says 0{64}"):
        decode(msgpack.packb(outer), "m")

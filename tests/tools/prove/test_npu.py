"""tools/prove/npu.py: an artifact for NPUs is verified, and each way to spoil its pipeline is found."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import published_pictures, ranks, tiny, towers
from support import small_images as images

from npucompile.graphs.errors import LoweringError, VerifyError
from npucompile.graphs.ops.packed_latents import packed_axis
from npucompile.graphs.primitive import TABLE
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Aval, Bucket, Leaf
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.ascend import npu_backend
from npucompile.lowering.ascend.ge_file import GeFile, decode, operators, parse
from npucompile.lowering.ascend.inspect_ge import shape
from npucompile.lowering.ascend.shipped import GE
from npucompile.models import sampling
from npucompile.models.quant.recipes import formats_of_scheme
from npucompile.tools.agreement.tolerances import FLOAT, QUANTISED, QUANTISED_LATENTS
from npucompile.tools.inspection import cost
from npucompile.tools.notation import EncodeSize
from npucompile.tools.prove import npu
from npucompile.tools.prove.npu import describe, representative_steps
from npucompile.tools.prove.small_model import BucketCase, Form
from npucompile.tools.prove.step_trace import ExpectedOutputs, StepTrace, TraceStep

DECODE, BOTH = ("decode",), ("prefill", "decode")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return images.shipped(ranks.SIZES, tmp_path_factory)


@pytest.fixture(scope="module")
def prove(artifact, tmp_path_factory):
    """Verifies the artifact or part of it in this process, and restores torch's thread count."""
    cache = tmp_path_factory.mktemp("cache")

    def run(kinds=DECODE, steps=1, **fields):
        graphs = tuple(entry for entry in artifact.manifest.graphs if entry.bucket.kind in kinds)
        threads = torch.get_num_threads()
        try:
            changed = SimpleNamespace(path=artifact.path, manifest=replace(artifact.manifest, graphs=graphs, **fields))
            return npu.verify_device(changed, cache, tiny.QUIET, steps=steps)
        finally:
            torch.set_num_threads(threads)

    return run


def lowered_otherwise(monkeypatch, name, change):
    """Lowers a primitive for NPUs to `change` of the right result."""
    for facet, right in list(TABLE[name]._rules.items()):
        if facet.startswith("lowering:npu"):
            monkeypatch.setitem(TABLE[name]._rules, facet, lambda *args, right=right: change(right(*args)))


def test_every_check_is_named_with_its_measurements(prove):
    measured = prove(BOTH, steps=2)
    assert list(measured) == [
        "manifest",
        "prefill-b1-q16 shipped",
        "decode-b4-q2 shipped",
        "ranks",
        "small model",
        "lowered f32",
        "GE f32",
        "lowered f32, logits in shares",
        "prefill-b1-q16 small",
        "decode-b4-q2 small",
        "GE bf16 as lowered",
    ]
    assert measured["small model"] == {"ranks": 4, "layers": 4, "experts": 8, "buckets": 2} | {
        name: measured["small model"][name] for name in ("steps", "results")
    }
    assert measured["lowered f32"]["rows"] == 2 * measured["small model"]["results"]
    assert 0 < measured["lowered f32"]["logits_error"] < npu.FLOAT.worst / 10
    # GE's tensors lie side by side where those of the lowered graph are views, so that sums differ in a last bit.
    assert measured["GE f32"] == pytest.approx(measured["lowered f32"], rel=0.5)
    assert measured["lowered f32"]["drafts"] > 10
    assert measured["GE bf16 as lowered"]["tokens"] >= 10


@pytest.mark.parametrize(
    ("name", "change", "difference"),
    [
        ("accept", lambda counts: counts.clamp(max=1), r"counts are \["),
        ("accept", lambda counts: counts.clamp(min=1) + (counts == 1).int(), r"counts are \["),
        ("request_slot_write", lambda pool: torch.cat([pool[1:], pool[:1]]), r"request slot \d holds \["),
        ("gated_rms_norm", torch.neg, "logits differ"),
        ("paged_attention", lambda out: out * 1.05, "logits differ"),
        ("delta_gates", lambda out: (out[0] * 1.2, out[1]), "logits differ"),
    ],
    ids=["none", "wrong", "another", "sign", "scale", "decay"],
)
@pytest.mark.short_cases("wrong", "another", "decay")
def test_a_wrong_lowering_is_found(prove, monkeypatch, name, change, difference):
    lowered_otherwise(monkeypatch, name, change)
    with pytest.raises(VerifyError, match=rf"lowered f32, rank 0 \(dp 0, tp 0\), step 0 \(decode-b4-q2\): {difference}"):
        prove()


def test_drafts_of_another_part_of_the_vocabulary_are_found(prove, monkeypatch):
    right = sampling._best_of_shards
    monkeypatch.setattr(sampling, "_best_of_shards", lambda logits: (right(logits) + logits.shape[-1]) % (2 * logits.shape[-1]))
    with pytest.raises(VerifyError, match=r"lowered f32, rank 0 \(dp 0, tp 0\), step 0 \(decode-b4-q2\): drafts of rows"):
        prove()


def test_a_wrong_scale_of_quantised_experts_is_found(prove, artifact, monkeypatch):
    lowered_otherwise(monkeypatch, "grouped_experts_w8a8", lambda out: out * 1.01)
    monkeypatch.setattr(npu.verify_shipped, "check_manifest", lambda manifest: {})
    monkeypatch.setattr(npu.verify_shipped, "check_small_bucket", lambda *bucket: {})
    with pytest.raises(VerifyError, match=r"lowered f32, rank 0 .*: (half of all )?logits differ"):
        prove(formats=formats_of_scheme("w8a8", "qwen3.5-397b").as_fields())


def test_a_collective_of_another_group_is_found(prove, monkeypatch):
    def swapped(*args):
        partitioned = partition(*args)
        for body in (partitioned.graph, *partitioned.graph.children()):
            for node in body.graph.nodes if hasattr(body, "graph") else ():
                if "reduce_scatter" in str(node.target):
                    node.args = (*node.args[:-1], "dp")
        return partitioned

    monkeypatch.setattr(npu, "partition", swapped)
    with pytest.raises(VerifyError, match=r"lowered f32, rank 0"):
        prove()


def spoiled(monkeypatch, change):
    """Changes GE graphs between conversion and interpretation."""

    def read(data):
        ge_file = decode(data)
        model = parse(ge_file.graph)
        change(list(operators(model)))
        return replace(ge_file, graph=model.SerializeToString(deterministic=True))

    monkeypatch.setattr(npu, "ENCODINGS", {"ge": replace(GE, decode=read)})


def test_a_difference_that_only_the_artifacts_own_type_has_is_found(prove, monkeypatch):
    def duller(ops):
        for op in ops:
            if op.type == "AddRmsNorm" and shape(op.output_desc[0]).startswith("bf16"):
                op.attr["epsilon"].f = 0.1

    spoiled(monkeypatch, duller)
    with pytest.raises(VerifyError, match=r"GE bf16 against lowered bf16, rank 0 .*, step \d \(decode-b4-q2\): "):
        prove()


def test_an_operator_that_a_kernel_refuses_fails_its_check(prove, monkeypatch):
    class Refusing(npu.Interpreter):
        def __call__(self, *args):
            raise LoweringError("no such thing")

    right = npu.Interpreter
    monkeypatch.setattr(npu, "Interpreter", lambda graph, *a, **k: (Refusing if isinstance(graph, GeFile) else right)(graph, *a, **k))
    with pytest.raises(VerifyError, match="GE f32: no such thing"):
        prove()


def test_without_torch_npu_the_reason_is_given(prove, monkeypatch):
    monkeypatch.setattr(npu_backend.harness, "available", lambda: "torch_npu is not installed")
    with pytest.raises(LoweringError, match="torch_npu is not installed"):
        prove()


def test_representative_steps_are_the_fullest_of_every_case_and_the_last_that_decodes():
    """A later chunk or a decode row reads what an earlier step wrote; the first chunk of a prompt does not."""
    small, large, chunk = (BucketCase(Bucket(kind, 2, 2), Form(kind, n, *[True] * 4, "none"), ()) for kind, n in KINDS)

    def traced(case, at, *valid):
        """A step whose groups have so many valid results each, of a row with `at` tokens in the caches."""
        expected = tuple(ExpectedOutputs((0,), (n,), (1,), (True,), *[torch.zeros(0)] * 4) if n else None for n in valid)
        inputs = {"num_computed_tokens": torch.tensor([at]), "request_slots": torch.tensor([1])}
        return TraceStep(case, (inputs,) * len(valid), (torch.tensor([[0], [at]]),) * len(valid), expected)

    def chosen(*steps):
        return representative_steps(StepTrace(steps, ()))

    assert chosen(traced(chunk, 0, 9, 9), traced(chunk, 5, 1, 0), traced(chunk, 7, 1, 1), traced(chunk, 9, 1, 0)) == (2,)
    assert chosen(traced(chunk, 0, 1, 0), traced(chunk, 0, 2, 2)) == (1,)
    assert chosen(traced(small, 5, 1, 0), traced(large, 5, 2, 0), traced(small, 5, 3, 1), traced(small, 5, 2, 1)) == (1, 2, 3)


KINDS = (("decode", 1), ("decode", 2), ("prefill", 64))


def test_drafts_of_int8_latents_may_turn_where_products_round_too():
    packed = Leaf("state.layers.0.packed", Aval((5, 4, 1, 52), torch.int8, ("pages", None, None, packed_axis(32, torch.bfloat16))))
    keys = Leaf("state.layers.0.index", Aval((5, 4, 1, 32), torch.int8, ("pages", None, None, None)))
    chosen = [npu.allowed_differences(leaves, quantised) for leaves in ([keys, packed], [keys]) for quantised in (True, False)]
    assert chosen == [QUANTISED_LATENTS, FLOAT, QUANTISED, FLOAT]


def test_measurements_are_shown_in_few_digits():
    assert describe({"rows": 12.0, "logits_error": 1.23e-6, "needed_gib": 0.5}) == "rows 12, logits_error 1.23e-06, needed_gib 0.5"


@pytest.mark.parametrize("packages", [(), ("sgl-kernel-npu", "vllm-ascend")], ids=["stock", "packages"])
@pytest.mark.short_cases("stock")
def test_captured_graphs_are_proved_as_ge_graphs_are(tmp_path_factory, packages):
    """The shipped form computes what the trace says in float32, and in bfloat16 bit for bit what the lowered bodies do."""
    artifact = images.shipped(ranks.SIZES, tmp_path_factory, backend="aclgraph", packages=packages)
    threads = torch.get_num_threads()
    try:
        measured = npu.verify_device(artifact, tmp_path_factory.mktemp("cache"), tiny.QUIET, steps=1)
    finally:
        torch.set_num_threads(threads)
    assert measured["aclgraph f32"] == measured["lowered f32"]
    assert 0 < measured["lowered f32"]["logits_error"] < npu.FLOAT.worst / 10
    assert measured["aclgraph bf16 as lowered"]["tokens"] >= 10
    assert measured["ranks"] == {"ranks": 4, "buckets": 2, "patched": 2}
    assert measured["decode-b4-q2 shipped"]["pools"] == len(artifact.manifest.state)


@pytest.mark.long
def test_graphs_that_take_pictures_are_proved_with_rows_of_them(tmp_path):
    directory = towers.saved("width 72", tmp_path / "tower")
    (directory / "preprocessor_config.json").write_text(json.dumps(published_pictures.FIELDS))
    sizes = {"mesh": "dp=2", "buckets": (2,), "prefill": (8,), "max_model_len": 128, "num_speculative_tokens": 0}
    tiny.built(tiny.planned_device(directory, encode=(EncodeSize(64, 2),), **sizes), tmp_path / "out")
    artifact = Artifact.open(tmp_path / "out")
    measured = npu.verify_device(artifact, tmp_path / "cache", tiny.QUIET, steps=1)
    assert measured["encode-b2-q64 shipped"]["pools"] == 1
    assert 0 < measured["GE f32"]["state_error"] < 1e-4
    (entry,) = (entry for entry in artifact.manifest.graphs if entry.bucket.kind == "encode")
    assert cost.view(artifact, entry, None).lines[0].startswith("encode-b2-q64 on ascend910_93: ")

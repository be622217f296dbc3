"""tools/inspection/views.py: GE graph, collectives, operator census and memory plan of an artifact for NPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ranks, tiny
from support import small_images as images

from npucompile.graphs.errors import LoweringError, SpecError
from npucompile.graphs.types import Limits
from npucompile.lowering.artifact.artifact import Artifact, GraphEntry
from npucompile.lowering.artifact.manifest import ExecutableRecord, Variable
from npucompile.lowering.ascend.ge_file import GeFile, encode, messages
from npucompile.tools.builder.memory import GIB, MemoryPlan, MemoryShare
from npucompile.tools.inspection import views

LAYER = [
    ("all_gather_into_tensor", "tp", "bf16[8,64]"),
    ("reduce_scatter_tensor", "tp", "bf16[4,64]"),
    ("moe_dispatch", "world", "i8[32,64]"),
    ("moe_combine", "world", "bf16[4,64]"),
]
GE = ["HcomAllGather", "HcomReduceScatter", "MoeDistributeDispatchV2", "MoeDistributeCombineV2"]
LAST = ("all_gather_into_tensor", "tp", "i32[4,1]")
TALKS = (*LAYER * 3, LAST)
PLAN = MemoryPlan("ascend-a3", "dp=2,tp=2", (MemoryShare("weights", 3 * GIB, "all of them"),), 64 * GIB, 1, 1, 1, Limits(128, 2, 2, 128))


def ge_file(talks: list[tuple[str, str, str]], *, chained: bool = True) -> GeFile:
    """Three layers, the first of them of a kind of its own, and an epilogue; each collective behind the one before."""
    model = messages().ModelDef()
    graph = model.graph.add(name="main")
    graph.op.add(name="x", type="Data").attr["index"].i = 0
    last = "x"
    for i, (_, group, kind) in enumerate(talks):
        at, place = divmod(i, len(LAYER))
        prefix = ["layer00_full_attention", "layer01_linear_attention", "linear_attention_1", "epilogue"][min(at, 3)]
        if place == 0 and at == 0:
            graph.op.add(name=f"{prefix}/Const", type="Const")
        op = graph.op.add(name=f"{prefix}/talk{place}", type=GE[place])
        op.input.append(f"{last}:0")
        attribute, symbol = ("group_ep", "dispatch") if GE[place].startswith("Moe") else ("group", group)
        op.attr[attribute].s = symbol.encode()
        op.output_desc.add().attr["_meta"].s = kind.encode()
        last = op.name if chained else "x"
    graph.op.add(name="NetOutput", type="NetOutput").input.append(f"{last}:0")
    return GeFile(model.SerializeToString(), {"mode": "m"}, (), (), 1, 1, ())


CENSUS = {"Const": 1, "Data": 1, "HcomAllGather": 4, "HcomReduceScatter": 3, "MoeDistributeCombineV2": 3, "MoeDistributeDispatchV2": 3}
CENSUS["NetOutput"] = 1


def device(path: Path, **changes: Any) -> Artifact:
    """The tiny artifact, told to be one for NPUs; `changes` are fields of its decode-b4 bucket."""

    def change(manifest: Any, writer: Any) -> Any:
        file = writer.add("graphs", encode(ge_file(list(TALKS))), "ge")
        fields = {"compiled": ExecutableRecord("ge", file, "key"), "collectives": TALKS, "census": CENSUS, "eager": None} | changes
        if callable(fields["compiled"]):
            fields["compiled"] = ExecutableRecord("ge", writer.add("graphs", encode(fields["compiled"]()), "ge"), "key")
        graphs = tuple(replace(entry, **fields) if entry.bucket.name == "decode-b4-q4" else entry for entry in manifest.graphs)
        facts = {"mesh": "dp=2,tp=2", "target": "ascend-a3", "quantization": "w8a8", "deployment": "row-1", "memory": PLAN.as_dict()}
        # Heads that two ranks can share.
        facts["model"] = manifest.model | {"config": json.dumps(json.loads(manifest.model["config"]) | {"linear_num_key_heads": 2})}
        return replace(manifest, graphs=graphs, **facts)

    return tiny.published(path, change)


def entry(artifact: Artifact, name: str = "decode-b4-q4") -> GraphEntry:
    return next(candidate for candidate in artifact.manifest.graphs if candidate.bucket.name == name)


def test_a_bucket_without_a_ge_graph_says_what_it_is(own_artifact):
    artifact = device(own_artifact)
    with pytest.raises(SpecError, match="decode-b1-q4 is not compiled; --stage ge shows graphs built for NPUs"):
        views.ge_graph(artifact, entry(artifact, "decode-b1-q4"))
    with pytest.raises(SpecError, match="decode-b4-q4 is compiled by eager"):
        views.ge_graph(artifact, replace(entry(artifact), compiled=ExecutableRecord("eager", "f", "k")))


def test_collectives_are_folded_proved_and_told_by_rank(own_artifact):
    artifact = device(own_artifact)
    view = views.collectives(artifact, entry(artifact))
    # Of a step each rank receives 3 gathers of 1024 bytes and the last of 16, half of them, and as much again to sum.
    assert view.lines[0] == "decode-b4-q4: 13 collectives a rank, mesh dp=2,tp=2; a rank receives 0.00 MB over tp, 0.00 MB over world"
    assert view.data["moved_bytes"] == {"tp": 3 * (512 + 512) + 8, "world": 3 * 4 * 2 * 64 * (1 + 2) * 3 // 4}
    assert [line.split() for line in view.lines[1:6]] == [
        ["3", "x", "|", *LAYER[0]], *(["|", *talk] for talk in LAYER[1:]), [*LAST],
    ]  # fmt: skip
    assert view.data["folded"] == [{"times": 3, "collectives": LAYER}, {"times": 1, "collectives": [LAST]}]
    assert len(view.data["ranks"]) == 4
    assert view.data["ranks"][2]["collectives"][0] == ("all_gather_into_tensor", (2, 3), "bf16[8,64]")
    assert [line for line in view.lines if line.startswith("proved: ")] == [f"proved: {proof}" for proof in view.data["proofs"]]
    assert len(view.data["proofs"]) == 2


def test_without_a_ge_graph_ranks_alone_are_proved(own_artifact):
    artifact = device(own_artifact)
    view = views.collectives(artifact, entry(artifact, "decode-b1-q4"))
    assert view.lines[0] == "decode-b1-q4: 0 collectives a rank, mesh dp=2,tp=2"
    assert len(view.data["proofs"]) == 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ge_file(list(TALKS[:-1])), "collective 12 .* of the shipped graph missing"),
        (lambda: ge_file(list(TALKS), chained=False), "does not wait for"),
    ],
)
def test_a_shipped_graph_that_differs_is_not_called_proved(own_artifact, made, message):
    artifact = device(own_artifact, compiled=made)
    with pytest.raises(LoweringError, match=message):
        views.collectives(artifact, entry(artifact))


def test_operators_are_counted_in_all_and_by_kind_of_body(own_artifact):
    artifact = device(own_artifact)
    view = views.census(artifact, entry(artifact))
    assert view.lines[0] == "decode-b4-q4: 16 operators"
    assert view.lines[1].split("  ")[-4:] == ["main", "full_attention", "linear_attention x 2", "epilogue"]
    rows = {line.split()[0]: line.split()[1:] for line in view.lines[2:9]}
    assert rows["HcomAllGather"] == ["4", "1", "1", "1"]
    assert rows["HcomReduceScatter"] == ["3", "1", "1"]
    assert rows["Data"] == ["1", "1"]
    assert next(iter(rows)) == "HcomAllGather"
    assert sum(sum(counts.values()) for counts in view.data["bodies"].values()) == sum(CENSUS.values())
    assert view.data["collectives"] == 13
    cost = view.data["cost"]
    assert f"{cost['flops'] / 1e9:,.1f} GFLOP" in view.lines[9]
    assert "in 13 collectives" in view.lines[9]
    assert "estimate" in view.lines[10]
    assert "never measured" in view.lines[10]
    roof = view.data["roofline"]
    assert roof["estimate"] is True
    # W8A8: products at the rate of int8.
    assert roof["arithmetic_s"] == pytest.approx(cost["flops"] / 708e12)


def test_a_bucket_for_this_cpu_has_costs_and_no_operators(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    view = views.census(artifact, entry(artifact))
    assert view.lines[0] == "decode-b4-q4: no graph for NPUs, so no operators to count"
    assert view.lines[1].startswith("cost of a step on one rank: ")
    assert (view.data["roofline"], view.data["bodies"], len(view.lines)) == (None, {}, 2)


def test_memory_is_the_plan(own_artifact, tiny_artifact):
    view = views.memory(device(own_artifact).manifest)
    assert MemoryPlan.from_dict(view.data) == PLAN
    assert "\n".join(view.lines[:-1]) == PLAN.as_table()
    assert view.lines[-1].startswith("to load its weights a rank reads ")
    assert view.data["checkpoint_read_bytes"] > 0
    with pytest.raises(SpecError, match="an artifact for cpu has no plan of a rank's memory"):
        views.memory(Artifact.open(tiny_artifact).manifest)


def test_environment_is_a_table_and_plain_values(tiny_artifact):
    sizes = {"dispatch": 901 * 2**20, "tp": 200 * 2**20}
    about = {"environment": {"HCCL_BUFFSIZE": Variable("901", "the window")}, "communicator_bytes": sizes}
    view = views.environment(replace(Artifact.open(tiny_artifact).manifest, **about))
    assert view.lines == ("HCCL_BUFFSIZE=901  the window", "", "MiB of one buffer of each communicator: dispatch 901, tp 200")
    assert view.data == {"environment": {"HCCL_BUFFSIZE": {"value": "901", "why": "the window"}}, "communicator_bytes": sizes}


PARTS = st.lists(st.sampled_from(LAYER), max_size=5)


@given(st.lists(st.tuples(st.integers(1, 4), PARTS), max_size=4))
def test_folding_loses_nothing(parts):
    items = [talk for times, part in parts for talk in part * times]
    folded_parts = views.folded(items)
    assert [talk for times, part in folded_parts for talk in part * times] == items
    assert all(part for _, part in folded_parts)


def test_folding_tells_layers_once():
    assert views.folded([LAST, *LAYER * 60, LAST, LAYER[0]]) == [(1, [LAST]), (60, LAYER), (1, [LAST, LAYER[0]])]
    assert views.folded([LAST, LAST, LAYER[0]] * 2) == [(2, [LAST, LAST, LAYER[0]])]
    assert views.folded([LAST] * 5) == [(5, [LAST])]
    assert views.folded([]) == []


def test_a_captured_graph_is_shown_and_counted(tmp_path_factory):
    artifact = images.shipped(ranks.SIZES, tmp_path_factory, backend="aclgraph")
    decode, prefill = (entry(artifact, name) for name in ("decode-b4-q2", "prefill-b1-q16"))
    shown = views.ge_graph(artifact, decode)
    assert (shown.data["stage"], shown.data["captured"]) == ("aclgraph", True)
    assert sum(line.startswith("-- the host reads lengths") for line in shown.lines) == len(shown.data["cuts"]) == 2
    counts = views.census(artifact, decode)
    assert 0 < counts.data["launches"] < sum(decode.census.values())
    assert counts.data["host_reads"] == 2
    assert not views.census(artifact, prefill).data["captured"]
    assert any("launches a step, captured" in line for line in counts.lines)
    assert "proved: the shipped graph has this list, on one stream" in views.collectives(artifact, decode).lines

"""models/: every layout has the collectives and the traffic of the tables in docs/sharding.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import PartitionedProgram, collective_group, partition
from npucompile.graphs.types import Aval, Bucket, Limits, Mesh
from npucompile.lowering import collectives_check
from npucompile.models import registry, step
from npucompile.models.sharding_rules import rules
from npucompile.models.variant import Variant
from npucompile.tools.inspection.roofline import moved_bytes

M, V, X, LAYERS = 64, 256, 2, ("linear_attention",) * 3 + ("full_attention",)
CONFIG = {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": V, "hidden_size": M,
    "num_hidden_layers": 4, "layer_types": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": X, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1, "eos_token_id": 255,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
DENSE = {"model_type": "qwen3_5_text", "num_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 64}


@dataclass(frozen=True)
class Layout:
    """One row of the first table of docs/sharding.md."""

    name: str
    mesh: str
    step: str
    layer: str
    layer_bytes: str
    rest: str
    rest_bytes: str


SCATTERED = "all_gather tp, reduce_scatter tp"
EMBEDDED = "reduce_scatter tp, all_gather tp"
EXPERTS = "dispatch world, combine world"
GATHERED = "all_gather world, reduce_scatter world"
STREAM, SENT = "2*S*(n-1)/n", "2*X*S/n*(w-1)/w"
# Collectives of a layer and their bytes, collectives beside the layers and theirs.
SPLIT = ("all_reduce tp, all_reduce tp", "4*S*(n-1)/n")
SPREAD = (f"{SCATTERED}, {EXPERTS}", f"{STREAM} + {SENT}")
SAMPLED = (f"{EMBEDDED}, all_to_all tp, all_gather tp", f"{STREAM} + (L/n + K)*(n-1)/n")
SUMMED = ("all_reduce tp, all_to_all tp, all_gather tp", f"{STREAM} + (L/n + K)*(n-1)/n")
ALL_LOGITS = (f"{EMBEDDED}, all_gather tp", f"{STREAM} + L*(n-1)/n")
WHOLE = ("all_reduce tp, all_gather tp", f"{STREAM} + L*(n-1)/n")
NONE = ("none", "0")
LAYOUTS = [
    Layout("dense", "tp=4", "decode 8x2", *SPLIT, *SUMMED),
    Layout("dense, few tokens", "tp=4", "decode 1x1", "all_reduce tp, all_reduce tp", "4*S*(n-1)/n", *WHOLE),
    Layout("dense, groups alone", "dp=4", "decode 8x2", *NONE, *NONE),
    Layout("experts split", "tp=4", "decode 8x2", *SPLIT, *SUMMED),
    Layout("experts spread", "tp=4", "decode 8x2", *SPREAD, *SAMPLED),
    Layout("experts spread, few tokens", "tp=4", "decode 1x1", f"all_reduce tp, {EXPERTS}", f"{STREAM} + 2*X*S*(w-1)/w", *WHOLE),
    Layout("experts spread, fewer kv heads", "tp=4", "decode 8x2", *SPREAD, *SAMPLED),
    Layout("experts spread, groups", "dp=2,tp=2", "decode 8x2", *SPREAD, *SAMPLED),
    Layout("experts spread, groups, odd batch", "dp=2,tp=2", "decode 3x1", *SPREAD, *ALL_LOGITS),
    Layout(
        "experts spread, groups, many tokens",
        "dp=2,tp=2",
        "prefill 1x2048",
        f"{SCATTERED}, {GATHERED}",
        f"{STREAM} + 2*S/n*(w-1)",
        *ALL_LOGITS,
    ),
    Layout("experts spread, groups of one", "dp=4", "decode 8x2", EXPERTS, "2*X*S*(w-1)/w", *NONE),
    Layout("experts spread, groups of one, many tokens", "dp=4", "prefill 1x1024", GATHERED, "2*S*(w-1)", *NONE),
]


@dataclass(frozen=True)
class Pass:
    """One row of the second table: the draft head extends its cache by all tokens and drafts from the last ones."""

    name: str
    mesh: str
    step: str
    taking: str
    taking_bytes: str
    drafting: str
    drafting_bytes: str


FOUND = "R*(n-1)"
SPREAD_PASS = (EMBEDDED, STREAM, f"reduce_scatter tp, {EXPERTS}, all_gather tp, all_gather tp", f"{STREAM} + {SENT} + {FOUND}")
SPLIT_PASS = ("all_reduce tp", STREAM, "all_reduce tp, all_reduce tp, all_gather tp", f"4*S*(n-1)/n + {FOUND}")
FEW_PASS = ("all_reduce tp", STREAM, f"all_reduce tp, {EXPERTS}, all_gather tp", f"{STREAM} + 2*X*S*(w-1)/w + {FOUND}")
PASSES = [
    Pass("dense", "tp=4", "decode 8x4", *SPLIT_PASS),
    Pass("dense, few tokens", "tp=4", "decode 1x2", *SPLIT_PASS),
    Pass("dense, groups alone", "dp=4", "decode 8x4", *NONE, *NONE),
    Pass("experts split", "tp=4", "decode 8x4", *SPLIT_PASS),
    Pass("experts spread", "tp=4", "decode 8x4", *SPREAD_PASS),
    Pass("experts spread, few requests", "tp=4", "decode 1x4", *SPREAD_PASS),
    Pass("experts spread, few tokens", "tp=4", "decode 1x2", *FEW_PASS),
    Pass("experts spread, groups", "dp=2,tp=2", "decode 8x4", *SPREAD_PASS),
    Pass("experts spread, groups, odd batch", "dp=2,tp=2", "decode 3x3", *SPREAD_PASS),
    Pass("experts spread, groups, many tokens", "dp=2,tp=2", "prefill 1x2048", *SPREAD_PASS),
    Pass("experts spread, groups of one", "dp=4", "decode 8x4", *NONE, EXPERTS, "2*X*S*(w-1)/w"),
]
MODELS = {"dense": DENSE, "experts spread, fewer kv heads": {"num_key_value_heads": 2}}


def partitioned(layout: Layout | Pass, **options: Any) -> PartitionedProgram:
    """The row's step of a small model, partitioned as in a build. A decode step drafts as many tokens as it verifies."""
    changes = next((change for name, change in MODELS.items() if layout.name.startswith(name)), {})
    values = CONFIG | changes
    mesh, (kind, B, Q) = Mesh.parse(layout.mesh), re.split(r"[ x]", layout.step)
    bucket = Bucket(kind, int(B), int(Q))
    spread = layout.name.startswith("experts spread")
    copies = max(1, mesh.axis("tp") // values["num_key_value_heads"])
    model = registry.from_config("small", values)
    variant = Variant(grouped=spread, kv_repeat=copies, recurrent=torch.bfloat16)
    model = replace(model, config=replace(model.config, variant=variant))
    slots = bucket.q_len if kind == "decode" else 1
    drafts = slots - 1 if kind == "decode" else 2 * isinstance(layout, Pass)
    limits = Limits(128, 17, 1 + 8 * slots, 4096, slots, drafts)
    program = step.program(model, bucket, limits, torch.bfloat16, **{"emit_logits": False} | options)
    table = rules(mesh, experts=values["num_experts"], expert_parallel=spread, tokens=bucket.tokens)
    return optimise(partition(program, mesh, table))


def collectives_of(nodes: Iterable[torch.fx.Node]) -> list[collectives_check.Collective]:
    """Collectives among these nodes, without those of the bodies they call."""
    collectives = []
    for node in nodes:
        if (group := collective_group(node)) is not None:
            value = node.meta["val"]
            first = value[0] if isinstance(value, tuple | list) else value
            collectives.append((node.target._opname, group, str(Aval(tuple(first.shape), first.dtype))))
    return collectives


def words(collectives: Iterable[collectives_check.Collective], mesh: Mesh) -> list[tuple[str, object]]:
    """Collectives in the document's words, with groups as sets of ranks, because the group of a single axis is the world."""
    names = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}
    return [(names.get(name, name.removeprefix("moe_")), mesh.groups()[group]) for name, group, _ in collectives]


def stated(cell: str, mesh: Mesh) -> list[tuple[str, object]]:
    parts = [part.split(" ") for part in cell.split(", ") if part != "none"]
    return [(name, mesh.groups()[group]) for name, group in parts]


def sizes(layout: Layout | Pass, *, one_a_row: bool = False) -> dict[str, float]:
    """Values of the letters in the document's formulas, for all tokens of a step or for one of each row."""
    mesh, (kind, B, Q) = Mesh.parse(layout.mesh), re.split(r"[ x]", layout.step)
    n, tokens = mesh.axis("tp"), int(B) * (1 if one_a_row else int(Q))
    rows = tokens if int(B) * int(Q) < n else -(-tokens // n) * n
    sampled = tokens if kind == "decode" else int(B)
    return {"S": rows * M * 2, "L": sampled * V * 2, "K": sampled * 4, "R": int(B) * 8, "X": X, "n": n, "w": mesh.size}


def in_document(table: str, kind: Any, *columns: str) -> list[Any]:
    """The rows of a table of the document."""
    text = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")
    lines = text.split(f"<!-- {table} -->")[1].strip().splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["layout", "mesh", "step", *columns]
    return [kind(*(cell.strip().strip("`") for cell in line.strip("|").split("|"))) for line in lines[2:]]


def test_the_document_says_what_is_tested():
    assert in_document("layouts", Layout, "collectives a layer", "bytes a layer", "others a step", "their bytes") == LAYOUTS
    assert in_document("passes", Pass, "extending the cache", "its bytes", "drafting from the last tokens", "its bytes") == PASSES


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.replace(" ", "_"))
def test_a_layout_has_the_collectives_it_needs_and_no_more(layout):
    program, mesh = partitioned(layout), Mesh.parse(layout.mesh)
    kinds = bodies(program.graph)
    assert set(kinds) >= set(LAYERS)
    for kind in set(LAYERS):
        collectives = collectives_of(kinds[kind].graph.nodes)
        assert words(collectives, mesh) == stated(layout.layer, mesh)
        assert sum(moved_bytes(collectives, mesh, X).values()) == eval(layout.layer_bytes, sizes(layout))
    rest = collectives_of(program.graph.graph.nodes)
    assert words(rest, mesh) == stated(layout.rest, mesh)
    assert sum(moved_bytes(rest, mesh, X).values()) == eval(layout.rest_bytes, sizes(layout))
    drafting = sum(len(collectives_of(kinds[name].graph.nodes)) for name in set(kinds) - set(LAYERS))
    assert len(program.collectives) == len(rest) + len(LAYERS) * len(stated(layout.layer, mesh)) + drafting
    collectives_check.check_ranks(collectives_check.expand(program.collectives, mesh))


@pytest.mark.parametrize("row", PASSES, ids=lambda row: row.name.replace(" ", "_"))
def test_the_draft_head_has_the_collectives_of_a_layer_and_what_stands_around_it(row):
    """The first pass writes keys and values of all tokens of a step; everything else has one token of each row."""
    program, mesh = partitioned(row), Mesh.parse(row.mesh)
    kinds = bodies(program.graph)
    taking, drafting = (row.taking, row.taking_bytes), (row.drafting, row.drafting_bytes)
    # A head that drafts one token extends its cache by none of its own.
    own = {} if row.step.endswith("x2") else {"extend_draft_cache_own": taking}
    expected = {"extend_draft_cache": taking, "draft": drafting, **own}
    assert set(kinds) == {*LAYERS, *expected}
    for body, (cell, moved) in expected.items():
        collectives = collectives_of(kinds[body].graph.nodes)
        assert words(collectives, mesh) == stated(cell, mesh)
        assert sum(moved_bytes(collectives, mesh, X).values()) == eval(moved, sizes(row, one_a_row=body != "extend_draft_cache"))
    collectives_check.check_ranks(collectives_check.expand(program.collectives, mesh))


def test_log_probabilities_travel_with_the_tokens_they_are_of():
    (layout,) = (row for row in LAYOUTS if row.name == "experts spread, groups")
    program, mesh = partitioned(layout, max_logprobs=5), Mesh.parse(layout.mesh)
    assert words(collectives_of(program.graph.graph.nodes), mesh) == stated(layout.rest, mesh)


def test_asking_for_logits_gathers_them_and_nothing_else():
    (layout,) = (row for row in LAYOUTS if row.name == "experts spread, groups")
    program, mesh = partitioned(layout, emit_logits=True), Mesh.parse(layout.mesh)
    assert words(collectives_of(program.graph.graph.nodes), mesh) == stated(f"{EMBEDDED}, all_gather tp", mesh)
    assert collectives_of(program.graph.graph.nodes)[-1][2] == "bf16[32,128]"

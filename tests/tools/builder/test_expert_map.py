"""tools/builder/expert_map.py: files of SGLang and vllm-ascend place the experts of a build, whose tokens they do not change."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fleets, ranks, served, tiny

from npucompile.graphs.errors import SpecError
from npucompile.graphs.steps import kind
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models.expert_placement import ExpertPlacement, by_default
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import Request, Sampling, TokenEvent
from npucompile.tools.artifact_model import full_model
from npucompile.tools.builder import driver, pool
from npucompile.tools.builder.expert_map import fitted, read
from npucompile.tools.builder.expert_planner import planned
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.prove import npu
from npucompile.tools.ranks.launch import opened_ranks
from npucompile.tools.ranks.offline import complete
from npucompile.tools.ranks.rank_settings import RankSettings

MAP = [[3, 2, 1, 0], [0, 1, 2, 3]]
PROMPTS = [[1, 2, 3], [9] * 6, list(range(20, 31)), [0], [255, 7]]


def of_devices(rows: list[list[int]], ranks: int) -> dict[str, Any]:
    """vllm-ascend's form of a map."""
    share = len(rows[0]) // ranks
    return {
        "moe_layer_count": len(rows),
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": ranks,
                "device_list": [{"device_id": rank, "device_expert": row[rank * share : (rank + 1) * share]} for rank in range(ranks)],
            }
            for layer, row in enumerate(rows)
        ],
    }


# --- files ---


def test_every_form_is_read(tmp_path: Any) -> None:
    fields = {"physical_to_logical_map": MAP}
    (tmp_path / "map.json").write_text(json.dumps(fields))
    torch.save({"physical_to_logical_map": torch.tensor(MAP), "rank": 0}, tmp_path / "map.pt")
    (tmp_path / "ascend.json").write_text(json.dumps(of_devices(MAP, 2)))
    texts = [str(tmp_path / "map.json"), json.dumps(fields), str(tmp_path / "map.pt"), str(tmp_path / "ascend.json")]
    maps = [read(text) for text in texts]
    assert [each.rows for each in maps] == [((3, 2, 1, 0), (0, 1, 2, 3))] * 4
    assert [each.ranks for each in maps] == [0, 0, 0, 2]
    assert not any(each.counts for each in maps)


def test_counts_of_a_recorder_are_summed_over_its_steps(tmp_path: Any) -> None:
    counts = torch.randint(0, 50, (5, 2, 4), dtype=torch.int32)
    torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}, tmp_path / "recorded.pt")
    found = read(str(tmp_path / "recorded.pt"))
    assert (found.counts, found.rows) == (True, tuple(map(tuple, counts.sum(0).tolist())))
    assert read(json.dumps({"logical_count": counts.sum(0).tolist()})).rows == found.rows


class Unsafe:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_what_is_no_map_is_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"physical_to_logical_map": Unsafe()}, tmp_path / "unsafe.pt")
    (tmp_path / "broken.json").write_text("{")
    uneven = of_devices(MAP, 2)
    uneven["layer_list"][0]["device_list"][0]["device_expert"].append(1)
    cases = {
        str(tmp_path / "absent.json"): "cannot be read: No such file",
        str(tmp_path / "unsafe.pt"): "cannot be read",
        str(tmp_path / "broken.json"): "is no JSON",
        '{"a": 1, "b": 2}': "the JSON text: has a, b; legal is a JSON or .pt file",
        json.dumps({"physical_to_logical_map": [0, 1]}): r"\[2\] int64, not a row",
        json.dumps({"physical_to_logical_map": [[0.5, 1]]}): "float32, not a row of whole numbers",
        json.dumps({"physical_to_logical_map": [[0, 1], [0]]}): "no map of experts",
        json.dumps(uneven): r"devices of \[\(2, 2\), \(2, 3\)\]",
        json.dumps({**of_devices(MAP, 2), "moe_layer_count": 3}): "2 layers of 3",
        json.dumps({"layer_list": []}): "no map of experts",
    }
    for text, message in cases.items():
        with pytest.raises(SpecError, match=message):
            read(text)
    assert not capsys.readouterr().out


# --- models ---


def rows_of(text: Any, model: Any, ranks: int = 2, **fields: Any) -> tuple[tuple[int, ...], ...]:
    return fitted(read(json.dumps(text)), model, ranks, **fields).layers


ROW, OTHER, THIRD = [*range(8)][::-1], [*range(8)], [1, 0, *range(2, 8)]


def test_rows_are_of_layers_with_experts_or_of_all() -> None:
    """SGLang's count layers without experts; the draft head's layer may have one of its own."""
    latent, plain = fleets.model(name="latent", drafts=1), fleets.model(name="latent")
    zero = [0] * 8
    assert rows_of({"physical_to_logical_map": [zero, ROW, THIRD]}, plain) == (tuple(ROW), tuple(THIRD))
    assert rows_of({"physical_to_logical_map": [ROW, THIRD]}, plain) == (tuple(ROW), tuple(THIRD))
    assert rows_of({"physical_to_logical_map": [zero, ROW, THIRD, OTHER]}, latent) == (tuple(ROW), tuple(THIRD), tuple(OTHER))
    assert rows_of({"physical_to_logical_map": [zero, ROW, THIRD]}, latent) == (tuple(ROW), tuple(THIRD))
    assert rows_of(of_devices([ROW, THIRD], 2), latent) == (tuple(ROW), tuple(THIRD))
    assert rows_of(of_devices([ROW, THIRD, OTHER], 2), latent) == (tuple(ROW), tuple(THIRD), tuple(OTHER))


def test_counts_are_planned_with_the_copies_that_ranks_need() -> None:
    model, counts = fleets.model(name="plain-moe"), [[9, 1, 1, 1, 1, 1, 1, 1], [0] * 8, [1, 2, 3, 4, 5, 6, 7, 8]]
    kept = [counts[0], counts[2]]
    assert rows_of({"logical_count": counts}, model) == planned(kept, 8, 2)
    assert rows_of({"logical_count": counts}, model, 3) == planned(kept, 9, 3)
    assert rows_of({"logical_count": counts}, model, 4, physical=16) == planned(kept, 16, 4)
    grouped = fleets.model(name="latent")
    assert rows_of({"logical_count": counts}, grouped, 4, nodes=2) == planned(counts[1:], 8, 4, groups=4, nodes=2)


@pytest.mark.parametrize(
    ("text", "ranks", "fields", "message"),
    [
        ({"physical_to_logical_map": [ROW]}, 2, {}, r"has 1 layers, plain-moe has 2 with experts; legal are 2, or 3 with those without"),
        ({"physical_to_logical_map": [ROW] * 4}, 2, {}, r"has 4 layers"),
        (of_devices([ROW] * 3, 2), 2, {}, r"has 3 layers, plain-moe has 2 with experts; legal are 2$"),
        ({"physical_to_logical_map": [ROW, [*range(7), 8]]}, 2, {}, r"layer 1 has expert 8; plain-moe has 0 to 7"),
        ({"physical_to_logical_map": [ROW, [*range(7), 0]]}, 2, {}, r"layer 1 has 7 of 8 experts, and not 7; legal is each at least once"),
        ({"physical_to_logical_map": [[*ROW, 0]] * 2}, 2, {}, r"has 9 physical experts, and 2 ranks share them; legal is a multiple of 2"),
        (of_devices([ROW] * 2, 4), 2, {}, r"has 8 physical experts on 4 devices, and 2 ranks share them"),
        ({"physical_to_logical_map": [ROW] * 2}, 2, {"physical": 10}, r"has 8 physical experts, .* legal is 10, as it was built for"),
        ({"logical_count": [[1] * 7] * 2}, 2, {}, r"counts 7 experts, plain-moe has 8"),
    ],
)  # fmt: skip
def test_a_map_of_another_model_or_for_other_ranks_is_refused(text: Any, ranks: int, fields: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        rows_of(text, fleets.model(name="plain-moe"), ranks, **fields)


def test_a_model_without_experts_takes_no_map() -> None:
    with pytest.raises(SpecError, match="places experts, and small has none"):
        rows_of({"physical_to_logical_map": [ROW]}, fleets.model(experts=False))


# --- counts ---


def counted(executor: Any, prompts: Any = PROMPTS) -> tuple[list[Any], Any]:
    """The tokens of each prompt, and how often a server would say that each expert was chosen."""
    engine = Engine(executor, refresh_every_s=None)
    sinks: list[list[Any]] = [[] for _ in prompts]
    for number, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        engine.submit(Request(str(number), tuple(prompt), 10), sink.append)
    while engine.step():
        pass
    tokens = [[token for event in sink if isinstance(event, TokenEvent) for token in event.token_ids] for sink in sinks]
    return tokens, engine.stats()["experts"]


def chosen_by_one_device(checkpoint: Any, dtype: torch.dtype, texts: Any) -> Any:
    """How often one device, which runs each text in one pass, chooses each expert of each layer."""
    model = served.OneDevice.of(checkpoint, "none", dtype)
    top = model.model.config.routing.top_k
    layers = zip(*(model.run(text).routers for text in texts), strict=True)
    return [
        torch.cat([logits.topk(top).indices for logits in own]).flatten().bincount(minlength=own[0].shape[1]).tolist() for own in layers
    ]


def test_choices_of_all_tokens_are_counted_whatever_the_map(sharded: Any, tmp_path: Any) -> None:
    checkpoint = Path(Artifact.open(sharded("")).manifest.build_arguments[0])
    rows = json.dumps({"physical_to_logical_map": [[3, 1, 0, 2, 3, 3], [0, 1, 2, 3, 1, 0]]})
    sizes: dict[str, Any] = {"buckets": (1, 2), "prefill": (4,), "max_model_len": 32, "mesh": "tp=2", "num_speculative_tokens": 0}
    tiny.built(tiny.planned(checkpoint, expert_map=rows, expert_counts=True, **sizes), tmp_path / "out", fresh=True)
    artifact = Artifact.open(tmp_path / "out")
    with opened_ranks(artifact, None, RankSettings(threads=1), ranks.environment(), tiny.QUIET) as load:
        tokens, counts = counted(load())
    texts = [[*prompt, *own[:-1]] for prompt, own in zip(PROMPTS, tokens, strict=True)]
    assert counts.tolist() == chosen_by_one_device(checkpoint, torch.float32, texts)
    assert full_model(artifact.manifest).config.variant.tells_experts
    assert read(json.dumps({"logical_count": counts.tolist()})).counts


@pytest.mark.long
@pytest.mark.parametrize("backend", ["ge", "aclgraph"])
def test_emulated_npus_count_drafts_and_every_nth_token_of_prompts(checkpoint: Any, tmp_path: Any, backend: str) -> None:
    """A step verifies drafts, whose choices count, as experts compute for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "MOST_TOLD", 2)
        artifact = npu_build(checkpoint, tmp_path / "out", expert_counts=True, expert_map=json.dumps(drawn(0)), backend=backend)
    shapes = {entry.bucket.name: leaf.aval.shape for entry in artifact.manifest.graphs for leaf in entry.outputs if leaf.path == "experts"}
    assert shapes["decode-b2-q2"] == (2, 2, 2, 2)
    assert all(shape[1:] == (2, 2, 2) for shape in shapes.values())
    with served.emulated(artifact, tmp_path / "cache") as executor:
        tokens, counts = counted(executor)
    assert list(map(len, tokens)) == [10] * len(PROMPTS)
    # One group in turns counts for both, each token chooses two experts, and one of a prompt's two tells.
    assert counts.sum(1)[0] == counts.sum(1)[1] > 0
    assert not (counts % 2).any()
    changed = SimpleNamespace(path=artifact.path, manifest=replace(artifact.manifest, graphs=artifact.manifest.graphs[-1:]))
    assert npu.verify_device(changed, tmp_path, tiny.QUIET, steps=1)


def test_counts_are_of_experts_that_ranks_share(checkpoint: Any) -> None:
    with pytest.raises(SpecError, match=r"--expert-counts for .*, mesh 1; legal is a model whose experts several ranks share"):
        tiny.planned_device(checkpoint, mesh="1", expert_counts=True)
    assert "--expert-counts" in tiny.planned_device(checkpoint, expert_counts=True).arguments
    assert tiny.described(tiny.planned_device(checkpoint, expert_counts=True)).model["num_experts"] == 8
    assert "num_experts" not in tiny.described(tiny.planned_device(checkpoint)).model


# --- builds ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of `npu_artifact`, of eight experts in each of two layers and a draft head's."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "moe", seed=7, agreeing=True, **ranks.NPU_SIZES)


def drawn(seed: int, physical: int = 12, layers: int = 2) -> dict[str, Any]:
    draw = random.Random(seed)
    rows = [[*range(8), *(draw.randrange(8) for _ in range(physical - 8))] for _ in range(layers)]
    for row in rows:
        draw.shuffle(row)
    return {"physical_to_logical_map": rows}


def npu_build(checkpoint: Any, out: Any, **options: Any) -> Artifact:
    new_plan = tiny.planned_device(checkpoint, buckets=(2,), max_model_len=128, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "run", tiny.compile_once)
        driver.build(new_plan, out, out.parent / "cache", tiny.QUIET, jobs=1)
    return Artifact.open(out)


@contextmanager
def emulated(artifact: Artifact, cache: Any, **fields: Any) -> Any:
    with served.emulated(artifact, cache, **fields) as executor:
        yield [each.token_ids for each in complete(executor, PROMPTS, Sampling(), 10, frozenset())]


@pytest.mark.parametrize("quantization", ["none", pytest.param("w4a8", marks=pytest.mark.long)])
def test_emulated_npus_generate_the_same_tokens(checkpoint: Any, npu_artifact: Any, tmp_path: Any, quantization: str) -> None:
    """With copies and drafts; the graphs are those of any map of these sizes, and copies take memory."""
    options = {"quantization": quantization}
    built = quantization == "none"
    plain = Artifact.open(npu_artifact("dp=2,tp=2")) if built else npu_build(checkpoint, tmp_path / "plain", **options)
    maps = [json.dumps(drawn(seed)) for seed in range(2)]
    first = npu_build(checkpoint, tmp_path / "map", expert_map=maps[0], **options)
    digests = [{entry.bucket: entry.digest for entry in artifact.manifest.graphs} for artifact in (plain, first)]
    assert all(digests[0][bucket] != digest for bucket, digest in digests[1].items())
    assert {leaf.name: leaf.aval.shape[0] for leaf in first.manifest.params}["params.layers.0.mlp.down.weight"] == 12
    weights = [artifact.manifest.graphs[-1].memory["params_bytes"] for artifact in (plain, first)]
    experts = [leaf.aval.nbytes for leaf in plain.manifest.params if {"gate_up", "down"} & {*leaf.path.split(".")}]
    # A rank has two experts of each layer, and a copy; its table, and those of four ranks.
    assert weights[1] - weights[0] == sum(experts) // 8 + 3 * 8 * 4 * (1 + 4)
    assert full_model(first.manifest).placement == ExpertPlacement(tuple(map(tuple, drawn(0)["physical_to_logical_map"])))
    if not built:
        second = npu_build(checkpoint, tmp_path / "another", expert_map=maps[1], **options)
        assert {entry.bucket: entry.digest for entry in second.manifest.graphs} == digests[1]
    answers = []
    # Weights of another map are those of its own build (test_weights.py), so that one of both is enough here.
    for artifact, fields in ((plain, {}), (first, {} if built else {"expert_map": maps[1]})):
        with emulated(artifact, tmp_path / "compiled", **fields) as tokens:
            answers.append(tokens)
    assert answers[1] == answers[0]


def test_a_plan_records_its_map_and_is_repeated_by_its_arguments(checkpoint: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "map.json").write_text(json.dumps(drawn(0)))
    monkeypatch.chdir(tmp_path)
    mapped = tiny.planned_device(checkpoint, expert_map="map.json", num_speculative_tokens=0)
    words = mapped.arguments
    assert words[words.index("--expert-map") + 1] == str(tmp_path / "map.json")
    assert (mapped.model.config.variant.physical_experts, mapped.model.config.variant.expert_ranks) == (12, 4)
    assert mapped.model.placement
    assert len(mapped.model.placement.layers) == 2
    assert tiny.described(mapped).model["expert_map"] == drawn(0)["physical_to_logical_map"]
    assert "expert_map" not in tiny.described(tiny.planned_device(checkpoint)).model


def test_ranks_need_not_divide_the_experts_where_a_map_fills_them(checkpoint: Any) -> None:
    options = Options(str(checkpoint), (3,), target="ascend-a3", mesh="dp=3,tp=2", backend="null", num_speculative_tokens=0)
    with pytest.raises(Exception, match="8 experts over the 6 devices"):
        plan(options).rules()
    rows = json.dumps({"physical_to_logical_map": [list(by_default(12, 8))] * 2})
    mapped = plan(replace(options, expert_map=rows))
    assert mapped.rules().num_shards("experts", mapped.mesh) == 6


def test_weights_of_another_map_are_stored_anew(checkpoint: Any, tmp_path: Any) -> None:
    stored = []
    for seed in (0, 0, 1):
        tiny.built(tiny.planned(checkpoint, expert_map=json.dumps(drawn(seed, 9)), backend="null", buckets=(1,)), tmp_path / "out")
        stored.append(Artifact.open(tmp_path / "out").manifest.weights)
    assert stored[0] == stored[1] != stored[2]

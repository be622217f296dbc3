"""models/expert_placement.py: physical experts in any order, some more than once, give what the model's own experts give."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import fleets

from npucompile.graphs import tree
from npucompile.graphs.types import Mesh
from npucompile.models import sharding_rules
from npucompile.models import variant as variants
from npucompile.models.checkpoint import ParamReader, load, open_checkpoint, save
from npucompile.models.expert_placement import TABLE, TABLES, ExpertPlacement, by_default, physical_count, placed, tables, with_experts
from npucompile.models.params import initialise
from npucompile.models.slices import Shard
from npucompile.models.variant import Variant

EXPERTS = fleets.MOE["num_experts"]
PLAIN, GROUPED = Variant(), Variant(grouped=True)
TOLERANCE = 5e-4


def shuffled(seed: int, layers: int, physical: int) -> ExpertPlacement:
    """Every expert at least once, copies of any, in any order."""
    draw = random.Random(seed)
    rows = [[*range(EXPERTS), *(draw.randrange(EXPERTS) for _ in range(physical - EXPERTS))] for _ in range(layers)]
    for row in rows:
        draw.shuffle(row)
    return ExpertPlacement(tuple(map(tuple, rows)))


# --- tables ---


@st.composite
def layers(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    logical, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    physical = -(-draw(st.integers(logical, 3 * logical)) // ranks) * ranks
    rest = draw(st.lists(st.integers(0, logical - 1), min_size=physical - logical, max_size=physical - logical))
    return tuple(draw(st.permutations([*range(logical), *rest]))), logical, ranks


@given(layers())
def test_each_rank_finds_every_expert_its_own_copy_first_and_copies_serve_evenly(case: tuple[tuple[int, ...], int, int]) -> None:
    layer, logical, ranks = case
    found, share = tables(layer, logical, ranks), len(layer) // ranks
    assert [len(row) for row in found] == [logical] * ranks
    for expert in range(logical):
        places = [physical for physical, each in enumerate(layer) if each == expert]
        others: Counter[int] = Counter({physical: 0 for physical in places})
        for rank, row in enumerate(found):
            own = [physical for physical in places if physical // share == rank]
            assert layer[row[expert]] == expert
            assert row[expert] in (own or places)
            others.update([] if own else [row[expert]])
        assert max(others.values()) - min(others.values()) <= 1


def test_other_copies_serve_first_for_other_experts() -> None:
    """Or the ranks that hold first copies would serve all that does not divide."""
    found = tables((0, 1, 2, 3, 0, 1, 2, 3), 4, 8)
    assert {row[expert] // 4 for row in found for expert in range(4)} == {0, 1}
    assert Counter(physical // 4 for row in found for physical in row) == {0: 16, 1: 16}


# --- parameters ---


def test_a_model_without_a_map_declares_what_it_declared() -> None:
    params = fleets.model(fleets.quantised("w8a8")).params(torch.float32)
    assert placed(params, Variant(), None) is params
    assert not any(TABLE in path for path, _ in tree.flatten(params))


def placed_model(seed: int, physical: int, ranks: int, variant: Variant = GROUPED, **of: Any) -> Any:
    model = fleets.model(replace(variant, physical_experts=physical, expert_ranks=ranks), **of)
    return replace(model, placement=shuffled(seed, 5, physical))


@pytest.mark.parametrize("variant", [PLAIN, GROUPED, fleets.quantised("w8a8"), fleets.quantised("w4a8")])
@pytest.mark.parametrize("per_expert", [False, True], ids=["fused", "expert by expert"])
def test_ranks_read_their_experts(variant: Variant, per_expert: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the whole parameters hold them, read in one piece or in blocks, and every copy is equal."""
    mesh, own = Mesh.parse("dp=2,tp=2"), fleets.model(variant)
    plain = fleets.model()
    drawn = initialise(plain.params(torch.float32), torch.Generator().manual_seed(3))
    save(plain.params(torch.float32), drawn, tmp_path)
    if per_expert:
        _split_experts(tmp_path)
    checkpoint, model = open_checkpoint(tmp_path), placed_model(1, 12, 4, variant)
    logical = dict(tree.flatten(load(checkpoint, own.params(torch.float32))))
    whole = dict(tree.flatten(load(checkpoint, model.params(torch.float32))))
    rules = sharding_rules.rules(mesh, experts=12, tokens=2)
    monkeypatch.setattr("npucompile.models.checkpoint.BLOCK_BYTES", 1500)
    leaves = tree.flatten(model.params(torch.float32))
    reader = ParamReader(checkpoint, model.params(torch.float32))
    moved = 0
    for rank in range(mesh.size):
        shard = Shard(mesh, rules, rank)
        for group in reader.groups:
            for position, tensor in reader.read(group, shard):
                path, param = leaves[position]
                assert torch.equal(tensor, whole[path][rules.local_slice(param.aval, mesh, rank)]), path
    for path, tensor in whole.items():
        if path.rpartition(".")[2] in (TABLE, TABLES):
            continue
        parts, dim = path.split("."), dict(leaves)[path].aval.axes
        if "experts" in dim:
            layer = model.placement.layers[int(parts[1])]
            assert torch.equal(tensor, logical[path].index_select(dim.index("experts"), torch.tensor(layer))), path
            moved += 1
        else:
            assert torch.equal(tensor, logical[path]), path
    assert moved >= 8


def _split_experts(directory: Any) -> None:
    from safetensors.torch import load_file, save_file

    file, tensors = directory / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        head, _, leaf = name.partition(".experts.")
        if leaf == "gate_up_proj":
            for i, (gate, up) in enumerate(tensor.view(tensor.shape[0], 2, -1, tensor.shape[-1])):
                tensors[f"{head}.experts.{i}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{head}.experts.{i}.up_proj.weight"] = up.contiguous()
        elif leaf == "down_proj":
            tensors.update({f"{head}.experts.{i}.down_proj.weight": each.contiguous() for i, each in enumerate(tensor)})
        else:
            tensors[name] = tensor
    save_file(tensors, file)


def test_drawn_experts_are_those_without_a_map_and_are_saved_as_they_were(tmp_path: Any) -> None:
    plain, model = fleets.model(), placed_model(2, 11, 1, Variant())
    before, after = (initialise(m.params(torch.float32), torch.Generator().manual_seed(5)) for m in (plain, model))
    save(model.params(torch.float32), after, tmp_path)
    for (path, saved), (_, drawn) in zip(
        tree.flatten(load(open_checkpoint(tmp_path), plain.params(torch.float32))), tree.flatten(before), strict=True
    ):
        assert torch.equal(saved, drawn), path


def test_a_draft_layer_without_a_row_is_placed_by_default() -> None:
    model = replace(placed_model(3, 12, 4, drafts=1), placement=shuffled(3, 4, 12))
    last = model.params(torch.float32)["mtp"]["layer"]["mlp"]
    assert last[TABLE].source.join().tolist() == tables(by_default(12, EXPERTS), EXPERTS, 4)
    assert by_default(12, EXPERTS) == (*range(8), *range(4))


@pytest.mark.parametrize("variant", [PLAIN, GROUPED, fleets.quantised("w4a8")], ids=["plain", "grouped", "w4a8"])
def test_sizes_are_read_back_from_parameters(variant: Variant) -> None:
    def shapes(model: Any) -> list[tuple[str, tuple[int, ...]]]:
        return [(path, param.aval.shape) for path, param in tree.flatten(model.params(torch.float32))]

    assert physical_count(shapes(placed_model(0, 12, 4, variant))) == 12
    assert physical_count(shapes(fleets.model(variant))) == 0


def test_layers_with_experts_are_told() -> None:
    assert with_experts(fleets.model(name="plain-moe")) == ([True, False, True], False)
    assert with_experts(fleets.model(name="latent", drafts=1)) == ([False, True, True], True)
    assert with_experts(fleets.model(experts=False, drafts=1)) == ([False] * 4, False)


def test_a_manifest_has_it() -> None:
    placement = shuffled(0, 2, 12)
    assert ExpertPlacement.recorded({"expert_map": placement.as_fields()}) == placement
    assert ExpertPlacement.recorded({}) is None


# --- steps ---


@dataclass(frozen=True)
class Case:
    mesh: str
    physical: int
    variant: Variant = GROUPED
    model: str = "small"
    drafts: int = 0
    batch: int = 2
    expert_parallel: bool = True


W8, W4 = fleets.quantised("w8a8"), fleets.quantised("w4a8")
CASES = {
    "one device": Case("1", 11, Variant(), drafts=2),
    "sent tp=2": Case("tp=2", 10, drafts=1),
    "sent dp=2,tp=2": Case("dp=2,tp=2", 12, drafts=2),
    "only moved": Case("dp=2,tp=2", 8, drafts=1),
    "odd batch": Case("dp=2,tp=2", 12, batch=3),
    "in parts": Case("dp=2,tp=2", 12, Variant(grouped=True, most_dispatched=1, dispatches_in_parts=True)),
    "gathered": Case("dp=2,tp=2", 12, Variant(grouped=True, most_dispatched=0), drafts=1),
    "gathered, odd batch": Case("dp=4", 20, Variant(grouped=True, most_dispatched=0), batch=3),
    "split": Case("tp=2", 9, expert_parallel=False),
    "w8a8": Case("dp=2,tp=2", 12, W8, drafts=1),
    "w4a8": Case("tp=2", 10, W4),
    "w4a8 fused": Case("dp=2,tp=2", 12, replace(W4, fused_experts=True)),
    "groups of experts": Case("dp=2,tp=2", 12, model="latent", drafts=2),
    "layers without experts": Case("tp=2", 12, model="plain-moe"),
}


@pytest.mark.short_cases("sent dp=2,tp=2", "gathered", "w4a8 fused", "groups of experts")
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_same_under_any_permutation_and_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, mesh = CASES[name], Mesh.parse(CASES[name].mesh)
    monkeypatch.setattr(variants, "FEWEST_TOKENS", 1)
    ranks = mesh.size if case.expert_parallel else 1
    of: dict[str, Any] = {"name": case.model, "drafts": case.drafts}
    fleet = {"expert_parallel": case.expert_parallel, "drafts": case.drafts}
    outputs = []
    models = [fleets.model(case.variant, **of), *(placed_model(seed, case.physical, ranks, case.variant, **of) for seed in range(3))]
    for model in models:
        machine, serving = fleets.Fleet(model, mesh, **fleet), fleets.Serving(case.batch, case.drafts, [case.batch] * mesh.axis("dp"))
        for bucket, inputs in serving.steps(3):
            given = machine.step(bucket, inputs)
            serving.commit(bucket, inputs, given)
            outputs.append(given)
    steps = len(outputs) // len(models)
    for placement in range(1, len(models)):
        for want, given in zip(outputs[:steps], outputs[placement * steps :], strict=False):
            for a, b in zip(want, given, strict=True):
                assert torch.equal(a["tokens"], b["tokens"])
                assert (a["logits"] - b["logits"]).abs().max() < TOLERANCE
    # The tables of another placement send tokens to other experts, which is seen.
    machine, other = (fleets.Fleet(model, mesh, **fleet) for model in models[1:3])
    tables = [path.endswith((TABLE, TABLES)) for path, _ in tree.flatten(models[1].params(torch.float32))]
    for mine, theirs in zip(machine.params, other.params, strict=True):
        mine[:] = [b if table else a for table, a, b in zip(tables, mine, theirs, strict=True)]
    bucket, inputs = next(fleets.Serving(case.batch, case.drafts, [case.batch] * mesh.axis("dp")).steps(1))
    assert (machine.step(bucket, inputs)[0]["logits"] - outputs[0][0]["logits"]).abs().max() > 10 * TOLERANCE

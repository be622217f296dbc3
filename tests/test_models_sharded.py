"""Every layout of a model over a mesh says what the model says on one device: prompts, then decode steps, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from npucompile.graphs.errors import ModelError
from npucompile.graphs.flatten import bodies
from npucompile.graphs.partition import Partitioned
from npucompile.graphs.types import Mesh
from npucompile.models.variant import PLAIN, Variant

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A layout and a load.

    Attributes:
        live: rows that hold a request, by group; the others are padding.
        against: how one device holds the parameters.
        talks: collectives that the decode step's layers must use, in any order.
    """

    mesh: str
    variant: Variant = PLAIN
    against: Variant = PLAIN
    experts: bool = True
    expert_parallel: bool = True
    batch: int = 2
    q_len: int = 1
    live: tuple[int, ...] = ()
    steps: int = 4
    talks: tuple[str, ...] = ()


GROUPED = Variant(experts="grouped")
W8, W4 = Variant.of("w8a8", grouped=True), Variant.of("w4a8", grouped=True)
DISPATCH = ("moe_dispatch world", "moe_combine world")
GATHER = ("all_gather_into_tensor world", "reduce_scatter_tensor world")


def repeated(variant: Variant, **changes: object) -> Variant:
    return Variant(**{**vars(variant), "kv_repeat": 2, **changes})


def gathering(variant: Variant) -> Variant:
    return Variant(**{**vars(variant), "most_dispatched": 1})


CASES: dict[str, Case] = {
    "dense tp=2": Case("tp=2", experts=False, q_len=2),
    "dense tp=4": Case("tp=4", repeated(PLAIN), experts=False),
    "dense dp=2,tp=2": Case("dp=2,tp=2", experts=False, steps=2),
    "experts tp=2": Case("tp=2", GROUPED, talks=DISPATCH),
    "experts tp=4": Case("tp=4", repeated(GROUPED), batch=3, talks=DISPATCH, q_len=2),
    "experts dp=2": Case("dp=2", GROUPED, talks=DISPATCH),
    "experts dp=2,tp=2": Case("dp=2,tp=2", GROUPED, q_len=2, talks=DISPATCH),
    "experts dp=4": Case("dp=4", GROUPED, live=(2, 1, 0, 2), talks=DISPATCH),
    "gathered dp=2,tp=2": Case("dp=2,tp=2", gathering(GROUPED), q_len=2, talks=GATHER),
    "gathered tp=4": Case("tp=4", gathering(repeated(GROUPED)), q_len=2, batch=3, talks=GATHER),
    "experts split tp=2": Case("tp=2", expert_parallel=False),
    "experts split tp=4": Case("tp=4", repeated(PLAIN), expert_parallel=False),
    "experts split dp=2,tp=2": Case("dp=2,tp=2", expert_parallel=False),
    "odd batch": Case("dp=2,tp=2", GROUPED, batch=3, talks=DISPATCH),
    "fewer tokens than devices": Case("tp=4", repeated(GROUPED), batch=1, talks=DISPATCH),
    "idle group": Case("dp=2,tp=2", GROUPED, live=(2, 0), q_len=2, talks=DISPATCH),
    "idle group, gathered": Case("dp=2,tp=2", gathering(GROUPED), live=(0, 1), q_len=2, talks=GATHER),
    "w8a8 dp=2,tp=2": Case("dp=2,tp=2", W8, W8, talks=DISPATCH),
    "w8a8 gathered": Case("dp=2,tp=2", gathering(W8), W8, q_len=2, talks=GATHER),
    "w8a8 tp=4": Case("tp=4", repeated(W8), W8, talks=DISPATCH),
    "w4a8 dp=2,tp=2": Case("dp=2,tp=2", W4, W4, talks=DISPATCH),
}


def talked(found: Partitioned) -> set[str]:
    return {f"{kind} {group}" for kind, group, _ in found.collectives}


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    difference = float((got - want).abs().max()) if got.numel() else 0.0
    assert difference < TOLERANCE, f"{what}: logits differ by {difference}"


@pytest.mark.parametrize("name", CASES)
def test_every_group_says_what_one_device_says(fleets: ModuleType, name: str) -> None:
    case = CASES[name]
    mesh = Mesh.parse(case.mesh)
    groups, tp = mesh.axis("dp"), mesh.axis("tp")
    fleet = fleets.Fleet(fleets.model(case.variant, experts=case.experts), mesh, case.expert_parallel)
    alone = [fleets.Alone(fleets.model(case.against, experts=case.experts)) for _ in range(groups)]
    serving = fleets.Serving(case.batch, case.q_len, case.live or [case.batch] * groups)
    for n in range(1 + case.steps):
        bucket, given = (serving.decode, serving.next()) if n else (serving.prefill, serving.first())
        said = fleet.step(bucket, given)
        want = [one.step(bucket, own) for one, own in zip(alone, given, strict=True)]
        for group, (a, b) in enumerate(zip(said, want, strict=True)):
            rows = serving.live[group]
            close(a["logits"][:rows], b["logits"][:rows], f"step {n}, group {group}")
            assert torch.equal(a["tokens"][:rows], b["tokens"][:rows])
        serving.take([outputs["tokens"] for outputs in want], given)
    found = fleet.partitioned(serving.decode)
    assert set(case.talks) <= talked(found)
    assert not {text for text in talked(found) if not text.endswith("tp")} - set(case.talks), "nothing else crosses groups"
    assert not (set(DISPATCH + GATHER) - set(case.talks)) & talked(found)
    assert len(bodies(found.graph)) == 2, "layers are traced once a kind"
    assert tp >= 1


def test_requests_of_groups_differ(fleets: ModuleType) -> None:
    """Or a group that answered another's requests would pass."""
    fleet = fleets.Fleet(fleets.model(GROUPED), Mesh.parse("dp=2,tp=2"))
    serving = fleets.Serving(2, 1, [2, 2])
    first, second = fleet.step(serving.prefill, serving.first())
    assert (first["logits"] - second["logits"]).abs().max() > 0.1


@pytest.mark.parametrize("variant", [W8, W4], ids=["w8a8", "w4a8"])
def test_quantised_models_are_other_models(fleets: ModuleType, variant: Variant) -> None:
    """Close to the floats they were made of, and not equal: the comparison above is of quantised products."""
    serving = fleets.Serving(2, 1, [2])
    (given,) = serving.first()
    exact, rounded = (fleets.Alone(fleets.model(v)).step(serving.prefill, given)["logits"] for v in (PLAIN, variant))
    error = float((exact - rounded).square().mean().sqrt() / exact.std())
    assert 1e-3 < error < (0.6 if variant is W4 else 0.15)


@pytest.mark.parametrize(("mesh", "batch"), [("tp=2", 2), ("tp=4", 4), ("dp=2,tp=2", 3)])
def test_tokens_without_logits_are_the_same_tokens(fleets: ModuleType, mesh: str, batch: int) -> None:
    """Each device samples its share of the rows; a batch that does not divide is sampled whole."""
    where = Mesh.parse(mesh)
    variant = repeated(GROUPED) if where.axis("tp") == 4 else GROUPED
    groups = where.axis("dp")
    loud, quiet = (fleets.Fleet(fleets.model(variant), where, emit_logits=emit) for emit in (True, False))
    serving = fleets.Serving(batch, 1, [batch] * groups)
    given = sampled(serving.start(), batch)
    want, said = loud.step(serving.decode, given), quiet.step(serving.decode, given)
    shares = batch % where.axis("tp") == 0
    assert any("all_to_all_single" in text for text in talked(quiet.partitioned(serving.decode))) == shares
    for a, b in zip(said, want, strict=True):
        assert list(a) == ["tokens"]
        assert torch.equal(a["tokens"], b["tokens"])


def sampled(given: Sequence[dict[str, torch.Tensor]], batch: int) -> list[dict[str, torch.Tensor]]:
    """With a temperature and another uniform number for every row, so that a row's numbers cannot be taken for another's."""
    spread = torch.linspace(0.05, 0.95, batch)
    numbers = [(spread[:, None] * 7 + group * 0.3) % 1 for group in range(len(given))]
    return [{**inputs, "temperature": 0.5 + spread, "uniform": own} for inputs, own in zip(given, numbers, strict=True)]


def test_quantised_experts_are_not_split(fleets: ModuleType) -> None:
    """Their products are not: each device would hold all of them, and the sum would count them once a device."""
    fleet = fleets.Fleet(fleets.model(W8), Mesh.parse("tp=2"), expert_parallel=False)
    with pytest.raises(ModelError, match=r"experts are held 'w8a8', each whole; the layout splits each in 2: legal is 'plain'"):
        fleet.partitioned(fleets.Bucket("decode", 2, 1))

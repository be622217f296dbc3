"""graphs/spmd/region.py: a region sees one rank's shards, its coordinates and its groups; each test runs all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npucompile.graphs.errors import PartitionError
from npucompile.graphs.spmd.layout import constrain, num_shards
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.spmd.region import Sum, all_gather, all_to_all, axis_index, group_of, reduce_scatter, shard_map
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree
from npucompile.lowering.ascend.emulator.interpreter import Interpreter

F32 = torch.float32
RULES = Rules.of({"experts": ("dp", "tp"), "ffn": "tp", "rows": "tp"})
MESHES = ["tp=2", "tp=4", "dp=2", "dp=2,tp=2", "dp=3,tp=2"]
# All these meshes divide twelve.
W, X = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(0)).unbind()
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def partitioned(step: Step, mesh: str, rules: Rules = RULES) -> PartitionedProgram:
    """`step` of a parameter w [12 experts, 24 ffn] and an input x [12, 24]."""

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": step(p["w"], i["x"])}, s

    params = {"w": Aval((12, 24), F32, ("experts", None))}
    program = Program("toy", Bucket("decode", 4, 1), forward, params, {}, {"x": Aval((12, 24), F32)})
    return partition(program, Mesh.parse(mesh), rules)


def run(step: Step, mesh: str, rules: Rules = RULES) -> list[torch.Tensor]:
    """Results of every rank; the input of dp group g is x + g."""
    program = partitioned(step, mesh, rules)
    tp, size = program.mesh.axis("tp"), program.mesh.size
    operands = [[W.chunk(size)[r], X + r // tp, torch.tensor([r // tp, r % tp], dtype=torch.int32)] for r in range(size)]
    return [y for (y,) in Interpreter(program.graph, program.mesh)(operands)]


# --- one device ---


def test_outside_partitioning_a_region_is_its_function() -> None:
    assert shard_map(lambda a, b: a * b, [(X, ("rows", None)), (W, (None, None))], Sum("rows")).equal(X * W)
    for talk in (all_gather, all_to_all, reduce_scatter):
        assert talk(X, "experts") is X
    assert group_of("experts") == "world"


# --- where a device is ---


@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_knows_its_shard(mesh: str) -> None:
    """Values that differ between ranks come from `inputs.coords`, so one graph serves all ranks."""

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def local(w: torch.Tensor) -> torch.Tensor:
            return torch.cat([axis_index("experts"), axis_index("ffn"), axis_index("unheard of")])

        return shard_map(local, [(w, ("experts", None))], (None,))

    tp = Mesh.parse(mesh).axis("tp")
    assert [y.tolist() for y in run(step, mesh)] == [[r, r % tp, 0] for r in range(Mesh.parse(mesh).size)]


@pytest.mark.parametrize(
    ("mesh", "experts", "ffn", "groups"),
    [("tp=4", 4, 4, "world world"), ("dp=2", 2, 1, "world world"), ("dp=2,tp=2", 4, 2, "world tp"), ("dp=1,tp=2", 2, 2, "world world")],
)
def test_groups_are_named_by_who_is_in_them(mesh: str, experts: int, ffn: int, groups: str) -> None:
    regions = []

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        regions.append((num_shards("experts"), num_shards("ffn"), f"{group_of('experts')} {group_of('ffn')}"))
        return x

    partitioned(step, mesh)
    assert regions == [(experts, ffn, groups)]


# --- talking ---


def looped(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """All-gather tokens, apply each rank's experts, reduce-scatter: a mixture of experts with gathered tokens."""

    def local(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        everyone = all_gather(x, "experts")
        return reduce_scatter(torch.relu(everyone @ w.t()) @ w, "experts")

    mine = shard_map(local, [(w, ("experts", None)), (constrain(x, "rows", None), ("rows", None))], ("rows", None))
    return constrain(mine, None, None)


@pytest.mark.parametrize("mesh", MESHES)
def test_gather_and_scatter_reach_every_expert(mesh: str) -> None:
    tp = Mesh.parse(mesh).axis("tp")
    for rank, got in enumerate(run(looped, mesh)):
        own = X + rank // tp
        torch.testing.assert_close(got, torch.relu(own @ W.t()) @ W, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=3,tp=2"])
def test_an_exchange_trades_columns_for_rows(mesh: str) -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        columns = constrain(x, None, "ffn")
        rows = shard_map(lambda x: all_to_all(x, "ffn"), [(columns, (None, "ffn"))], ("rows", None))
        return constrain(rows * 2, None, None)

    tp = Mesh.parse(mesh).axis("tp")
    assert all(torch.equal(got, 2 * (X + rank // tp)) for rank, got in enumerate(run(step, mesh)))


@pytest.mark.parametrize("mesh", MESHES)
def test_sums_are_addends_until_they_are_asked_for(mesh: str) -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def local(x: torch.Tensor) -> torch.Tensor:
            return x.sum(1, keepdim=True)

        part = shard_map(local, [(constrain(x, None, "ffn"), (None, "ffn"))], Sum("ffn"))
        return constrain(part * 3, None, None)

    tp = Mesh.parse(mesh).axis("tp")
    for rank, got in enumerate(run(step, mesh)):
        torch.testing.assert_close(got, 3 * (X + rank // tp).sum(1, keepdim=True))


def test_a_sum_over_an_axis_that_is_not_split_is_the_value() -> None:
    program = partitioned(lambda w, x: shard_map(lambda x: x + 1, [(x, (None, None))], Sum("vocab")), "tp=2")
    assert program.collectives == ()


# --- refusals ---


def test_an_operand_of_another_layout_is_refused() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return shard_map(lambda x: x, [(x, ("rows", None))], ("rows", None))

    refusal = r"a region reads \(12, 24\) by axes \('rows', None\): \(Shard\(dim=0\),\); it is \(Replicate\(\),\); constrain it"
    with pytest.raises(PartitionError, match=refusal):
        partitioned(step, "tp=2")


def test_an_axis_that_is_no_group_is_refused() -> None:
    refusal = r"axis 'experts' is split over \('tp', 'dp'\); legal is one axis of mesh dp=2,tp=2, or all in its order"
    with pytest.raises(PartitionError, match=refusal):
        partitioned(looped, "dp=2,tp=2", Rules.of({"experts": ("tp", "dp"), "rows": "tp"}))

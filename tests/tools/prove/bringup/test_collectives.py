"""tools/prove/bringup/collectives.py: on all ranks every collective is right, and one wrong rank is named with the collective."""

from __future__ import annotations

import pickle

import pytest
import torch
from support import bringups, emulated, ranks, small_images
from support.faulty import FaultyDevice, right, wrong_results
from torch.distributed import HashStore

from npucompile.graphs.types import Mesh
from npucompile.tools.prove.bringup.collectives import (
    FOUND,
    LOADS,
    CollectiveError,
    CollectivesCheck,
    CollectiveWatch,
    collective_cases,
    expert_ids,
    failure_in,
    in_order,
)
from npucompile.tools.prove.bringup.recording import shipped_buckets
from npucompile.tools.ranks.rank_settings import RankPlace

MESH = Mesh.parse("dp=2,tp=2")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return bringups.shared_artifact(tmp_path_factory, "mesh", "dp=2,tp=2")


def run(artifact, fault=None, of_rank=2):
    """What each rank raised, or how many collectives it ran; `fault` is that of one rank."""

    store = HashStore()

    def work(device, rank, communicators):
        used, check = device, pickle.loads(pickle.dumps(CollectivesCheck()))
        if fault and rank == of_rank:
            used = FaultyDevice(fault, real=device)
        check(artifact, used, RankPlace(MESH, rank, rank, store, ""), communicators)
        return check.count, check.left_out

    return emulated.on_devices(MESH, work)


def test_all_ranks_run_all_collectives_and_every_one_is_right(artifact):
    cases, left_out = collective_cases(shipped_buckets(artifact), MESH)
    assert left_out == []
    kinds = {case.label.split("(")[1].rstrip(")") for case in cases}
    assert {"HcomAllGather", "HcomReduceScatter", "MoeDistributeDispatchV2", "MoeDistributeCombineV2"} <= kinds
    assert run(artifact) == [(len(cases), [])] * 4


def test_collectives_of_captured_graphs_run_alone_but_for_those_of_experts(tmp_path_factory):
    artifact = small_images.shipped(ranks.SIZES, tmp_path_factory, backend="aclgraph")
    mesh = Mesh.parse(artifact.manifest.mesh)
    cases, left_out = collective_cases(shipped_buckets(artifact), mesh)
    assert {case.label.split("(")[1] for case in cases} >= {"_c10d_functional.all_gather_into_tensor.default)"}
    assert all("moe_distribute" in text for text in left_out)

    store = HashStore()

    def work(device, rank, communicators):
        check = CollectivesCheck(watch=Told())
        check(artifact, device, RankPlace(mesh, rank, rank, store, ""), communicators)
        return check.count, check.watch.failures, len(check.watch.timings), check.watch.facts

    found = emulated.on_devices(mesh, work)
    assert [of[:3] for of in found] == [(len(cases), [], len(cases))] * mesh.size
    # The first rank has the rates of all; what is slow is said of NPUs alone.
    assert {name: len(rates) for name, rates in found[0][3]["rates of ranks"].items()}["memory"] == mesh.size
    assert "slow dies" not in found[0][3]
    assert found[1][3] == {}


class Told(CollectiveWatch):
    """Keeps failures and timings."""

    def __init__(self):
        self.failures, self.timings, self.facts = [], [], {}

    def end(self, failures, timings=(), facts=()):
        self.failures += failures
        self.timings += timings
        self.facts |= dict(facts)
        assert all(timing.seconds > 0 and timing.moved_bytes and "[" in timing.shapes for timing in timings)
        return []


@pytest.mark.parametrize(
    ("kind", "assumption"),
    [pytest.param("HcomReduceScatter", "communicators", marks=pytest.mark.long), ("MoeDistributeDispatchV2", "expert-exchange")],
)
def test_the_rank_that_got_something_else_says_what(artifact, kind, assumption):
    answers = run(artifact, wrong_results(lambda executable: executable.types == [kind]))
    assert [isinstance(answer, CollectiveError) for answer in answers] == [False, False, True, False]
    assert str(answers[2]).startswith(FOUND)
    failure = failure_in(f"rank 2 failed: getting ready: {answers[2]}")
    assert (failure.assumption, kind in failure.what) == (assumption, True)
    assert failure.message.startswith("rank 2")
    assert failure_in("the connection was reset") is None


def test_a_load_that_goes_wrong_alone_is_named(artifact):
    def only_last(executable, operands):
        results = right(executable, operands)
        if executable.types == ["MoeDistributeDispatchV2"] and int(operands[1].held.min()) == 6:
            results[3].zero_()
        return results

    # The last experts are those of the last rank.
    answers = run(artifact, only_last, of_rank=3)
    assert "load the last experts" in str(answers[3])


@pytest.mark.parametrize("load", LOADS)
def test_choices_of_a_token_are_different_experts(load):
    ids = expert_ids(load, (32, 3), 8, 1, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert 0 <= int(ids.min()) <= int(ids.max()) < 8
    counts = ids.flatten().bincount(minlength=8)
    assert {"even": bool((counts == 12).all()), "uneven": bool(counts[0] > counts[7])}.get(load, int((counts == 0).sum()) == 5)


def test_rows_of_an_expert_are_compared_in_any_order():
    rows, counts = torch.arange(12.0).reshape(4, 3), torch.tensor([2, 1])
    assert torch.equal(in_order(rows, counts), in_order(rows[[1, 0, 2, 3]], counts))
    assert not torch.equal(in_order(rows, counts), in_order(rows[[2, 1, 0, 3]], counts))

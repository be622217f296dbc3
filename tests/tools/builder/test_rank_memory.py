"""tools/builder/rank_memory.py: builds that exceed a rank's memory are refused with settings that fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket, Mesh
from npucompile.lowering.artifact.manifest import GraphEntry
from npucompile.tools.builder import deployments, derived, driver, pool, rank_memory
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.plan import Options, Plan

BIG = "qwen3.5-397b"


@pytest.fixture
def build(tmp_path):
    def built(plan, name="out", jobs=1):
        return driver.build(plan, tmp_path / name, tmp_path / "cache", tiny.QUIET, jobs=jobs)

    return built


ROWS = [(row.id, name) for row in deployments.deployments().values() if row.model == BIG for name in row.phases]


def held(plan, entries=()):
    return rank_memory.rank_memory(plan, tiny.described(plan), entries)


@pytest.mark.parametrize(("name", "phase"), ROWS)
def test_every_published_deployment_fits_with_room_for_its_activations(name, phase):
    planned = held(planning.plan(planning.Options(BIG, deployment=name, phase=None if phase == "mixed" else phase)))
    parts = {part.name: part.nbytes for part in planned.parts}
    assert planned.fits
    # The most that any row's graphs hold at once is 5.2 GiB and a quarter, of a chunk of 3584 tokens over two ranks.
    tokens = {2: 7.5, 4: 4, 8: 2, 16: 1}[Mesh.parse(planned.mesh).axis("tp")]
    assert planned.total_bytes + tokens * 2**30 <= planned.limit_bytes
    assert parts["expert weights"] > parts["other weights"] > 0
    assert parts["draft head"] > 0
    assert parts["communication"] > 0


def test_the_default_deployment_fits_activations_and_all():
    plan = planning.plan(planning.Options(BIG))
    planned = held(plan, rank_memory._largest_partitioned(plan))
    parts = {part.name: part.nbytes / 2**30 for part in planned.parts}
    assert planned.fits
    assert 0.3 < parts["activations"] < 4


def asked_and_fitting(text):
    """(requests, context) that a refusal says would fit."""
    matches = re.search(r"What fits: (\d+) requests a dp group \(asked: \d+\)", text), re.search(r"a context of (\d+) tokens \(asked", text)
    return tuple(int(match[1]) if match else None for match in matches)


def test_what_a_refusal_suggests_is_built_and_one_more_is_refused(model, build, monkeypatch, tmp_path):
    """Graphs included: their activations are known before the first refusal."""
    changes = {"max_num_seqs": 600_000, "max_model_len": 1024}
    monkeypatch.setattr(pool, "run", tiny.compile_once)
    with pytest.raises(SpecError, match=r"a rank of ascend-a3 with mesh dp=2,tp=2 has 64.00 GiB and this needs .* too much") as refused:
        build(tiny.planned_device(model, backend="null", buckets=(2,), **changes))
    assert "activations 0.00" in str(refused.value)
    requests, context = asked_and_fitting(str(refused.value))
    assert not (tmp_path / "out").exists()
    build(tiny.planned_device(model, backend="null", buckets=(2,), **{**changes, "max_num_seqs": requests}))
    with pytest.raises(SpecError, match="too much"):
        build(tiny.planned_device(model, backend="null", buckets=(2,), **{**changes, "max_num_seqs": requests + 1}))
    shorter = tiny.planned_device(model, backend="null", buckets=(2,), **{**changes, "max_model_len": context})
    assert held(shorter).fits


def test_graphs_that_need_more_than_is_left_are_refused_when_they_are_known(model, build, monkeypatch, tmp_path):
    def run(job):
        result = tiny.compile_once(job)
        return replace(result, staged=replace(result.staged, memory=replace(result.staged.memory, live_bytes=(60 * 2**30,))))

    monkeypatch.setattr(pool, "run", run)
    with pytest.raises(SpecError, match=r"this needs 7\d\.\d\d, 1\d\.\d\d too much: .*activations 60\.00, workspace 15\.00"):
        build(tiny.planned_device(model))
    assert not (tmp_path / "out").exists()


def test_what_no_setting_makes_fit_says_so_before_anything_is_lowered(build, monkeypatch):
    monkeypatch.setattr(derived, "results", None)
    monkeypatch.setattr(rank_memory, "_largest_partitioned", lambda plan: ())
    with pytest.raises(SpecError, match=r"No number of requests and no context fits: legal are a mesh of more ranks, narrower weights"):
        build(planning.plan(planning.Options(BIG, target="ascend-a3", mesh="tp=2", quantization="w4a8")))


def test_room_for_dispatch_is_of_the_largest_step_that_dispatches():
    def talks(**changes):
        memory_plan = held(planning.plan(planning.Options(BIG, **tiny.prefill_sized({"prefill": None, **changes}))))
        return next(part.why.rpartition("dispatch (16 ranks)")[2] for part in memory_plan.parts if part.name == "communication")

    small, half, most = talks(buckets=(2,), prefill=(64,)), talks(buckets=(128,), prefill=(64,)), talks(buckets=(2,), prefill=(1024,))
    assert len({small, half, most}) == 3
    assert talks(buckets=(2,), prefill=(512,)) == half
    # More tokens are dispatched in parts, none of them larger.
    assert talks(buckets=(2,), prefill=(4096,)) == talks(buckets=(2,)) == most
    few = {
        "target": "ascend-a3",
        "quantization": "w4a8",
        "mesh": "dp=2,tp=2",
        "buckets": (600,),
        "prefill": (2048,),
        "num_speculative_tokens": 0,
    }
    assert "world" in talks(**few), "four devices gather"
    assert "world" in talks(deployment="qwen35-397b-a2x16-mix-mp-2node"), "nothing dispatches on that target"


def test_fused_experts_have_a_small_window_and_leave_a_small_one_to_dispatch():
    plain, fused = (
        planning.plan(planning.Options(BIG, backend="aclgraph", operator_packages=packages)) for packages in ((), ("vllm-ascend",))
    )
    windows = rank_memory.communicator_bytes(fused, ())
    largest = max(bucket.tokens for bucket in fused.buckets) // fused.mesh.axis("tp")
    assert fused.model.config.variant.fuses(largest)
    assert windows["fused_experts"] < 100 * 2**20
    assert windows["dispatch"] < rank_memory.communicator_bytes(plain, ())["dispatch"]
    # 8,192 rows of each of 16 ranks may come to one; the kernel's workspace holds them.
    (workspace,) = [part for part in held(fused).parts if part.name == "workspace"]
    assert workspace.nbytes > 2**30
    assert "fused experts" in workspace.why


ROW = "qwen3-32b-a3x4-mix-6k-1.5k-18ms"
GIB = 2**30


@pytest.fixture(scope="module")
def published() -> Plan:
    return planning.plan(Options("qwen3-32b", deployment=ROW))


def prefills(plan: Plan) -> list[str]:
    return [bucket.name for bucket in plan.buckets if bucket.kind == "prefill"]


def test_all_prompts_of_the_row_fit(published: Plan) -> None:
    assert rank_memory.fit_prompts(published) == published
    assert prefills(published) == ["prefill-b1-q6016", "prefill-b5-q6016"]


@pytest.mark.parametrize("prompts", [4, 2, 1])
def test_fewer_prompts_are_said(published: Plan, prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(plan: Plan, bucket: Bucket) -> GraphEntry:
        # Activations of as much memory as weights and pools leave, for that many prompts.
        peak = {"peak_bytes": bucket.batch * int(38 * GIB / prompts)}
        return GraphEntry(bucket, (), (), None, "", "", None, {}, peak, (), {})

    monkeypatch.setattr(rank_memory, "partitioned_entry", entry)
    fitted = rank_memory.fit_prompts(published)
    assert prefills(fitted) == ["prefill-b1-q6016", *([f"prefill-b{prompts}-q6016"] if prompts > 1 else [])]
    assert fitted.buckets[-4:] == published.buckets[-4:]
    (note,) = set(fitted.notes) - set(published.notes)
    assert note.startswith(f"differs from the deployment: a prefill step takes at most {prompts} of 5 prompts: with all of them a rank")
    assert note.endswith("of 64 GiB")


def test_others_are_left_alone(published: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_memory, "partitioned_entry", None)
    for other in (
        replace(published, deployment=""),
        replace(published, buckets=published.buckets[:1]),
        replace(published, buckets=published.buckets[2:]),
    ):
        assert rank_memory.fit_prompts(other) == other

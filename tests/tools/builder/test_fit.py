"""tools/builder/fit.py: pages and parts of prefill are what a rank's memory allows, and the plan says where they are smaller."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import tiny

from npucompile.graphs import tree
from npucompile.graphs.errors import SpecError
from npucompile.models.variant import MOST_DISPATCHED
from npucompile.tools.builder import fit
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.fit import FEWER_DISPATCHED, FREE_SHARE, fit_dispatch, fit_pool

BIG = "qwen3.5-397b"


@pytest.fixture(scope="module")
def plan():
    return planning.plan(planning.Options(BIG))


def most_dispatched(plan):
    return plan.model.config.variant.most_dispatched


def with_less_memory(plan):
    target, less = plan.target, 10 * 2**30
    npu = replace(target.npu, hbm_bytes=target.npu.hbm_bytes - less, usable_hbm_bytes=target.npu.usable_hbm_bytes - less)
    return replace(plan, target=replace(target, npu=npu))


def test_the_default_deployment_has_windows_for_the_largest_parts(plan):
    assert most_dispatched(plan) == MOST_DISPATCHED
    assert max(bucket.tokens for bucket in plan.buckets) // plan.mesh.axis("tp") > MOST_DISPATCHED
    assert not [note for note in plan.notes if "at once" in note]


def test_less_memory_takes_smaller_parts_and_says_so(plan):
    smaller = fit_dispatch(with_less_memory(plan))
    assert most_dispatched(smaller) == FEWER_DISPATCHED
    assert [note for note in smaller.notes if note.startswith(f"experts get at most {FEWER_DISPATCHED} tokens of a rank at once")]


def test_windows_depend_on_the_tokens_that_there_are(plan):
    decode = tuple(bucket for bucket in plan.buckets if bucket.kind == "decode")
    tight = replace(with_less_memory(plan), buckets=decode)
    assert fit_dispatch(tight) == tight


def test_what_does_not_fit_into_memory_is_refused_before_it_is_loaded(monkeypatch, tiny_checkpoint):
    plan = tiny.planned(tiny_checkpoint)
    needed = plan.params_bytes + plan.state_bytes
    monkeypatch.setattr(fit, "MACHINE_BYTES", needed)
    assert tiny.planned(tiny_checkpoint) == plan
    monkeypatch.setattr(fit, "MACHINE_BYTES", needed - 1)
    with pytest.raises(SpecError, match=r"tiny needs .* GB for weights and .* GB for state, this machine has .* GB"):
        tiny.planned(tiny_checkpoint)
    assert tiny.planned(tiny_checkpoint, backend="null").buckets == plan.buckets


TIGHT = "qwen3-30b-a3x1-mix-3.5k-1.5k-50ms"
"""192 requests of 5,000 tokens beside the weights of all experts, split over two ranks."""


def with_memory(target, nbytes, usable=0):
    return replace(target, npu=replace(target.npu, hbm_bytes=nbytes, usable_hbm_bytes=usable or target.npu.usable_hbm_bytes))


def test_pages_are_as_many_as_fit() -> None:
    plan = planning.plan(planning.Options("qwen3-30b-a3b", deployment=TIGHT))
    memory = plan.target.memory_bytes(plan.mesh)
    held = plan.params_bytes + plan.state_bytes + plan.target.reserved_bytes(plan.mesh)
    limit, page = memory - memory // FREE_SHARE, plan.state_bytes // plan.limits.num_pages
    assert limit - 2 * page < held <= limit
    assert plan.notes[-1].startswith(f"differs from the deployment: {(plan.limits.num_pages - 1) * 128} cached tokens a dp group")
    assert fit_pool(plan) == plan
    less = replace(plan, target=with_memory(plan.target, 2**30, 2**29))
    assert fit_pool(less).limits.num_pages == 1 + plan.limits.pages_per_request, "one request can always be served"


def test_what_fits_or_is_asked_for_stays() -> None:
    published = planning.plan(planning.Options("qwen3.5-397b"))
    assert fit_pool(replace(published, target=with_memory(published.target, 2**30))) == replace(
        published, target=with_memory(published.target, 2**30)
    ), "its number of tokens is published"
    asked = planning.plan(planning.Options("qwen3-30b-a3b", deployment=TIGHT, max_num_seqs=192, max_model_len=5120))
    assert (asked.published, asked.limits.num_pages) == (False, 1 + 192 * 40)


def test_memory_that_was_asked_for_decides_the_pages(tiny_checkpoint) -> None:
    options = {"buckets": (4,), "max_model_len": 64}
    free = tiny.planned(tiny_checkpoint, **options)
    leaves = [aval for _, aval in tree.flatten(free.model.state(free.limits, free.dtype)) if aval.axes[0] == "pages"]
    page, full = sum(aval.nbytes for aval in leaves) // free.limits.num_pages, free.limits.num_pages
    for asked, pages in ((5 * page, 5), (6 * page - 1, 5), (9 * page + 1, 9), (full * page, full), (2 * full * page, full)):
        plan = tiny.planned(tiny_checkpoint, **options, kv_cache_memory=asked)
        assert plan.limits == replace(free.limits, num_pages=pages)
        assert plan.arguments[plan.arguments.index("--kv-cache-memory") + 1] == str(asked)
        assert dict(plan.decided_by)["kv-cache-memory"] == "flag"
    with pytest.raises(
        SpecError, match=rf"{5 * page - 1} is 4 pages of {page} bytes; one request of 64 tokens takes 5 .* at least {5 * page}"
    ):
        tiny.planned(tiny_checkpoint, **options, kv_cache_memory=5 * page - 1)
    with pytest.raises(SpecError, match="--kv-cache-memory 7 and --max-total-tokens 64 both decide the number of KV pages; legal is one"):
        tiny.planned(tiny_checkpoint, **options, kv_cache_memory=7, max_total_tokens=64)


def test_memory_counts_on_each_rank() -> None:
    """Two ranks of a group hold the heads of a page between them, so the same bytes of each are twice the pages."""
    options = {"target": "ascend-a3", "max_num_seqs": 512, "buckets": (32,), "kv_cache_memory": 2**30}
    four, eight = (planning.plan(planning.Options("qwen3-32b", mesh=mesh, **options)).limits.num_pages for mesh in ("tp=4", "tp=8"))
    assert eight in (2 * four, 2 * four + 1)

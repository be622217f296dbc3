"""tools/build/pool_size.py: a pool of no published size is as large as a rank's memory allows, and the plan says so."""

from __future__ import annotations

from dataclasses import replace

from npucompile.tools.build import plan as planning
from npucompile.tools.build.dispatch_size import FREE_SHARE
from npucompile.tools.build.pool_size import fit_pool

TIGHT = "qwen3-30b-a3x1-mix-3.5k-1.5k-50ms"
"""192 requests of 5,000 tokens beside the weights of all experts, split over two ranks."""


def test_pages_are_as_many_as_fit() -> None:
    plan = planning.plan(planning.Options("qwen3-30b-a3b", deployment=TIGHT))
    memory = plan.target.memory_bytes(plan.mesh)
    held = plan.params_bytes + plan.state_bytes + plan.target.reserved_bytes(plan.mesh)
    limit, page = memory - memory // FREE_SHARE, plan.state_bytes // plan.limits.num_pages
    assert limit - 2 * page < held <= limit
    assert plan.notes[-1].startswith(f"differs from the deployment: {(plan.limits.num_pages - 1) * 128} cached tokens a dp group")
    assert fit_pool(plan) == plan
    less = replace(plan, target=replace(plan.target, hbm_bytes=2**30, usable_hbm_bytes=2**29))
    assert fit_pool(less).limits.num_pages == 1 + plan.limits.pages_per_request, "one request can always be served"


def test_what_fits_or_is_asked_for_stays() -> None:
    published = planning.plan(planning.Options("qwen3.5-397b"))
    assert fit_pool(replace(published, target=replace(published.target, hbm_bytes=2**30))) == replace(
        published, target=replace(published.target, hbm_bytes=2**30)
    ), "its number of tokens is published"
    asked = planning.plan(planning.Options("qwen3-30b-a3b", deployment=TIGHT, max_num_seqs=192, max_model_len=5120))
    assert (asked.published, asked.limits.num_pages) == (False, 1 + 192 * 40)

"""tools/builder/memory.py: the memory of a rank to the byte, and the largest settings that fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs import tree
from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Aval, Leaf, Limits, Mesh, Rules
from npucompile.models import registry, request_slots
from npucompile.tools.builder.deployments import deployment, limits_for
from npucompile.tools.builder.memory import (
    GIB,
    HCCL_BUFFER_BYTES,
    MIB,
    Communicator,
    MemoryPlan,
    MemoryShare,
    communicators,
    dispatch_window_bytes,
    largest_fitting,
    local_bytes,
    plan_memory,
)
from npucompile.tools.builder.targets import target

A3, A2 = target("ascend-a3"), target("ascend-a2")
MESH = Mesh.parse("dp=8,tp=2")
HEADS = ("q_heads", "kv_heads", "delta_heads", "ffn", "vocab")
RULES = Rules.of({"experts": ("dp", "tp"), **dict.fromkeys(HEADS, "tp")})


def parts(plan: MemoryPlan) -> dict[str, int]:
    return {part.name: part.nbytes for part in plan.parts}


@pytest.mark.parametrize(
    ("shape", "axes", "bytes_"),
    [
        ((512, 2, 64, 32), ("experts", None, "expert_ffn", None), 512 // 16 * 2 * 64 * 32 * 2),  # over both axes of the mesh
        ((64, 32), ("q_heads", None), 32 * 32 * 2),
        ((64, 32), (None, None), 64 * 32 * 2),
        ((7, 2), ("vocab", None), 4 * 2 * 2),  # the larger of two parts
        ((9, 128, 2, 4), ("pages", None, "kv_heads", None), 9 * 128 * 1 * 4 * 2),  # pages are whole in every group
        ((), (), 2),
    ],
)
def test_a_rank_holds_its_part(shape, axes, bytes_):
    assert local_bytes(Aval(shape, torch.bfloat16, axes), MESH, RULES) == bytes_


def test_one_device_holds_everything():
    aval = Aval((512, 64), torch.float32, ("experts", "ffn"))
    assert local_bytes(aval, Mesh(), RULES) == aval.nbytes


def w4a8_leaves() -> tuple[list[Leaf], list[Leaf], Limits]:
    """Qwen3.5-397B as published for 16 NPUs: experts of two 4-bit weights a byte, other matrices 8 bits, the draft head 16."""
    row, model = deployment("qwen35-397b-a3x8-in3k5-out1k5-50ms"), registry.find("qwen3.5-397b").model
    limits = limits_for(row, row.phase(), A3.page_size)
    params = []
    for name, param in tree.flatten(model.family.abstract_params(model.config, torch.bfloat16)):
        aval = param.aval
        if not name.startswith("mtp") and "experts" in aval.axes:
            aval = Aval((*aval.shape[:-1], aval.shape[-1] // 2), torch.uint8, aval.axes)
        elif not name.startswith("mtp") and len(aval.shape) > 1 and name not in ("embed", "head"):
            aval = replace(aval, dtype=torch.int8)
        params.append(Leaf(f"params.{name}", aval))
    pools = tree.flatten(model.family.abstract_state(model.config, limits, torch.bfloat16))
    state = [Leaf(name, replace(aval, dtype=torch.bfloat16)) for name, aval in pools]
    return params, [*state, Leaf("request_slots", request_slots.state(limits))], limits


def test_qwen_397b_on_an_a3_node_adds_up():
    params, state, limits = w4a8_leaves()
    window = dispatch_window_bytes(A3, 54 * 4 // 2, 4096, 512, 10, 16)
    groups = communicators(MESH, dispatch_bytes=window)
    groups = {"communicators": groups, "draft": "params.mtp."}
    plan = plan_memory(params, state, MESH, RULES, A3, limits, peak_bytes=1 * GIB, inputs_bytes=MIB, **groups)
    nbytes_by_part, expert = parts(plan), 3 * 4096 * 1024
    # 60 layers of 512 experts at half a byte, and the draft head's 512 at two, over 16 ranks.
    assert nbytes_by_part["expert weights"] == 60 * 512 * expert // 2 // 16
    assert 0 < nbytes_by_part["draft head"] - 512 * expert * 2 // 16 < GIB // 4
    # Embedding and head alone are half of 2 x 248320 x 4096 x 2 bytes; the rest of a 397B model is few layers of attention.
    assert 248320 * 4096 * 2 < nbytes_by_part["other weights"] < 7 * GIB
    # One of two kv heads: 16 pools of keys and of values (15 full-attention layers and the draft's).
    assert nbytes_by_part["KV pages"] == limits.num_pages * 128 * 16 * 2 * 256 * 2
    # 45 layers: 32 of 64 value heads' 128 x 128 matrices, and three inputs of half the 12288 channels of the convolution.
    assert nbytes_by_part["state slots"] == limits.num_slots * 45 * (32 * 128 * 128 + 3 * 12288 // 2) * 2
    assert plan.page_bytes * limits.num_pages == nbytes_by_part["KV pages"]
    assert plan.slot_bytes * limits.num_slots == nbytes_by_part["state slots"]
    # A position, an index and four tokens of each of 54 requests, and the null request slot's.
    assert plan.request_slot_bytes * 55 == nbytes_by_part["request slots"] == 55 * 6 * 4
    assert nbytes_by_part["other state"] == 0
    assert nbytes_by_part["activations"] == 4 * nbytes_by_part["workspace"] == GIB
    assert nbytes_by_part["communication"] == 3 * 2 * HCCL_BUFFER_BYTES + 2 * (-(-window // MIB) * MIB)
    assert plan.total_bytes == sum(nbytes_by_part.values())
    # 16 NPUs of 64 GiB hold it with room to spare, as the publishers' own launch shows.
    assert 30 * GIB < plan.total_bytes < 50 * GIB
    assert plan.fits
    plan.check()
    on_two = plan_memory(params, state, Mesh.parse("dp=1,tp=2"), RULES, A3, limits, peak_bytes=GIB)
    assert not on_two.fits
    with pytest.raises(SpecError, match=r"expert weights 9\d\.\d\d, .*No number of requests and no context fits"):
        on_two.check()


def test_a_draft_head_is_counted_once_and_told_apart_where_there_is_one():
    params, state, limits = w4a8_leaves()
    whole, apart = (parts(plan_memory(params, state, MESH, RULES, A3, limits, peak_bytes=0, draft=draft)) for draft in ("", "params.mtp."))
    names = ("expert weights", "other weights", "draft head")
    assert sum(whole[name] for name in names) == sum(apart[name] for name in names)
    assert whole["draft head"] == 0
    assert all(whole[name] > apart[name] > 0 for name in names[:2])
    again = parts(plan_memory(iter(params), iter(state), MESH, RULES, A3, limits, peak_bytes=0, draft="params.mtp."))
    assert again == apart


def test_a_table_explains_every_part():
    params, state, limits = w4a8_leaves()
    groups = {"communicators": communicators(MESH), "draft": "params.mtp."}
    plan = plan_memory(params, state, MESH, RULES, A3, limits, peak_bytes=GIB, **groups)
    text = plan.as_table()
    for line in (
        "32 of 512 experts a layer",
        "2189 pages of 128 tokens, 2048 KiB a page",
        "217 slots, 4 a request",
        "draft head",
        "unquantised; its pages are among the KV pages",
        "55 slots, 24 B each: what a request's next step starts from",
        "dp (8 ranks) 2 x 200 MiB",
        "3.04 GiB  what torch_npu never offers",
        "of 64.00 GiB a rank",
        "GiB free",
    ):
        assert line in text, line
    assert "other state" not in text
    assert MemoryPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    assert plan.as_dict()["total_bytes"] == plan.total_bytes


@pytest.mark.parametrize(
    ("mesh", "used", "groups"),
    [
        ("", ("dp", "tp", "world"), []),
        ("dp=8,tp=2", ("dp", "tp", "world"), [("dp", 8), ("tp", 2), ("world", 16)]),
        ("dp=8,tp=2", ("tp",), [("tp", 2)]),
        ("dp=1,tp=16", ("tp",), [("world", 16)]),
        ("dp=1,tp=16", ("dp", "tp", "world"), [("world", 16)]),
        ("dp=4,tp=1", ("dp", "tp"), [("world", 4)]),
    ],
)
def test_groups_of_the_same_ranks_are_one_communicator(mesh, used, groups):
    assert [(c.name, c.ranks) for c in communicators(Mesh.parse(mesh), used)] == groups


def test_expert_dispatch_has_a_communicator_of_its_own():
    small, large = (communicators(MESH, ("tp",), dispatch_bytes=size)[-1] for size in (5, 900 * MIB + 1))
    assert small == Communicator("dispatch", 16, HCCL_BUFFER_BYTES)
    assert (large.buffer_bytes, large.nbytes) == (901 * MIB, 2 * 901 * MIB)
    with pytest.raises(SpecError, match="groups ep are not known; legal are dp, tp, world"):
        communicators(MESH, ("ep",))


def test_dispatch_windows_follow_the_documented_formulas():
    # 32 experts x 108 tokens x 16 ranks of 8192 bytes and 64 more, in 18 units of 512 that carry 480; and eleven rows a token. Twice.
    assert dispatch_window_bytes(A3, 108, 4096, 512, 10, 16) == 2 * (32 * 108 * 16 * 18 * 512 + 11 * 108 * 8192)
    assert dispatch_window_bytes(A2, 16, 4096, 512, 10, 8) == 2 * (16 * 8 * 10 * 8192 + 2 * MIB)
    assert dispatch_window_bytes(A2, 16, 4096, 512, 10, 16) == (512 + 4) * 16 * (8192 + 256) + 8 * MIB


def test_a_part_that_is_neither_pages_nor_slots_is_counted():
    state = [Leaf("k", Aval((3, 16), torch.int8, ("pages", None))), Leaf("other", Aval((5,), torch.int8))]
    nbytes_by_part = parts(plan_memory([], state, Mesh(), RULES, A3, Limits(16, 3, 2, 16), peak_bytes=0))
    assert (nbytes_by_part["KV pages"], nbytes_by_part["state slots"], nbytes_by_part["other state"]) == (48, 0, 5)


def made(limits: Limits, fixed: int, page: int, slot: int, limit: int, request_slot: int = 0) -> MemoryPlan:
    pools = MemoryShare("pools", limits.num_pages * page + limits.num_slots * slot + limits.num_request_slots * request_slot, "")
    return MemoryPlan("ascend-a3", "dp=1,tp=1", (MemoryShare("fixed", fixed, ""), pools), limit, page, slot, request_slot, limits)


def whole(requests: int, pages: int, per_request: int) -> Limits:
    return Limits(16, 1 + requests * pages, 1 + requests * per_request, pages * 16, per_request, per_request - 1)


sizes = st.integers(0, 200)


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 5),
    sizes,
    st.integers(1, 50),
    st.integers(0, 50),
    st.integers(0, 9),
    st.integers(0, 40_000),
)
def test_what_is_said_to_fit_fits_and_one_more_does_not(requests, pages, per_request, fixed, page, slot, request_slot, limit):
    requested = made(whole(requests, pages, per_request), fixed, page, slot, limit, request_slot)
    fit = largest_fitting(requested)

    def fits(limits: Limits) -> bool:
        return made(limits, fixed, page, slot, limit, request_slot).fits

    assert fit.requests == 0 or fits(whole(fit.requests, pages, per_request))
    assert not fits(whole(fit.requests + 1, pages, per_request))
    context = fit.context_len // 16
    assert context == 0 or fits(whole(requests, context, per_request))
    assert not fits(whole(requests, context + 1, per_request))
    pool = replace(requested.limits, num_pages=1 + max(fit.pool_tokens // 16, 0))
    assert fit.pool_tokens == 0 or fits(pool)
    assert not fits(replace(pool, num_pages=pool.num_pages + 1))
    assert requested.fits == (fit.requests >= requests)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 400), st.integers(1, 50), st.integers(1, 50), st.integers(0, 40_000))
def test_a_shared_pool_keeps_its_share(requests, pages, pool, page, slot, limit):
    """Half the pages of every request whole, say: the answer is a plan with half the pages of its own requests, that fits."""
    requested = made(Limits(16, 1 + max(pool, pages), 1 + requests * 2, pages * 16, 2, 1), 0, page, slot, limit)
    fit = largest_fitting(requested)
    if fit.requests:
        share = min((requested.limits.num_pages - 1) / (requests * pages), 1)
        page_count = max(int(fit.requests * share * pages), pages)
        assert made(Limits(16, 1 + page_count, 1 + fit.requests * 2, pages * 16, 2, 1), 0, page, slot, limit).fits
    if fit.context_len:
        # One request can always reach its end.
        assert fit.context_len <= fit.pool_tokens


def test_a_refusal_names_the_parts_the_overrun_and_what_fits():
    # 10 requests of 8 pages and 4 slots: 81 pages and 41 slots of 1 GiB each, in 64 with 2 fixed.
    plan = made(whole(10, 8, 4), 2 * GIB, GIB, GIB, 64 * GIB)
    with pytest.raises(SpecError) as refused:
        plan.check()
    text = str(refused.value)
    assert "has 64.00 GiB and this needs 124.00, 60.00 too much: fixed 2.00, pools 122.00 (GiB)" in text
    # 60 are free for pages and slots that have an owner: 5 requests of 12, or 10 of 2 pages and 4 slots.
    assert "What fits: 5 requests a dp group (asked: 10) at a context of 128 tokens, or a context of 32 tokens (asked: 128)" in text
    assert "cached tokens" not in text


def test_a_refusal_of_a_shared_pool_offers_a_smaller_one():
    plan = made(Limits(16, 1 + 60, 1 + 10 * 4, 8 * 16, 4, 3), 2 * GIB, GIB, GIB, 64 * GIB)
    with pytest.raises(SpecError, match=r"or 320 cached tokens in all \(asked: 960\) at 10 requests of 128"):
        plan.check()

"""tools/builder/deployments.py: the table of published deployments, and the sizes a build takes from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.models import registry
from npucompile.server.guard.limits import SocketLimits
from npucompile.tools.builder.deployments import (
    DEFAULT,
    MAX_CHUNK,
    POOL_TOKENS,
    default_for,
    deployment,
    deployments,
    group_chunk,
    limits_for,
    prefill_chunk,
    prefill_sizes,
    prefilling,
    why_not,
)
from npucompile.tools.builder.targets import check_mesh, target
from npucompile.tools.notation import format_prefill

PUBLISHED = "qwen35-397b-a3x8-in3k5-out1k5-50ms"
SPLIT = "qwen35-397b-a3x24-pd-1p1d-3node"
ROWS = list(deployments().values())
PHASES = [pytest.param(row, phase, id=f"{row.id}-{phase.name}") for row in ROWS for phase in row.phases.values()]


def limits(name: str, phase: str = "mixed", page_size: int = 128):
    row = deployment(name)
    return limits_for(row, row.phase(phase), page_size)


def test_the_table_is_whole():
    assert len(ROWS) == len({row.id for row in ROWS}) == 62
    big = [row for row in ROWS if row.model == "qwen3.5-397b"]
    assert [sum(row.engine == engine for row in big) for engine in ("sglang", "vllm-ascend")] == [10, 3]
    assert {row.model for row in ROWS} > {"qwen3.5-397b", "qwen3.5-27b", "qwen3.6-27b", "deepseek-r1", "qwen3-32b"}
    assert [row.id for row in ROWS if not row.phases] == ["dsv32-reference-values"]


def test_the_default_deployment_as_published():
    row = deployment(PUBLISHED)
    assert default_for("qwen3.5-397b") is row
    assert default_for("qwen3.5-27b") is None
    assert (row.engine, row.target, row.nodes, row.npus, row.quantization) == ("sglang", "ascend-a3", 1, 16, "w4a8")
    assert (row.draft_quantization, row.state_dtype, row.num_speculative_tokens) == ("bf16", "bfloat16", 3)
    assert (row.input_len, row.output_len, row.tpot_target_ms, row.concurrency) == (3500, 1500, 50, 432)
    phase = row.phase()
    assert (str(phase.mesh), phase.ep, phase.max_running_requests, phase.group_requests) == ("dp=8,tp=2", 16, 432, 54)
    assert phase.buckets == (2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 50, 52, 54)
    assert (phase.max_total_tokens, phase.mem_fraction, phase.chunk_len) == (280000, 0.8, None)


def test_defaults_name_rows_of_their_model():
    for model, name in DEFAULT.items():
        assert deployment(name).model == model
        assert model in registry.presets()


@pytest.mark.parametrize(
    ("name", "phase", "mesh"),
    [
        # SGLang's tp is the world: 16 over dp 1, 2, 4 and 8 groups.
        ("qwen35-397b-a3x8-in128k-out1k-20ms", "mixed", "dp=1,tp=16"),
        ("qwen35-397b-a3x8-in16k-out1k-50ms", "mixed", "dp=4,tp=4"),
        # vLLM's tp is one group's.
        ("qwen35-397b-a2x16-mix-mp-2node", "mixed", "dp=2,tp=8"),
        (SPLIT, "prefill", "dp=8,tp=2"),
        (SPLIT, "decode", "dp=16,tp=2"),
        ("dsr1-a3x32-pd-3.5k-1.5k-50ms", "decode", "dp=32,tp=1"),
    ],
)
def test_meshes_are_groups_of_attention_ranks(name, phase, mesh):
    assert str(deployment(name).phase(phase).mesh) == mesh


@pytest.mark.parametrize(("row", "phase"), PHASES)
def test_every_phase_can_be_placed_and_sized(row, phase):
    kind = target(row.target)
    check_mesh(kind, phase.mesh)
    assert phase.nodes == kind.nodes(phase.mesh)
    assert phase.ep in (1, phase.mesh.size)
    assert bool(phase.buckets) == (phase.name != "prefill")
    assert row.quantization in ("w4a8", "w8a8", "bf16")
    sizes = limits_for(row, phase, kind.page_size)
    assert sizes.num_request_slots - 1 == phase.group_requests
    assert sizes.num_slots == 1 + phase.group_requests * sizes.slots_per_request + (4 if row.prefix_hit_rate else 0)
    assert sizes.drafts == phase.num_speculative_tokens
    assert sizes.slots_per_request == (1 if phase.name == "prefill" else sizes.drafts + 1)
    assert phase.group_requests >= max(phase.buckets, default=1)
    # A request can always reach its end.
    assert sizes.num_pages > sizes.pages_per_request
    chunk = prefill_chunk(row)
    assert chunk % 128 == 0
    assert 128 <= chunk <= min(MAX_CHUNK, sizes.max_model_len)


@pytest.mark.parametrize("row", [row for row in ROWS if row.concurrency], ids=lambda row: row.id)
def test_the_published_benchmark_may_open_all_its_streams(row):
    """Each stream is a connection of its own, all from one address."""
    decoding = row.phases.get("mixed") or row.phases["decode"]
    limits = limits_for(row, decoding, target(row.target).page_size)
    max_running = (limits.num_request_slots - 1) * decoding.mesh.axis("dp") * decoding.instances
    assert SocketLimits().connections(max_running)[1] >= row.concurrency


def test_the_three_node_deployment_splits_prefill_from_decode():
    row = deployment(SPLIT)
    assert (row.nodes, row.npus, list(row.phases)) == (3, 48, ["prefill", "decode"])
    assert row.phase() is row.phase("decode")
    assert (row.phase("prefill").nodes, row.phase("decode").nodes) == (1, 2)
    assert row.phase("prefill").buckets == ()
    # Not published: the engine's own list up to its 32 sequences a group.
    assert row.phase("decode").buckets == (1, 2, 4, 8, 16, 24, 32)
    assert (row.phase("prefill").group_requests, row.phase("decode").group_requests) == (64, 32)
    assert (row.state_dtype, row.quantization, row.input_len) == ("float32", "w8a8", None)


def test_an_absent_phase_is_refused_with_those_there_are():
    with pytest.raises(SpecError, match="has no phase 'mixed'; it has prefill, decode"):
        deployment(SPLIT).phase("mixed")
    with pytest.raises(SpecError, match=r"it has none \(parameter values"):
        deployment("dsv32-reference-values").phase()


def test_an_unknown_id_is_answered_with_near_ones():
    with pytest.raises(SpecError, match=r"'qwen35-397b-a3x8-in3k5-50ms' is not known; near are .*in3k5-out1k5-50ms.*lists all 62"):
        deployment("qwen35-397b-a3x8-in3k5-50ms")


def test_limits_of_a_published_cap():
    sizes = limits(PUBLISHED)
    # 280000 tokens are 2187.5 pages; 54 requests of 3500 + 1500 + 3 take 40 each, 2160 in all.
    assert (sizes.num_pages, sizes.max_model_len, sizes.slots_per_request) == (1 + 2188, 40 * 128, 4)
    assert sizes.num_slots == 1 + 54 * 4
    assert sizes.num_pages - 1 >= 54 * sizes.pages_per_request
    smaller = limits(PUBLISHED, page_size=16)
    assert (smaller.num_pages, smaller.max_model_len) == (1 + 17500, 313 * 16)


def test_limits_without_a_cap_hold_every_request_whole():
    sizes = limits("qwen35-397b-a3x8-in128k-out1k-50ms")
    assert (sizes.max_model_len, sizes.num_pages) == (1033 * 128, 1 + 16 * 1033)


def test_a_cached_prefix_is_held_once():
    sizes = limits("qwen35-397b-a3x8-in128k-out1k-prefix90-50ms")
    alone = -(-(131072 + 1024 + 3 - 117964) // 128)
    assert sizes.num_pages == 1 + 1033 + 63 * alone
    # With a published cap the cap decides.
    assert limits("qwen35-397b-a3x8-in64k-out1k-prefix90-50ms").num_pages == 1 + 1310720 // 128


def test_limits_of_a_context_alone():
    long = limits("qwen35-397b-a3x8-mix-128k-longctx")
    assert (long.max_model_len, long.num_pages, long.num_slots) == (1040 * 128, 1 + POOL_TOKENS // 128, 1 + 128 * 4)
    # 4 requests a group: whole, for that is less than the pool's bound.
    short = limits("qwen35-27b-a3x16-pd-1p1d", "prefill")
    assert short.num_pages == 1 + 4 * 32768 // 128


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        (PUBLISHED, 3584),  # one chunk of 3500
        ("qwen35-397b-a3x8-in16k-out1k-50ms", 4096),  # four of 16384
        ("dsr1-a3x32-pd-6k-1.6k-20ms", 3072),  # two of 3000
        ("qwen35-397b-a3x8-mix-128k-longctx", 16384),  # published 16384
        (SPLIT, 4096),
    ],
)
def test_prefill_chunks_are_equal_parts_of_the_prompt(name, chunk):
    assert prefill_chunk(deployment(name)) == chunk


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3-480b-a3x24-pd-3.5k-1.5k-50ms", "3584,9x3584"),  # published 32768 tokens of a group
        ("qwen3-480b-a3x8-mix-3.5k-1.5k-50ms", "3584,2x3584"),  # published 28672 tokens of four groups
        ("qwen3-235b-a3x24-pd-3.5k-1.5k-50ms", "3584,4x3584"),  # published 262144 tokens of sixteen groups
        ("dsr1-a3x16-pd-2k-2k-50ms", "2048,4x2048"),  # as many as 8, and 4 requests in flight
        ("qwen35-397b-a3x8-in16k-out1k-50ms", "4096"),  # a prompt of several chunks
        (PUBLISHED, "3584"),  # nothing published
        (SPLIT, "4096"),
    ],
)
def test_a_prefill_step_has_as_many_whole_prompts_as_the_published_tokens_hold(name, sizes):
    row = deployment(name)
    assert format_prefill(prefill_sizes(row)) == sizes
    published = group_chunk(row, prefilling(row))
    assert all(size.tokens * size.prompts <= published for size in prefill_sizes(row) if size.prompts > 1)


def test_what_cannot_be_built_has_a_reason() -> None:
    row = deployment("qwen35-397b-a3x8-in3k5-out1k5-50ms")
    assert why_not(row) == ""
    assert why_not(replace(row, model="another")) == "another is no preset: its family is not built here"
    assert why_not(deployment("dsv32-reference-values")).startswith("no launch command is published")

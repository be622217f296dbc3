"""tools/inspection/pair.py: every published pair hands over at full size, with the bytes that its model's sizes come to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.deployments import deployment, deployments
from npucompile.tools.inspection.pair import pair

R1 = (71_424, 0)
# Bytes of a token, drafts' layer included, and of states in bfloat16; tokens of a prompt, 3,500 where none are published; MB of a request,
# all from each config.json.
ROWS = {
    "dsr1-a3x32-pd-3.5k-1.5k-50ms": (*R1, 3500, 250),
    "dsr1-a3x32-pd-6k-1.6k-20ms": (*R1, 6000, 429),
    "dsr1-a3x32-pd-3.9k-1k-20ms": (*R1, 3900, 279),
    "dsr1-a3x32-pd-3.5k-1.5k-20ms": (*R1, 3500, 250),
    "dsr1-a3x32-pd-3.5k-1k-20ms": (*R1, 3500, 250),
    "dsr1-a3x16-pd-2k-2k-50ms": (*R1, 2000, 143),
    "dsr1-a3x16-pd-3.5k-1.5k-50ms": (*R1, 3500, 250),
    "dsv32-a3x32-pd-64k-1k-30ms": (87_296, 0, 64_000, 5587),
    "glm51-a3x32-pd-3.5k-1.5k-50ms": (111_232, 0, 3500, 389),
    # Of 78 layers 21 have keys of an indexer, and the draft head.
    "glm52-a3x32-pd-3.5k-1.5k-50ms": (96_640, 0, 3500, 338),
    "glm52-w4a8-a3x32-pd-3.5k-1.5k-50ms": (96_640, 0, 3500, 338),
    "qwen3-235b-a3x24-pd-3.5k-1.5k-50ms": (194_560, 0, 3500, 681),
    "qwen3-480b-a3x24-pd-3.5k-1.5k-50ms": (253_952, 0, 3500, 889),
    "qwen35-397b-a3x24-pd-1p1d-3node": (32_768, 3_317_760 + 94_371_840, 3500, 212),
    "qwen35-27b-a3x16-pd-1p1d": (69_632, 2_949_120 + 75_497_472, 3500, 322),
}


def artifact(name: str, phase: str, **options: object) -> Artifact:
    """The artifact of a published row at full size, without graphs and weights."""
    row = deployment(name)
    plan = planning.plan(planning.Options(row.model, deployment=name, phase=phase, **options))
    return Artifact(Path(f"{name}-{phase}"), tiny.described(plan), "")


def test_the_rows_are_all_published_pairs():
    assert set(ROWS) == {row.id for row in deployments().values() if "prefill" in row.phases}


@pytest.mark.parametrize("name", ROWS)
def test_published_pairs_hand_over_at_full_size(name):
    token, state, tokens, megabytes = ROWS[name]
    view, refused = pair(artifact(name, "prefill"), artifact(name, "decode"), tokens)
    assert refused == ""
    assert (view.data["token_bytes"], view.data["state_bytes"]) == (token, state)
    assert round((tokens * token + state) / 1e6) == megabytes
    assert 0 <= view.data["request_bytes"] - state - (tokens - 1) * token < 128 * token
    assert view.data["longest"] >= tokens


@pytest.mark.long
def test_one_command_builds_a_published_pair_with_its_graphs_and_says_what_serves_it(tmp_path):
    name = "qwen35-27b-a3x16-pd-1p1d"
    built = tiny.cli(tmp_path, "build", deployment(name).model, "--deployment", name, "--precompile", "none", "--out", tmp_path / "pair")
    sides = [tmp_path / f"pair-{phase}" for phase in ("prefill", "decode")]
    assert built.stdout.split() == [str(side) for side in sides]
    for side, role in zip(sides, ("prefill", "decode --prefill http://PREFILL1:8000"), strict=True):
        assert f"  npucompile serve {side} --role {role} --host " in built.stderr
        graphs = Artifact.open(side).manifest.graphs
        assert graphs
        assert all(entry.bucket.kind == role.split()[0] and entry.compiled for entry in graphs)
    shown = tiny.cli(tmp_path, "inspect", sides[0], "--pair", sides[1], "--context", 3500)
    assert (shown.exit_code, "prompt   328,007,680 bytes for 3500 tokens" in shown.stdout) == (0, True)


def test_states_of_vllm_s_operator_travel_in_float32():
    own = {"operator_packages": ("vllm-ascend",)}
    sides = [artifact("qwen35-27b-a3x16-pd-1p1d", phase, **own) for phase in ("prefill", "decode")]
    view, refused = pair(*sides, 3500)
    assert refused == ""
    assert (view.data["state_bytes"], round(view.data["request_bytes"] / 1e6)) == (2_949_120 + 150_994_944, 404)
    _, refused = pair(sides[0], artifact("qwen35-27b-a3x16-pd-1p1d", "decode"))
    assert "delta of a rank: float32[24, 128, 128] by slots and bfloat16[24, 128, 128] by slots" in refused


def test_what_differs_is_said_by_name():
    prefill, decode = (artifact("dsr1-a3x16-pd-2k-2k-50ms", phase) for phase in ("prefill", "decode"))
    other = Artifact(decode.path, replace(decode.manifest, quantization="w8a8", formats={"rules": [["*", "w8a8_dynamic"]]}), "")
    view, refused = pair(prefill, other)
    assert (view.data["pair"], view.data["refused"]) == (False, refused)
    assert "model: deepseek_v3 in bf16, weights float, w4a8, w8a8" in refused
    with pytest.raises(SpecError, match="a prompt of 5000 tokens; legal are 1 to 4096"):
        pair(prefill, decode, 5000)


def test_pools_are_shown_with_who_holds_what():
    lines = pair(*(artifact("qwen35-397b-a3x24-pd-1p1d-3node", phase) for phase in ("prefill", "decode")), 3500)[0].lines
    assert lines[0] == "prefill  qwen35-397b-a3x24-pd-1p1d-3node-prefill: mesh dp=8,tp=2, 3 drafts, at most 16384 tokens"
    assert lines[3:5] == (
        "travels  32,768 bytes a token in pages of 128, 97,689,600 a request of states",
        "prompt   215,130,112 bytes for 3500 tokens",
    )
    assert "  k x 16: bfloat16[128, 1, 256] by pages, a part on each rank of a group" in lines
    assert any(line.startswith("  delta x 45: ") for line in lines)

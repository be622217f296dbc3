"""tools/commands/explain.py: sentences about an artifact, and JSON."""

from __future__ import annotations

import json

from support import tiny

from npucompile.tools.builder.explanation import explanation
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.commands.explain import differs, lines

SMALL = ("--buckets", "1,2", "--prefill", "16", "--max-model-len", "64", "--dtype", "float32", "--backend", "eager")


def test_an_artifact_is_explained_in_sentences_and_json(tmp_path, tiny_checkpoint):
    assert tiny.cli(tmp_path, "build", tiny_checkpoint, *SMALL).exit_code == 0
    text = tiny.cli(tmp_path, "explain", "tiny").stdout
    assert "- Decode steps take 1,2 requests. The build was told so with --buckets. --buckets changes it" in text
    assert "- At most 2 requests are in flight. The plan took as many as the largest bucket has rows." in text
    assert "- It is for cpu. It is the default. --target changes it" in text
    assert "Built again by: npucompile build" in text
    data = json.loads(tiny.cli(tmp_path, "explain", "tiny", "--json").stdout)
    assert {"name", "value", "by", "what", "why", "change"} == set(data["settings"][0])
    assert {setting["name"]: setting["by"] for setting in data["settings"]}["max-model-len"] == "flag"
    assert data["deviations"] == []


def test_a_build_for_a_deployment_says_where_it_differs(tmp_path):
    chosen = plan(Options("qwen3-next-80b-a3b", deployment="qwen3-next-a3x2-mix-3.5k-1.5k-50ms", backend="null"))
    manifest = tiny.described(chosen)
    text = " ".join("\n".join(lines(tmp_path, manifest, explanation(manifest), differs(manifest))).split())
    assert "The published deployment qwen3-next-a3x2-mix-3.5k-1.5k-50ms says so." in text
    assert "Not as the deployment says: recurrent states are bfloat16, published float32" in text
    assert manifest.decided_by["mesh"] == "row"
    assert len(differs(manifest)) == text.count("Not as the deployment says")

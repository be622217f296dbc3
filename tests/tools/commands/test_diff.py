"""tools/commands/diff.py: two artifacts are compared by path or name, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from support import tiny


def test_differences_as_text_and_as_json(tmp_path, own_artifact):
    copy = tiny.copied(own_artifact, tmp_path / "b")
    assert tiny.cli(tmp_path, "diff", own_artifact, copy).stdout == f"equal: {own_artifact} and {copy}\n"
    tiny.published(copy, lambda manifest, writer: replace(manifest, deployment="row-2"))
    told = json.loads(tiny.cli(tmp_path, "diff", own_artifact, copy, "--json").stdout)
    assert (told["equal"], told["fields"], told["buckets"]) == (False, {"deployment": {"": ["", "row-2"]}}, {})
    assert " -> row-2" in tiny.cli(tmp_path, "diff", own_artifact, copy).stdout
    assert "neither artifact has bucket 'x'" in tiny.refused(tmp_path, "diff", own_artifact, copy, "--bucket", "x")
    assert "neither an artifact directory nor a built model" in tiny.refused(tmp_path, "diff", own_artifact, "nowhere")

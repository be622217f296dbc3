"""tools/builder/settings/recorded.py: an artifact's settings are those of the plan that it was built by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import ArtifactWriter
from npucompile.tools.builder.describe import describe
from npucompile.tools.builder.settings.recorded import Recorded


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    model = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    plan = tiny.planned(model, buckets=(1, 2), draft_vocab_size=64, num_speculative_tokens=1)
    with ArtifactWriter(tmp_path_factory.mktemp("built") / "out") as writer:
        return Recorded(describe(plan, writer, tiny.QUIET))


def test_a_manifest_says_what_the_build_was_told(recorded):
    assert (recorded.ranks, recorded.group, recorded.dtype, recorded.draft_vocab) == (1, "", "float32", 64)
    assert (recorded.argument("buckets"), recorded.argument("draft-vocab-size"), recorded.argument("cann")) == ("1,2", "64", None)
    assert recorded.declares_draft_head


def test_what_it_lacks_is_none(recorded):
    assert (recorded.decode, recorded.prefill) == (None, None)
    wide = Recorded(replace(recorded.manifest, mesh="dp=2,tp=2"))
    assert (wide.ranks, wide.group) == (4, " of each dp group")

"""tools/builder/uncompiled.py: a built model in another dtype is built again, and gone afterwards."""

from __future__ import annotations

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.builder.uncompiled import opened
from npucompile.tools.cli import Home


def test_a_model_in_another_dtype_is_built_again_and_leaves_nothing(own_artifact, tmp_path):
    built, home = Artifact.open(own_artifact), Home(tmp_path, {})
    with opened(home, "tiny", None) as same:
        assert same.digest == built.digest
    with opened(home, "tiny", "bfloat16") as artifact:
        assert (artifact.manifest.dtype, artifact.manifest.backend) == ("bf16", "eager")
        assert artifact.digest != built.digest
    assert not artifact.path.exists()

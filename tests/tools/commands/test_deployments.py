"""tools/commands/deployments.py: what it shows beside the list (test_listing.py)."""

from __future__ import annotations

from pathlib import Path

from support import tiny


def test_artifacts_of_no_deployment_and_the_option_that_is_gone_are_refused(own_artifact: Path, tmp_path: Path) -> None:
    refused = tiny.refused(tmp_path, "deployments", "--predict", own_artifact.parent)
    assert "was built for no named deployment; legal is one built with --deployment" in refused
    assert "--built is gone; legal is `npucompile inspect DIR/ID --cost`" in tiny.refused(tmp_path, "deployments", "--built", "DIR")

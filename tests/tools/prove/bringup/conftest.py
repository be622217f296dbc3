"""The artifacts of the tests of a bring-up."""

from __future__ import annotations

import pytest
from support import bringups

from npucompile.lowering.artifact.artifact import Artifact


@pytest.fixture(scope="session")
def npu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """`bringups.npu_artifact` for one device; not to be changed."""
    return bringups.shared_artifact(tmp_path_factory, "one")


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The same of two layers, with one decode bucket of one request; not to be changed."""
    return bringups.small_artifact(tmp_path_factory)

"""The artifact of the tests of a bring-up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import faulty

from npucompile.lowering.artifact.artifact import Artifact


@pytest.fixture(scope="session")
def npu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    """`faulty.npu_artifact` for one device; not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        yield faulty.npu_artifact(tmp_path_factory.mktemp("npu"), patch)


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    """The same of two layers, with one decode bucket of one request; not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        yield faulty.npu_artifact(tmp_path_factory.mktemp("small"), patch, "1", faulty.ONE_BUCKET, **faulty.TWO_LAYERS)

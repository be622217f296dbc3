"""The checkpoint of tests of builds for NPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts that four NPUs can share; not to be changed."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "npu", **tiny.NPU_SIZES)

"""torchair, which a process loads once."""

from __future__ import annotations

import pytest
from support import ge_bodies

from npucompile.lowering.ascend.toolchain.harness import Torchair


@pytest.fixture(scope="session")
def ta(tmp_path_factory: pytest.TempPathFactory) -> Torchair:
    """torchair with its own operators."""
    return ge_bodies.loaded(tmp_path_factory.mktemp("stubs"))

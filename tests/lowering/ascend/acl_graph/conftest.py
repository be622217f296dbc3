"""Operators of torch_npu, which graphs of these tests call."""

from __future__ import annotations

import pytest
from support import ge_bodies as gb


@pytest.fixture(autouse=True)
def operators(tmp_path_factory: pytest.TempPathFactory) -> None:
    gb.loaded(tmp_path_factory.mktemp("stubs"))

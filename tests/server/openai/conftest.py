"""What tests through openai's client share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def client(served: Any) -> Any:
    """Openai's client of the server of a module."""
    return served[0]

"""tools/serve/served.py: what a door does not load for it; `test_serving.py` has services that run."""

from __future__ import annotations

import subprocess
import sys

from support import ranks

HEAVY = (
    "npucompile.models.registry",
    "npucompile.tools.builder",
    "npucompile.tools.ranks",
    "npucompile.graphs.ops",
    "sympy",
    "torch._dynamo",
)
"""What builds, loads or traces; it took 52 MiB of a door, and 2 s of its start."""

LOADED = f"import sys, npucompile.tools.serve.door; print([name for name in {HEAVY!r} if name in sys.modules])"


def test_a_door_loads_nothing_that_builds_or_steps() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LOADED], env=ranks.environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert process.stdout.strip() == "[]"

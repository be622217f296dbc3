"""server/pictures/limits.py: what is no limit is refused, and options of commands are read without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.server.pictures.limits import DecoderLimits


@pytest.mark.parametrize("limits", [{"processes": 0}, {"time_s": 0}, {"memory_bytes": 1}, {"time_s": float("nan")}])
def test_limits_that_are_none_are_refused(limits):
    with pytest.raises(SpecError, match="legal is at least"):
        DecoderLimits(**limits)


def test_options_of_serve_load_no_torch():
    code = "import npucompile.tools.serve.options, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

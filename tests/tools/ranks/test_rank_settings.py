"""tools/ranks/rank_settings.py: a device without a limit of its own has that of its kind."""

from __future__ import annotations

import pytest

from npucompile.tools.ranks.rank_settings import RankSettings


@pytest.mark.parametrize(("settings", "limit_s"), [(("cpu", None), 60.0), (("emulated", None), 1800.0), (("emulated", 2.5), 2.5)])
def test_a_rank_may_be_silent_for_longer_than_a_step(settings, limit_s):
    device, step_timeout_s = settings
    limits = RankSettings(device=device, step_timeout_s=step_timeout_s)
    assert (limits.step_limit_s, limits.silence_s) == (limit_s, limit_s + 10)

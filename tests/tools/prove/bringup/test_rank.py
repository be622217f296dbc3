"""tools/prove/bringup/rank.py: a started rank runs what rank 0 of a bring-up runs before anything is loaded."""

from __future__ import annotations

import io
import sys

import pytest

from npucompile.tools.prove.bringup import rank as module
from npucompile.tools.ranks import rank
from npucompile.tools.ranks.rank_settings import RankSettings


def test_a_rank_runs_the_collectives_of_its_artifact_before_it_loads(monkeypatch):
    received = []
    monkeypatch.setattr(module, "collectives_check", lambda artifact: (artifact, "collectives"))
    monkeypatch.setattr(rank.Artifact, "open", lambda path, check: "artifact")
    monkeypatch.setattr(rank, "run_rank", lambda artifact, config, settings: received.append(settings.before_loading))
    monkeypatch.setattr(rank.sys, "stdin", io.StringIO("token\n"))
    words = ["there", "--rank=1", "--world-size=2", "--port=9", *RankSettings(join_timeout_s=1.0).as_arguments(1)]
    monkeypatch.setattr(sys, "argv", ["rank", *words])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert (ended.value.code, received) == (0, [("artifact", "collectives")])

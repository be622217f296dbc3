"""tools/ranks/rank_settings.py: every setting reaches the other ranks."""

from __future__ import annotations

import io
from dataclasses import fields
from pathlib import Path

from npucompile.tools.ranks import rank
from npucompile.tools.ranks.rank_settings import RankSettings


def test_the_command_line_of_a_rank_carries_every_setting(monkeypatch):
    settings = RankSettings(3, 7.5, 8.5, "emulated", Path("weights"), Path("cache"), True, print)
    assert all(getattr(settings, field.name) is not None for field in fields(settings))
    received = {}
    monkeypatch.setattr(rank.Artifact, "open", lambda path, check: received.update(path=path))
    monkeypatch.setattr(rank, "run_rank", lambda artifact, config, settings: received.update(config=config, settings=settings))
    monkeypatch.setattr(rank.sys, "stdin", io.StringIO("token\n"))
    rank.main(["there", "--rank=2", "--world-size=4", "--port=9", *settings.as_arguments(3)], standalone_mode=False, obj=lambda _: print)
    assert received["settings"] == settings
    config = received["config"]
    assert (received["path"], config.rank, config.local_rank, config.world_size, config.port) == (Path("there"), 2, 2, 4, 9)
    assert config.token == "token"


def test_what_is_not_set_is_not_an_option():
    assert [option.partition("=")[0] for option in RankSettings().as_arguments(1)] == [
        "--threads", "--join-timeout", "--step-timeout", "--device",
    ]  # fmt: skip

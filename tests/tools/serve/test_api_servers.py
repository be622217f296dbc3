"""tools/serve/api_servers.py: auto takes a door where streams, device and cores make one pay, and says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import pytest

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.serve.api_servers import Chosen, chosen, said_of_choice
from npucompile.tools.serve.checkpoint_texts import replaced
from npucompile.tools.serve.options import ApiServers


@pytest.mark.parametrize(
    ("slots", "mesh", "cores", "ranks", "said"),
    [
        (65, "dp=8", 64, 8, "1, for 512 streams at once (8 dp groups of 64), and 64 cores"),
        (101, "1", 4, 1, "1, for 100 streams at once (1 dp groups of 100), and 4 cores"),
        (100, "1", 4, 1, "0, for 99 streams at once (1 dp groups of 99), and a process of its own pays from 100 on"),
        (65, "dp=8", 10, 8, "0, for 512 streams at once (8 dp groups of 64), and 10 cores, where 8 ranks and one process more want 11"),
    ],
)
def test_auto_says_why(tiny_artifact: Path, slots: int, mesh: str, cores: int, ranks: int, said: str) -> None:
    artifact = Artifact.open(tiny_artifact)
    limits = replace(artifact.manifest.limits, num_slots=slots, slots_per_request=1, drafts=0, checkpoint_slots=0)
    assert limits.num_request_slots == slots
    assert said_of_choice(chosen(replaced(artifact, limits=limits, mesh=mesh), cores, ranks)) == (f"--api-servers auto: {said}",)


def test_where_nothing_was_chosen_nothing_is_said() -> None:
    assert said_of_choice(Chosen(2, "")) == ()


def test_the_option_takes_auto_or_a_number() -> None:
    kind = ApiServers()
    assert [kind.convert(value, None, None) for value in ("auto", "0", "3")] == ["auto", 0, 3]
    with pytest.raises(click.BadParameter, match="0<=x<=256"):
        kind.convert("257", None, None)
    with pytest.raises(click.BadParameter):
        kind.convert("many", None, None)

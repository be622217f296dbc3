"""tools/serve/door_process.py: a server of two processes answers as one of one does, and outlives the one that speaks with clients."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support import ranks, tiny
from support.once import made_once

from npucompile.graphs.errors import NpucompileError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.pictures.limits import MediaLimits
from npucompile.server.run import Serving
from npucompile.tools.serve.api_settings import ApiSettings
from npucompile.tools.serve.door import DoorSettings
from npucompile.tools.serve.doors import Doors
from npucompile.tools.serve.serving import StartedEngine, start_engine

SETTINGS = DoorSettings("127.0.0.1", Serving(), ApiSettings(), MediaLimits())


def built(out: Path) -> None:
    tiny.built(tiny.planned("qwen3.5-tiny", buckets=(4,), prefill=(32,), max_model_len=256), out)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "door", built)


def test_a_door_that_cannot_come_back_ends_the_server_and_is_not_started_for_ever(artifact: Path, tmp_path: Path) -> None:
    opened = Artifact.open(artifact)
    started = start_engine(opened, lambda: CpuExecutor(opened))
    try:
        with Doors(SETTINGS, 0, 1, dict(os.environ)) as doors:
            doors.open(opened, started)
            doors._doors[0]._environment["PYTHONHOME"] = "/nonexistent"
            os.kill(*doors.pids, signal.SIGKILL)
            ranks.eventually(lambda: started.engine.failure is not None, 60)
            assert "ended with status 1 before it served any" in str(started.engine.failure)
    finally:
        started.engine.stop(drain=False)


def test_what_a_door_cannot_serve_ends_the_start_with_its_reason(artifact: Path, tmp_path: Path) -> None:
    opened = Artifact.open(artifact)
    started: StartedEngine = start_engine(opened, lambda: CpuExecutor(opened))
    try:
        settings = SETTINGS._replace(api=replace(SETTINGS.api, reasoning_parser="none_of_ours"))
        with Doors(settings, 0, 1, dict(os.environ)) as door, pytest.raises(NpucompileError, match="none_of_ours"):
            door.open(opened, started)
        lost = {**os.environ, "PYTHONHOME": "/nonexistent"}
        with Doors(SETTINGS, 0, 2, lost) as door, pytest.raises(NpucompileError, match="ended with status 1 before it served any"):
            door.open(opened, started)
    finally:
        started.engine.stop(drain=False)


def test_a_server_of_a_pair_is_one_process(artifact: Path, tmp_path: Path) -> None:
    output = tiny.refused(tmp_path, "serve", artifact, "--api-servers", 1, "--role", "prefill")
    assert "--api-servers 1 with --role prefill: a server of a pair is one process; legal is 0" in output

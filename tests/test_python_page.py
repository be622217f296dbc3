"""docs/python.md runs: its blocks one after the other, as a program would, with a small artifact under the name of the bundled model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models.presets import BUNDLED
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.run import serving
from npucompile.tools.serve.serving import start_service

PAGE = (Path(__file__).resolve().parents[1] / "docs/python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
URL = "ws://127.0.0.1:8000/v1/responses"


def test_all_blocks_are_found() -> None:
    assert len(BLOCKS) == PAGE.count("```") / 2 == 5


def test_the_page_runs(
    tmp_path: Path, tiny_artifact: Path, face_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.copied(tiny_artifact, tmp_path / "artifacts" / BUNDLED[0])
    (tmp_path / "cache").symlink_to(face_home / "cache")
    monkeypatch.setenv("NPUCOMPILE_HOME", str(tmp_path))
    torch.manual_seed(0)
    running = start_service(Artifact.open(tiny_artifact), lambda: CpuExecutor(Artifact.open(tiny_artifact)))
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    try:
        with serving(running.service) as url:
            for block in BLOCKS:
                exec(compile(block.replace(URL, url), "docs/python.md", "exec"), names)
                printed.append(capsys.readouterr().out)
            names["llm"].close()  # type: ignore[attr-defined]
    finally:
        running.engine.stop(drain=False)
    traced, nothing, npus, model, server = printed
    assert traced.startswith("feed_forward traced\n")
    assert nothing == ""
    assert re.search(r"^\(\('all_reduce', 'axis:y', 'f32\[4,64\]'\),\)\n0\.\d{3} ms a call, estimated$", npus, re.MULTILINE)
    assert re.search(r" (stop|length)$", model, re.MULTILINE)
    assert re.match(r"\[.+, .+\]$", server)

"""tools/bench/figures.py: every figure has somebody who measures it, on a thread of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.bench import figures as module
from npucompile.tools.bench.streams import StreamLoad
from npucompile.tools.cli import Home
from npucompile.tools.lab import figures as lab
from npucompile.tools.progress import Progress


def test_every_figure_of_an_artifact_can_be_measured(tiny_artifact: Path) -> None:
    settings = module.BenchSettings((StreamLoad(1, 6, 4),), 1, 1, 1, 1)
    home, progress, artifact = Home(Path("home"), {}), Progress(quiet=True), Artifact.open(tiny_artifact)
    own = module.figures(artifact, home, settings, progress)
    others = lab.figures(artifact, home.cache, {}, settings, progress)
    assert ("build", *own, *others) == module.FIGURES
    assert tuple(others) == module.OF_THE_LABORATORY


def test_a_figure_is_measured_on_a_thread_that_is_gone_afterwards() -> None:
    thread = module._alone(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    with pytest.raises(SpecError, match="of the figure"):
        module._alone(lambda: (_ for _ in ()).throw(SpecError("of the figure")))

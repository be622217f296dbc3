"""Serves an artifact through the engine, in a process that answers as those of other engines do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .... import __version__
from ....graphs.errors import NpucompileError
from ....lowering.artifact.artifact import Artifact
from ....lowering.backends.inductor.huge_pages import settle
from ....runtime.cpu_executor import CpuExecutor
from ....runtime.engine import Engine
from ....runtime.request import Event, FinishEvent, Request, TokenEvent
from .loop import talk


class Npucompile:
    """One engine that goes by measured times, as a server's does, and keeps no prefixes, so that no prompt is found in a cache."""

    version = __version__

    def load(self, model: str, dtype: str, threads: int, max_model_len: int, max_num_seqs: int) -> str:
        """Opens an artifact.

        Raises:
            ArtifactError: it cannot be served.
        """
        torch.set_num_threads(threads)
        artifact = Artifact.open(Path(model))
        artifact.check_runnable()
        self._engine = Engine(CpuExecutor(artifact), measured=True, refresh_every_s=None)
        limits = artifact.manifest.limits
        return f"{artifact.manifest.backend}, " + (f"{limits.drafts} drafts" if limits.drafts else "no drafts")

    def settle(self) -> None:
        """Waits until the memory of weights is as it stays."""
        settle()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Callable[[int, Sequence[int]], None]) -> None:
        """Single requests, submitted together.

        Raises:
            NpucompileError: a request failed.
        """
        ends: list[FinishEvent] = []

        def sink(stream: int) -> Callable[[Event], None]:
            return lambda event: emit(stream, event.token_ids) if isinstance(event, TokenEvent) else ends.append(event)

        for i, prompt in enumerate(prompts):
            self._engine.submit(Request(str(i), tuple(prompt), tokens), sink(i))
        while len(ends) < len(prompts):
            self._engine.step()
        if failed := [end for end in ends if end.reason != "length"]:
            raise NpucompileError(f"a stream ended with {failed[0]!r}; a benchmark's end with reason length")


def main() -> None:
    """Answers until standard input ends."""
    gc.freeze()  # as a server does (tools/serve/serving.py)
    talk(Npucompile)


if __name__ == "__main__":
    main()

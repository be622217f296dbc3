"""The bundled model, built and served in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.server.run import serving
from npucompile.tools.serve.api_settings import AUTO, ApiSettings
from npucompile.tools.serve.serving import RunningService, start_service


@contextlib.contextmanager
def served(
    out: Path, *, tool_call_parser: str = AUTO, prefix_cache: PrefixCacheSettings | None = None, **sizes: Any
) -> Iterator[tuple[str, RunningService]]:
    """A server of an artifact that is built at `out`: its URL without a path, and its engine and service."""
    tiny.built(tiny.planned("qwen3.5-tiny", **sizes), out)
    artifact = Artifact.open(out)
    api = ApiSettings(names=("tiny", "qwen3.5-tiny"), tool_call_parser=tool_call_parser)
    running = start_service(artifact, lambda: CpuExecutor(artifact), api=api, prefix_cache=prefix_cache)
    with contextlib.ExitStack() as stack:
        stack.callback(running.engine.stop, drain=False)
        yield stack.enter_context(serving(running.service)).replace("ws://", "http://").removesuffix("/v1/responses"), running

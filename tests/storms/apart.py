"""Parts of a storm in processes of their own, so that what one part does holds up no other's interpreter."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

NICENESS = 10
"""Of such a process: on a machine of few processors it would take them from the server, as clients elsewhere do not."""


async def apart(work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """What a coroutine function of a module returns, run in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, _run, work, arguments)


def _run(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.nice(NICENESS)
    return asyncio.run(work(*arguments))

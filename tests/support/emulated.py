"""Ranks of emulated devices as threads of this process, each with gloo groups of its own."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo

from npucompile.graphs.types import Mesh


def gloo(name: str, ranks: tuple[int, ...], rank: int, store: Any, timeout_s: float) -> Any:
    """A gloo process group of one rank, which waits for the others."""
    prefixed = PrefixStore(f"{name}/{ranks[0]}", store)
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    backend = ProcessGroupGloo(prefixed, ranks.index(rank), len(ranks), options)
    group = ProcessGroup(prefixed, ranks.index(rank), len(ranks))
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def on_ranks(mesh: Mesh, work: Callable[[int, Mapping[str, Any]], Any], timeout_s: float = 60) -> list[Any]:
    """Runs `work(rank, groups by name)` for every rank on a thread of its own; returns what each returned or raised."""
    store, answers = HashStore(), [None] * mesh.size

    def run(rank: int) -> None:
        try:
            groups = {name: gloo(name, mesh.group(name, rank), rank, store, timeout_s) for name in mesh.groups()}
            answers[rank] = work(rank, groups)
        except Exception as error:  # handed to the test, which looks at it
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers

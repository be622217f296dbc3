"""The process of one rank that the first rank of its machine starts; nobody types its command line."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from ...graphs.errors import NpucompileError
from ...lowering.artifact.artifact import Artifact
from ...lowering.device_error import with_way_out
from .launch import run_rank


def main(path: Path, rank: int, parent: int) -> None:
    """Runs a rank as the first one of its machine describes it on standard input, where nobody else reads the token of the rendezvous."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(name)s %(message)s")
    config, settings = pickle.load(sys.stdin.buffer)

    def abandoned() -> str | None:
        return None if os.getppid() == parent else f"the process that started rank {rank} has ended"

    try:
        # The first rank has compared the files with the manifest; the rendezvous compares the manifests.
        artifact = Artifact.open(path, check=False)
        run_rank(
            artifact,
            replace(config, rank=rank, local_rank=rank - config.rank, hosts_store=False, starts_ranks=False),
            settings,
            abandoned=abandoned,
        )
    except NpucompileError as error:
        text = with_way_out(str(error))
        print(text if text.startswith(f"rank {rank} ") else f"rank {rank}: {text}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

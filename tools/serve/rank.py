"""Turns a command line that another rank wrote into one rank of its job; nobody types it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from ...graphs.errors import NpucompileError
from ...lowering.artifact.artifact import Artifact
from .launch import LOCALHOST, Place, Settings, follow


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--rank", type=click.IntRange(1), required=True)
@click.option("--world", type=click.IntRange(2), required=True)
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@click.option("--threads", type=click.IntRange(1), required=True)
@click.option("--join-timeout", type=float, required=True)
@click.option("--step-timeout", type=float, required=True)
def main(path: Path, rank: int, world: int, port: int, threads: int, join_timeout: float, step_timeout: float) -> None:
    """Run one rank of a job that rank 0 started on this machine."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(name)s %(message)s")
    try:
        # Rank 0 has compared the files with the manifest; that both have the same manifest is compared when they meet.
        artifact = Artifact.open(path, check=False)
        follow(artifact, Place(rank, world, LOCALHOST, port, world), Settings(threads, join_timeout, step_timeout))
    except NpucompileError as error:
        said = str(error)
        print(said if said.startswith(f"rank {rank} ") else f"rank {rank}: {said}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

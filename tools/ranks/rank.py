"""The process of one rank that rank 0 starts; nobody types its command line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import click

from ...graphs.errors import NpucompileError
from ...lowering.artifact.artifact import Artifact
from ...lowering.device import KINDS
from ...runtime.distributed.rendezvous import RendezvousConfig
from .launch import LOCALHOST, run_rank
from .rank_settings import BeforeLoading, RankSettings


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--rank", type=click.IntRange(1), required=True)
@click.option("--world-size", type=click.IntRange(2), required=True)
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@click.option("--threads", type=click.IntRange(1), required=True)
@click.option("--join-timeout", type=float, required=True)
@click.option("--step-timeout", type=float, required=True)
@click.option("--device", type=click.Choice(KINDS), required=True)
@click.option("--checkpoint", type=click.Path(path_type=Path))
@click.option("--cache", type=click.Path(path_type=Path))
@click.option("--random-weights", is_flag=True)
@click.option("--ship-compiled", is_flag=True)
@click.pass_obj
def main(
    rehearsal: Callable[[Artifact], BeforeLoading] | None,
    path: Path,
    rank: int,
    world_size: int,
    port: int,
    threads: int,
    join_timeout: float,
    step_timeout: float,
    device: str,
    checkpoint: Path | None,
    cache: Path | None,
    random_weights: bool,
    ship_compiled: bool,
) -> None:
    """Run one rank that rank 0 started on this machine; the token of the rendezvous is the first line of standard input.

    The object of the command, if any, gives what a rank does before it loads an artifact (`RankSettings.before_loading`).
    """
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(name)s %(message)s")
    try:
        # Rank 0 has compared the files with the manifest; the rendezvous compares the manifests.
        artifact = Artifact.open(path, check=False)
        config = RendezvousConfig(
            rank, world_size, LOCALHOST, port, world_size, join_timeout, local_rank=rank, token=sys.stdin.readline().strip()
        )
        before = rehearsal(artifact) if rehearsal else None
        settings = RankSettings(threads, join_timeout, step_timeout, device, checkpoint, cache, random_weights, before, ship_compiled)
        run_rank(artifact, config, settings)
    except NpucompileError as error:
        text = str(error)
        print(text if text.startswith(f"rank {rank} ") else f"rank {rank}: {text}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

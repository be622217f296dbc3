"""Storms against `npucompile serve` of an artifact: `python tests/storms/run.py ARTIFACT --requests 10000 --streams 256`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from storms.chaos import chaos
from storms.fuzz import fuzz
from storms.jobs import Job, jobs
from storms.soak import soak
from storms.target import Target

KNOWN, VOCAB, LONGEST = 48, 512, 48


@contextlib.contextmanager
def served(artifact: Path, *options: str) -> Iterator[Target]:
    """A server of the artifact in a process of its own, which is ready."""
    command = [sys.executable, "-m", "npucompile.tools.cli", "serve", str(artifact), "--port", "0", *options]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        output = ""
        while "talk to it" not in output:
            line = process.stderr.readline()
            assert line, output
            output += line
        found = re.search(r"ws:(//[^/\s]+)", output)
        assert found is not None
        yield Target(f"http:{found.group(1)}", process.pid)
        assert process.poll() is None, f"the server ended with {process.returncode}"
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of them lies; 0 without any."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def _soaks(target: Target, known: list[Job], streams: list[int], requests: int, seed: int) -> int:
    wrong = 0
    for count in streams:
        found = await soak(target, known, count, requests, random.Random(seed))
        wrong += len(found.wrong)
        times = "  ".join(
            f"{name} p50 {quantile(ms, 0.5):.1f} p95 {quantile(ms, 0.95):.1f} p99 {quantile(ms, 0.99):.1f} ms"
            for name, ms in (("first", found.first_ms), ("between", found.between_ms))
        )
        resident = [f"{value / 2**20:.0f}" for value in found.resident_bytes]
        click.echo(
            f"{count} streams: {found.requests} requests, {found.tokens / found.seconds:.0f} tok/s, {len(found.wrong)} wrong  {times}"
        )
        click.echo(f"  MiB resident: {' '.join(resident)}")
        for line in found.wrong[:5]:
            click.echo(f"  {line[:300]}")
    return wrong


async def _storms(target: Target, streams: list[int], requests: int, broken: int, frames: int, bodies: int, seed: int) -> int:
    generator = random.Random(seed)
    known = await jobs(target, KNOWN, VOCAB, LONGEST, generator)
    wrong = await _soaks(target, known, streams, requests, seed) if requests else 0
    if broken:
        click.echo(f"broken off: {dict(await chaos(target, known, broken, generator))}")
    if frames or bodies:
        found = await fuzz(target, max(known, key=lambda job: len(job.expected)), frames, bodies, generator)
        wrong += len(found.faults)
        click.echo(f"wrong input: {dict(sorted(found.answers.items()))}")
        click.echo(f"  beside it: pauses p50 {quantile(found.pauses_ms, 0.5):.1f} p99 {quantile(found.pauses_ms, 0.99):.1f} ms, longest "
                   f"{max(found.pauses_ms, default=0):.1f} ms; faults {len(found.faults)}")  # fmt: skip
        for line in found.faults[:10]:
            click.echo(f"  {line[:600]}")
    owned = await target.idle()
    click.echo(f"held when all have ended: {owned}, {target.resident_bytes / 2**20:.0f} MiB resident")
    return wrong + sum(value > 0 for value in owned.values())


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True))
@click.option("--streams", default="256", show_default=True, help="Requests at a time; several numbers by commas.")
@click.option("--requests", default=10000, show_default=True, help="Of each number of streams.")
@click.option("--broken", default=0, show_default=True, help="Requests of clients that break off.")
@click.option("--frames", default=0, show_default=True, help="Frames of random content.")
@click.option("--bodies", default=0, show_default=True, help="Bodies of random content.")
@click.option("--seed", default=0, show_default=True)
def main(artifact: Path, streams: str, requests: int, broken: int, frames: int, bodies: int, seed: int) -> None:
    """Send storms to a server of ARTIFACT; the status is 1 if a token was wrong, a fault was the server's, or anything is held after."""
    with served(artifact) as target:
        wrong = asyncio.run(_storms(target, [int(part) for part in streams.split(",")], requests, broken, frames, bodies, seed))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

"""Storms against `npucompile serve` of an artifact: `python tests/storms/run.py ARTIFACT --requests 10000 --streams 256`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from storms.canary import Calm, watched
from storms.chaos import chaos
from storms.fuzz import fuzz
from storms.jobs import Job, jobs
from storms.soak import soak
from storms.target import Target
from storms.turns import converse

from npucompile.lowering.artifact.artifact import Artifact

KNOWN, VOCAB, LONGEST = 48, 512, 48


@dataclass(frozen=True)
class Storm:
    """What is sent; see the options."""

    streams: list[int]
    requests: int
    store: bool
    broken: int
    conversations: int
    turns: int
    frames: int
    bodies: int
    senders: int
    calm_s: float
    seed: int


@contextlib.contextmanager
def served(artifact: Path, *options: str) -> Iterator[Target]:
    """A server of the artifact in a process of its own, which is ready."""
    command = [sys.executable, "-m", "npucompile.tools.cli", "serve", str(artifact), "--port", "0", "--no-build", *options]
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
        yield Target(f"http:{found.group(1)}", process.pid, Artifact.open(artifact).manifest.limits.max_model_len)
        assert process.poll() is None, f"the server ended with {process.returncode}"
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of them lies; 0 without any."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def _soaks(target: Target, known: list[Job], storm: Storm) -> int:
    wrong = 0
    for count in storm.streams:
        found = await soak(target, known, count, storm.requests, random.Random(storm.seed), store=storm.store)
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


async def _turns(target: Target, storm: Storm) -> int:
    found = await converse(target, storm.conversations, storm.turns, random.Random(storm.seed))
    for turn, times in found.first_ms.items():
        cached, asked = found.found[turn]
        click.echo(f"turn {turn + 1} of {storm.conversations} conversations: first token p50 {quantile(times, 0.5):.1f} ms, longest "
                   f"{max(times):.1f} ms; {cached} of {asked} tokens cached ({100 * cached / asked:.0f} %)")  # fmt: skip
    for line in found.wrong:
        click.echo(f"  {line[:300]}")
    return len(found.wrong)


async def _fuzz(target: Target, known: list[Job], storm: Storm) -> int:
    beside = max(known, key=lambda job: len(job.expected))
    async with watched(target, beside) as calm:
        await asyncio.sleep(storm.calm_s)
    _echo_pauses("without a storm", calm)
    began = time.monotonic()
    found, stormy = await fuzz(target, beside, storm.frames, storm.bodies, storm.seed, storm.senders)
    click.echo(f"wrong input: {storm.frames} frames and {storm.bodies} bodies in {time.monotonic() - began:.0f} s, from {storm.senders} "
               f"processes: {dict(sorted(found.answers.items()))}")  # fmt: skip
    _echo_pauses("beside it", stormy)
    click.echo(f"  faults {len(found.faults)}")
    for line in found.faults[:10]:
        click.echo(f"  {line[:600]}")
    return len(found.faults) + len(calm.wrong) + len(stormy.wrong)


def _echo_pauses(when: str, calm: Calm) -> None:
    own = [pause - delay for pause, delay in zip(calm.pauses_ms, calm.delays_ms, strict=True)]
    within = [pause for pause, first in zip(calm.pauses_ms, calm.first, strict=True) if not first]
    for what, values in (("pauses", calm.pauses_ms), ("less the reader's own wait for a processor", own), ("after first tokens", within)):
        click.echo(f"  {when}: {len(values)} {what}, p50 {quantile(values, 0.5):.1f} p99 {quantile(values, 0.99):.1f} p99.9 "
                   f"{quantile(values, 0.999):.1f} ms, longest {max(values, default=0):.1f} ms")  # fmt: skip
    worst = sorted(zip(calm.pauses_ms, calm.ends_s, strict=True), reverse=True)[:8]
    click.echo(f"    longest end at {' '.join(f'{ms:.0f}ms@{end:.3f}' for ms, end in worst)}")


async def _storms(target: Target, storm: Storm) -> int:
    generator = random.Random(storm.seed)
    known = await jobs(target, KNOWN, VOCAB, LONGEST, generator)
    wrong = await _soaks(target, known, storm) if storm.requests else 0
    if storm.conversations:
        wrong += await _turns(target, storm)
    if storm.broken:
        click.echo(f"broken off: {dict(await chaos(target, known, storm.broken, generator))}")
    if storm.frames or storm.bodies:
        wrong += await _fuzz(target, known, storm)
    owned = await target.idle()
    click.echo(f"held when all have ended: {owned}, {target.resident_bytes / 2**20:.0f} MiB resident")
    return wrong + sum(value > 0 for value in owned.values())


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True))
@click.option("--streams", default="256", show_default=True, help="Requests at a time; several numbers by commas.")
@click.option("--requests", default=10000, show_default=True, help="Of each number of streams.")
@click.option("--store/--no-store", default=True, show_default=True, help="Whether responses over websockets are kept.")
@click.option("--broken", default=0, show_default=True, help="Requests of clients that break off, some of which go on elsewhere.")
@click.option("--conversations", default=0, show_default=True, help="Conversations, one turn of each after the other.")
@click.option("--turns", default=10, show_default=True, help="Of each conversation.")
@click.option("--frames", default=0, show_default=True, help="Frames of random content.")
@click.option("--bodies", default=0, show_default=True, help="Bodies of random content.")
@click.option("--senders", default=1, show_default=True, help="Processes that send frames and bodies.")
@click.option("--calm", "calm_s", default=10.0, show_default=True, help="Seconds for which pauses are measured without frames and bodies.")
@click.option("--option", "options", multiple=True, help="Of the server, such as --option=--threads=1; may be repeated.")
@click.option("--seed", default=0, show_default=True)
def main(artifact: Path, streams: str, options: tuple[str, ...], **storm: Any) -> None:
    """Send storms to a server of ARTIFACT; the status is 1 if a token was wrong, a fault was the server's, or anything is held after."""
    with served(artifact, *options) as target:
        wrong = asyncio.run(_storms(target, Storm([int(part) for part in streams.split(",")], **storm)))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

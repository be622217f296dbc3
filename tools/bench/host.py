"""How many streams this machine's host carries: the whole server beside a device whose steps take a fixed time and no processor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...graphs.steps.decode import DECODE
from ...graphs.steps.prefill import PREFILL
from ...graphs.types import Bucket, Limits
from ...lowering.artifact.artifact import Artifact
from ...runtime.engine import Engine
from ...runtime.executor import Outputs, Pending
from ...server.pictures.limits import MediaLimits
from ...server.run import Serving, serving
from ..builder import driver
from ..builder import plan as planning
from ..progress import Progress
from ..serve.api_settings import ApiSettings
from ..serve.artifact_tokenizer import codec_of
from ..serve.door import DoorSettings
from ..serve.doors import Doors
from ..serve.served import calm_collector, service_of
from ..serve.serving import StartedEngine
from .serve.apart import ApartClient
from .stats import Spread, spread

MODEL, DRAFTS, PROMPT, PAGE = "qwen3.5-tiny", 3, 64, 16
"""Whose tokenizer it has; drafts a step, tokens of a prompt, tokens a page."""

FULL = 0.9
"""Steps count that have so many of all streams."""


@dataclass(frozen=True)
class HostLoad:
    """Streams that begin together, and the device that they share.

    Attributes:
        groups: dp groups, which step together.
        tokens: that each stream generates, two or three a step.
        step_ms: what each step takes.
    """

    streams: int
    groups: int
    tokens: int
    step_ms: float

    @property
    def rows(self) -> int:
        """Streams of a group, at most."""
        return -(-self.streams // self.groups)

    @property
    def limits(self) -> Limits:
        """Room for all streams."""
        length = -(-(PROMPT + self.tokens + 2 * DRAFTS + 2) // PAGE) * PAGE
        pages, slots = 1 + self.rows * (length // PAGE + 1), 1 + (self.rows + 1) * (DRAFTS + 1)
        return Limits(PAGE, pages, slots, length, DRAFTS + 1, DRAFTS)


@dataclass(frozen=True)
class _Step:
    outputs: Sequence[Outputs]
    end_s: float

    def result(self) -> Sequence[Outputs]:
        """Sleeps until the step has ended."""
        time.sleep(max(0.0, self.end_s - time.perf_counter()))
        return self.outputs


class FixedDevice:
    """An executor whose steps follow one another, and whose tokens mean nothing.

    Attributes:
        began: when the decode steps began that had most of the streams.
    """

    max_logprobs, max_ranked, segments, fixed_tokens = 0, 0, None, None
    recurrent, run_ahead, any_size, missing, areas = True, 1, frozenset[str](), dict[Bucket, str](), ()

    def __init__(self, load: HostLoad, vocab_size: int) -> None:
        self.limits, self.vocab_size, self.groups, self._load = load.limits, vocab_size, load.groups, load
        batches = sorted({1, load.rows} | {2**power for power in range(load.rows.bit_length())})
        self.buckets = (PREFILL.bucket(4, 512), *(DECODE.bucket(batch, DRAFTS + 1) for batch in batches if batch <= load.rows))
        self.backends = dict.fromkeys((bucket.name for bucket in self.buckets), "fixed")
        self.began: list[float] = []
        self._end_s, self._random = 0.0, np.random.default_rng(0)

    def launch(self, bucket: Bucket, inputs: Sequence[Mapping[str, Any]]) -> Pending:
        """Begins a step behind the one before it."""
        begin = max(time.perf_counter(), self._end_s)
        self._end_s = begin + self._load.step_ms / 1e3
        live = [np.asarray(group["request_slots"]) > 0 for group in inputs]
        if bucket.kind == DECODE.name and sum(map(np.count_nonzero, live)) >= FULL * self._load.streams:
            self.began.append(begin)
        return _Step(tuple(self._outputs(bucket, rows) for rows in live), self._end_s)

    def _outputs(self, bucket: Bucket, live: Any) -> Outputs:
        decodes = bucket.kind == DECODE.name
        shapes = {"tokens": (bucket.batch, DRAFTS + 1 if decodes else 1), "drafts": (bucket.batch, DRAFTS)}
        outputs = {name: self._random.integers(0, self.vocab_size, shape, dtype=np.int32) for name, shape in shapes.items()}
        if decodes:
            outputs["counts"] = np.where(live, self._random.integers(2, 4, bucket.batch), 0).astype(np.int32)
        return outputs

    def refresh(self) -> bool:
        """Nothing is swapped in."""
        return False

    def compiles(self) -> int:
        """None."""
        return 0

    def give_back(self, numbers: object) -> None:
        """It has no memory."""


def measure(
    load: HostLoad, rounds: int, api_servers: int, home: Path, environment: Mapping[str, str], progress: Progress, *, http: bool = False
) -> dict[str, Any]:
    """The figures of a load, medians of the rounds.

    Args:
        api_servers: processes that speak with clients (`serve --api-servers`); 0 is this one.
        home: where the artifact is kept whose tokenizer is used.
        environment: of these processes.
        http: streams are over HTTP, a connection each, in place of websockets.

    Returns:
        `median_step_ms`, `device_busy` (`step_ms` over that), `tok_s`, and processor time, `engine_ms_a_step`, `door_ms_a_step` and
        `door_us_a_token`; each with the smallest and largest in `ranges`. The client's processor time is not among them, and takes cores,
        too.
    """
    artifact = _artifact(load, home, progress)
    device = FixedDevice(load, int(artifact.manifest.model["vocab_size"]))
    calm_collector()
    engine = Engine.from_loader(lambda: device, measured=True)  # type: ignore[arg-type, return-value]
    prompts = [[1 + (7 * stream + place) % (device.vocab_size - 1) for place in range(PROMPT)] for stream in range(load.streams)]
    found: list[dict[str, float]] = []
    try:
        with (
            _served(artifact, engine, api_servers, environment) as (url, door_s),
            ApartClient(url, http=http) as client,
            progress.bar("host", rounds + 1) as bar,
        ):
            for number in range(rounds + 1):
                device.began.clear()
                before = _thread_s("npucompile-engine"), door_s(), time.perf_counter()
                client.serve(prompts, load.tokens)
                after = _thread_s("npucompile-engine"), door_s(), time.perf_counter()
                steps = engine.stats()["steps_total"] - sum(each["steps"] for each in found)
                found.append(_figures(load, device, before, after, steps))
                bar.step(f"round {number}" if number else "uncounted round")
    finally:
        engine.stop(drain=False)
    spreads: dict[str, Spread] = {name: spread(each[name] for each in found[1:]) for name in found[0] if name != "steps"}
    answer = {
        "streams": load.streams,
        "groups": load.groups,
        "step_ms": load.step_ms,
        "api_servers": api_servers,
        "http": http,
        "rounds": rounds,
    }
    medians = {name: round(each.median, 3) for name, each in spreads.items()}
    return {**answer, **medians, "ranges": {name: [round(each.low, 3), round(each.high, 3)] for name, each in spreads.items()}}


def _figures(
    load: HostLoad, device: FixedDevice, before: tuple[float, float, float], after: tuple[float, float, float], steps: float
) -> dict[str, float]:
    engine_s, door_s, took_s = (late - early for early, late in zip(before, after, strict=True))
    step_ms = 1e3 * float(np.median(np.diff(device.began)))
    return {
        "steps": steps,
        "median_step_ms": step_ms,
        "device_busy": load.step_ms / step_ms,
        "tok_s": load.streams * load.tokens / took_s,
        "engine_ms_a_step": 1e3 * engine_s / steps,
        "door_ms_a_step": 1e3 * door_s / steps,
        "door_us_a_token": 1e6 * door_s / (load.streams * load.tokens),
    }


@contextmanager
def _served(
    artifact: Artifact, engine: Engine, api_servers: int, environment: Mapping[str, str]
) -> Iterator[tuple[str, Callable[[], float]]]:
    """A server over the engine: its URL, and what tells the processor time of what speaks with clients."""
    settings, api = Serving(), ApiSettings()
    if api_servers:
        with Doors(DoorSettings("127.0.0.1", settings, api, MediaLimits()), 0, api_servers, environment) as doors:
            doors.open(artifact, StartedEngine(engine, None, lambda: {"status": "ok"}))
            yield doors.url, lambda: sum(map(_process_s, doors.pids))
        return
    codec, chat = codec_of(artifact), api.chat_of(artifact)
    service = service_of(
        engine, artifact, codec, api, chat, engine.executor.groups, lambda: {"status": "ok"}, settings.limits, MediaLimits()
    )
    with serving(service) as url:
        yield url, lambda: _thread_s("npucompile-server")


def _artifact(load: HostLoad, home: Path, progress: Progress) -> Artifact:
    """The bundled model's, without executables, and with the limits of the device."""
    out = home / "host"
    driver.build(planning.plan(planning.Options(MODEL, backend="null", buckets=(1,), max_model_len=256)), out, home, progress, jobs=1)
    artifact = Artifact.open(out)
    return Artifact(out, replace(artifact.manifest, limits=load.limits), artifact.digest)


def _thread_s(name: str) -> float:
    (thread,) = [thread for thread in threading.enumerate() if thread.name == name]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def _process_s(pid: int) -> float:
    # Of clock_getcpuclockid(3), which Python lacks. Ticks of /proc/PID/stat are longer than what a door takes for a few steps.
    return time.clock_gettime((~pid << 3) | 2)

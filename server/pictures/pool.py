"""A bounded pool of processes that decode pictures (`decoder`), shared by clients: one that crashes, hangs or grows too large costs its
picture alone."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from ...graphs.errors import RequestError
from ..requests.shared_threads import SharedThreads
from . import decoder
from .decoder import DecodeTask, Outcome, read, write
from .limits import CHANNELS, DecoderLimits, PictureLimits, VideoLimits
from .processor import Picture, PictureProcessor
from .video_file import DEFAULT_LIMITS, VideoHeader
from .videos import FramePair, Video, VideoProcessor

log = logging.getLogger(__name__)

DECODER = ("-m", decoder.__name__)
START_S = 120.0
"""A process may take so long to import what it needs."""

HEAD_BYTES = 2**16
"""Of an outcome beside its pixels."""

CODES = frozenset({
    "empty_image_file", "image_file_too_large", "image_too_large", "image_parse_error", "invalid_image", "unsupported_image_media_type",
    "empty_video_file", "video_file_too_large", "video_too_large", "video_parse_error", "invalid_video", "unsupported_video_media_type",
})  # fmt: skip
"""Of errors that a decoder may tell."""


class DecoderPool:
    """Decodes pictures in other processes. They start at once, and end with the pool or with this process.

    Args:
        limits: on these processes.
        pictures, videos: on each.
        program: what the processes run: arguments of Python.

    Attributes:
        decoded, refused, killed: pictures and videos so far, those that are not legal, and processes that did not survive theirs.
        seconds: that processes took for all of these.
    """

    def __init__(
        self, limits: DecoderLimits, pictures: PictureLimits, program: Sequence[str] = DECODER, videos: VideoLimits = DEFAULT_LIMITS
    ) -> None:
        self._limits, self._pictures, self._videos, self._program = limits, pictures, videos, program
        self.decoded = self.refused = self.killed = 0
        self.seconds = 0.0
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._started: set[int] = set()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = SharedThreads(limits.processes, "npucompile-pictures")
        for _ in range(limits.processes):
            self._start()

    @property
    def process_ids(self) -> frozenset[int]:
        """Of the processes that run."""
        return frozenset(process.pid for process in self._processes)

    def stats(self) -> dict[str, Any]:
        """Numbers by name, as of an engine."""
        results = {"decoded": self.decoded, "refused": self.refused, "killed": self.killed}
        return {"picture_decodes": results, "picture_decode_seconds_total": self.seconds}

    def size(self, data: bytes, param: str) -> Future[tuple[int, int]]:
        """Height and width in the header of a picture; raises what `decoding.size` does."""
        return self._threads.submit(lambda: self._run(self._task(data), param).size, lasts=False)

    def picture(self, data: bytes, processor: PictureProcessor, param: str) -> Future[Picture]:
        """A picture as `processor` makes it; raises what `decoding.decode` and it do."""
        return self._threads.submit(lambda: self._picture(data, processor, param))

    def header(self, data: bytes, param: str) -> Future[VideoHeader]:
        """What the file of a video says of it; raises what `video_file.read_header` does."""
        return self._threads.submit(lambda: self._header(data, param), lasts=False)

    def video(self, data: bytes, processor: VideoProcessor, param: str) -> Future[Video]:
        """A video as `processor` makes it; raises what `video_file.read_video` does."""
        return self._threads.submit(lambda: self._video(data, processor, param), lasts=True)

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        self._idle.put(None)
        self._threads.close()
        for process in self._processes:
            _end(process)
        self._processes.clear()

    def _task(self, data: bytes, processor: PictureProcessor | None = None) -> DecodeTask:
        fields = None if processor is None else asdict(processor)
        return DecodeTask(data, self._pictures.max_bytes, self._pictures.max_pixels, self._limits.time_s, fields)

    def _picture(self, data: bytes, processor: PictureProcessor, param: str) -> Picture:
        done = self._run(task := self._task(data, processor), param)
        grid = done.grid
        width = CHANNELS * processor.patch_size**2
        if not done.pixels or len(done.pixels) != grid[1] * grid[2] * width:
            raise self._failed(param, task)
        pixels = torch.frombuffer(bytearray(done.pixels), dtype=torch.uint8).view(-1, width)
        return self._counted(Picture(pixels, grid, processor.merge_size))

    def _video_task(self, data: bytes, processor: VideoProcessor | None = None) -> DecodeTask:
        limits, fields = self._videos, None if processor is None else asdict(processor)
        return DecodeTask(data, limits.max_bytes, limits.max_pixels, limits.max_seconds, fields, limits.max_frames)

    def _header(self, data: bytes, param: str) -> VideoHeader:
        done = self._run(self._video_task(data), param)
        return VideoHeader(done.frames, done.rate, *done.size)

    def _video(self, data: bytes, processor: VideoProcessor, param: str) -> Video:
        done = self._run(task := self._video_task(data, processor), param)
        width = CHANNELS * processor.temporal_patch_size * processor.patch_size**2
        patches = done.grid[1] * done.grid[2]
        if not done.pixels or len(done.pixels) != len(done.seconds) * patches * width:
            raise self._failed(param, task)
        pixels = torch.frombuffer(bytearray(done.pixels), dtype=torch.uint8).view(-1, patches, width)
        pictures = [Picture(each, done.grid, processor.merge_size) for each in pixels]
        self._counted(*pictures)
        return Video(tuple(FramePair(*each) for each in zip(pictures, done.seconds, strict=True)))

    def _counted(self, *pictures: Picture) -> Picture:
        """The first of what was decoded at once."""
        for picture in pictures:
            _ = picture.digest  # here, on a thread: it takes as long as a step
        with self._lock:
            self.decoded += 1
        return pictures[0]

    def _run(self, task: DecodeTask, param: str) -> Outcome:
        process = self._idle.get()
        while process is not None and process.poll() is not None and not self._closed:
            # It ended while it did nothing, which no picture is to blame for.
            self._replace(process)
            process = self._idle.get()
        if process is None:
            self._idle.put(None)
            raise self._failed(param, task)
        most = 0 if task.processor is None else _most_pixels(task.processor)
        done, began_s = None, time.monotonic()
        if process.pid in self._started or self._exchange(process, None, START_S, HEAD_BYTES):
            self._started.add(process.pid)
            began_s = time.monotonic()
            # What is resized to a least area may be larger than the most.
            done = self._exchange(process, task, task.time_s, HEAD_BYTES + 2 * CHANNELS * most)
        with self._lock:
            self.seconds += time.monotonic() - began_s
            self.killed += done is None
            self.refused += done is not None and bool(done.error)
        if done is None:
            self._replace(process)
            raise self._failed(param, task)
        self._idle.put(process)
        if done.error:
            code = done.code if done.code in CODES else _damaged(task)
            raise RequestError(done.error, param=param, code=code)
        return done

    def _exchange(self, process: subprocess.Popen[bytes], task: DecodeTask | None, time_s: float, most_bytes: int) -> Outcome | None:
        """What a process makes of a task, or says once it has started; None where it did not survive that."""
        assert process.stdin is not None
        assert process.stdout is not None
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            process.kill()

        late = threading.Timer(time_s, kill)
        late.start()
        try:
            if task is not None:
                write(process.stdin, task)
            payload = read(process.stdout, most_bytes)
            late.cancel()
            # What came in the last moment has cost the process all the same.
            return None if payload is None or killed.is_set() else msgspec.msgpack.decode(payload, type=Outcome)
        except (OSError, msgspec.MsgspecError):
            return None
        finally:
            late.cancel()

    def _failed(self, param: str, task: DecodeTask) -> RequestError:
        most = f"{task.time_s:g} s and {self._limits.memory_bytes >> 20} MiB"
        what = "video" if task.max_frames else "picture"
        message = f"the {what} cannot be decoded within {most}, or its file is damaged; legal is one that can"
        return RequestError(message, param=param, code=_damaged(task))

    def _replace(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._processes.discard(process)
            self._started.discard(process.pid)
        _end(process)
        if not self._closed:
            log.warning("a process that decodes pictures ended within one, with status %s", process.returncode)
            self._start()

    def _start(self) -> None:
        # Nothing of this process's environment: it may hold keys.
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }  # fmt: skip
        command = [sys.executable, *self._program, str(self._limits.memory_bytes)]
        with self._lock:
            if self._closed:
                return
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables)
            self._processes.add(process)
        self._idle.put(process)


def _most_pixels(processor: dict[str, Any]) -> int:
    """Of what a processor makes, but for what it rounds up: a frame of a video has a token at least."""
    token = int(processor["patch_size"] * processor["merge_size"]) ** 2
    return max(int(processor["max_pixels"]), int(processor.get("max_frames", 1)) * token)


def _damaged(task: DecodeTask) -> str:
    return "video_parse_error" if task.max_frames else "image_parse_error"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()

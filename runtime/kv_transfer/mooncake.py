"""Mooncake's transfer engine: one-sided writes over tcp, RDMA or the links of Ascend devices.

What it does not do itself is bounded and checked here. It takes about 2,048 segments to a peer at a time, over all threads; beyond that it
never reaches this peer again, and only another engine of the process does. It does not notice that memory to read is not registered.

Its calls for whole batches are used over links of NPUs alone, where a call for each segment costs more than its bytes; a batch that has
failed is written again whole, once. Over others they say that a batch has failed when one segment has, or after 30 s, while others may
still be written (Mooncake #4247), and they wait in a loop that keeps a core: where the scheduler prefers that thread, as a real-time class
does, the thread that moves the bytes gets none. Each segment has its own status there, which is asked for between pauses; those that have
failed are written again, once. When a segment that does not move has failed is up to the engine (`MC_TCP_PROGRESS_TIMEOUT_SEC`, 30 s).
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import importlib.metadata
import itertools
import os
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ...graphs.errors import SpecError
from .segments import batches
from .transfer_engine import PROTOCOLS, RegisteredMemory, Segment, TransferError

IN_FLIGHT = 3
"""Batches to a peer at a time, each of at most `segments.MOST_SEGMENTS`."""

THREADS = 16

WHEELS = "mooncake-transfer-engine"
"""How names of its distributions begin. What moves bytes is what a wheel was built with, whatever protocol its engine is told
(mooncake-integration/transfer_engine/transfer_engine_py.cpp): over tcp the host would read addresses of a device."""
NPU_WHEEL = f"{WHEELS}-npu"

ARRIVED, LOST = 1, -1
"""What Mooncake says of a segment; anything else is of one that is being written."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5e-5, 2e-3
"""Between two looks at a segment that is being written."""

ACCEPT_S, SOON_S = 1.1, 0.01
"""The end of an engine waits, with the interpreter's lock, until its thread that accepts connections looks up: each second, until told."""


class Writes(NamedTuple):
    """A `Transfer`: a future for each batch."""

    parts: Sequence[Future[str]]

    def result(self) -> str:
        """Waits for all, whatever the first ones say."""
        return next((reason for reason in [part.result() for part in self.parts] if reason), "")


class Mooncake:
    """A `TransferEngine`.

    Args:
        host: address of this machine by which peers reach it.
        protocol: one of `PROTOCOLS`; Mooncake takes any other word for tcp.
        enter: called by each thread that writes, before it does; the thread that makes the object has.

    Raises:
        SpecError: there is no such protocol.
        TransferError: the package or a library of it is missing, or is for another transport, or the engine does not start.
    """

    def __init__(self, host: str, protocol: str = "tcp", enter: Callable[[], None] = lambda: None) -> None:
        if protocol not in PROTOCOLS:
            raise SpecError(f"the protocol of the transfer engine is {protocol!r}; legal are {', '.join(PROTOCOLS)}")
        _check_wheel(protocol)
        self._host, self._protocol = host, protocol
        self._memory: list[RegisteredMemory] = []
        self._lock = threading.Lock()
        self._peers: defaultdict[str, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(IN_FLIGHT))
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-transfer", initializer=enter)
        engine, self.session = self._start()
        # The last one writes; peers may write through all of them. There is none where the memory could not be opened again.
        self._engines = [engine]

    def register(self, memory: Sequence[RegisteredMemory]) -> None:
        """See `TransferEngine`."""
        with self._lock:
            for engine in self._engines:
                self._register(engine, memory)
            self._memory = sorted([*self._memory, *memory])

    def write(self, session: str, segments: Sequence[Segment], allowed: Callable[[], bool]) -> Writes:
        """See `TransferEngine`."""
        for segment in segments:
            self._check(segment)
        return Writes([self._pool.submit(self._write, session, batch, allowed) for batch in batches(segments)])

    def reopen(self) -> None:
        """See `TransferEngine`. Called by any thread; ends those of the old engine before it returns."""
        self._pool.submit(self._reopen).result()

    def close(self) -> None:
        """See `TransferEngine`."""
        self._pool.shutdown()
        with self._lock:
            for engine, memory in itertools.product(self._engines, self._memory):
                engine.unregister_memory(memory.address)
            self._memory.clear()

    def _write(self, session: str, batch: Sequence[Segment], allowed: Callable[[], bool]) -> str:
        with self._peers[session]:
            if not self._engines:
                return "the memory of this server is being opened again"
            engine = self._engines[-1]
            write = _failed_of_batch if self._protocol == "ascend" else _failed
            failed = write(engine, session, batch, allowed)
            if failed and allowed() and not engine.send_probe(session):
                if self._protocol != "ascend":
                    # A peer that lives and cannot be written to is not reached by this engine any more; a device has one engine.
                    self._replace(engine)
                failed = write(self._engines[-1], session, failed, allowed)
        if failed and not allowed():
            return f"{len(failed)} of {len(batch)} segments to {session} are not written any more"
        return f"{len(failed)} of {len(batch)} segments to {session} cannot be written, says Mooncake" if failed else ""

    def _reopen(self) -> None:
        with self._lock:
            old, self._engines = self._engines, []
            if self._protocol == "ascend":
                # A device has one engine.
                _end(old)
            try:
                # While the old ones keep their ports, so that no port has two meanings.
                engine, self.session = self._start()
                self._register(engine, self._memory)
                self._engines = [engine]
            finally:
                _end(old)

    def _replace(self, engine: Any) -> None:
        """Starts another engine over the same memory, unless somebody has in the meantime."""
        with self._lock:
            if self._engines[-1] is engine:
                another, _ = self._start()
                self._register(another, self._memory)
                self._engines.append(another)

    def _start(self) -> tuple[Any, str]:
        try:
            engine = importlib.import_module("mooncake.engine").TransferEngine()
        except ImportError as error:
            raise TransferError(
                f"Mooncake's transfer engine cannot be used: {error}; {_install(self._protocol)} and the system's libibverbs1"
            ) from None
        code = engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, "")
        session = f"{self._host}:{engine.get_rpc_port()}"
        # It starts with any address.
        if code := code or engine.send_probe(session):
            raise TransferError(f"Mooncake's transfer engine does not reach itself as {session} over {self._protocol}: it returned {code}")
        return engine, session

    @staticmethod
    def _register(engine: Any, memory: Sequence[RegisteredMemory]) -> None:
        if memory and (code := engine.batch_register_memory([item.address for item in memory], [item.nbytes for item in memory])):
            raise TransferError(
                f"Mooncake does not register {len(memory)} pools, {sum(m.nbytes for m in memory)} bytes: it returned {code}"
            )

    def _check(self, segment: Segment) -> None:
        place = bisect.bisect_right(self._memory, (segment.source, 1 << 64)) - 1
        if place >= 0:
            memory = self._memory[place]
            if memory.address <= segment.source and segment.source + segment.nbytes <= memory.address + memory.nbytes:
                return
        raise TransferError(f"{segment.nbytes} bytes at {segment.source:#x} are to be sent; that memory is not registered")


def _check_wheel(protocol: str) -> None:
    """Refuses wheels of another transport, or of two: the files of the one that was installed last are there."""
    names = {each.name.lower().replace("_", "-") for each in importlib.metadata.distributions()}
    wheels = sorted(name for name in names if name.startswith(WHEELS))
    if len(wheels) > 1 or (wheels and (wheels == [NPU_WHEEL]) != (protocol == "ascend")):
        raise TransferError(
            f"{' and '.join(wheels)} cannot move bytes over {protocol}; legal is {NPU_WHEEL} alone for ascend, and none of it for others: "
            f"pip uninstall -y {' '.join(wheels)}, then {_install(protocol)}"
        )


def _install(protocol: str) -> str:
    return f"pip install 'npucompile[{'kv-transfer-npu' if protocol == 'ascend' else 'kv-transfer'}]'"


def _end(engines: list[Any]) -> None:
    """Ends engines with all connections of peers; nobody else may refer to them."""
    if engines:
        _look_up_soon({engine.get_rpc_port() for engine in engines})
        time.sleep(ACCEPT_S)
        engines.clear()


def _look_up_soon(ports: Collection[int]) -> None:
    """Has the threads that accept connections at ports of this process look up every `SOON_S`."""
    directory = "/proc/self/fd"
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"{directory}/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as stream:
                    if stream.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and stream.getsockname()[1] in ports:
                        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(SOON_S * 1e6)))


def _failed(engine: Any, session: str, batch: Sequence[Segment], allowed: Callable[[], bool]) -> list[Segment]:
    """Writes segments, and returns those that have failed or were not begun, once none is in flight."""
    # A number is 0 where nothing was begun.
    started = [(engine.transfer_submit_write(session, *segment) if allowed() else 0, segment) for segment in batch]
    return [segment for number, segment in started if not (number and _arrives(engine, number))]


def _failed_of_batch(engine: Any, session: str, batch: Sequence[Segment], allowed: Callable[[], bool]) -> list[Segment]:
    """The same in one submission, of which nobody knows what failed: all or none."""
    if allowed() and not engine.batch_transfer_sync_write(session, *map(list, zip(*batch, strict=True))):
        return []
    return list(batch)


def _arrives(engine: Any, number: int) -> bool:
    """Waits until a segment has arrived or failed."""
    pause_s = FIRST_PAUSE_S
    while (status := engine.transfer_check_status(number)) not in (ARRIVED, LOST):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return bool(status == ARRIVED)

"""Records that pass between two processes of a machine, both ways and in order: sending never waits, a function takes what comes."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

log = logging.getLogger(__name__)

_CLOSED = object()


class Channel:
    """One end. Both ends are of one program, which trusts itself: records are pickled.

    Args:
        connection: of a pair of which no other process has an end.
        take: called with every record, by the thread that reads.
        ended: called once, by that thread, when the other end is closed or its process has ended.
    """

    def __init__(self, connection: Connection, take: Callable[[Any], None], ended: Callable[[], None]) -> None:
        self._connection, self._take, self._ended = connection, take, ended
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._threads = [threading.Thread(target=run, name="npucompile-channel", daemon=True) for run in (self._read, self._write)]

    def start(self) -> None:
        """Begins to read and write; records sent before are written then."""
        for thread in self._threads:
            thread.start()

    def send(self, record: Any) -> None:
        """Queues a record, which must not change any more; after the other end has gone it is dropped."""
        self._out.put(record)

    def close(self) -> None:
        """Writes what is queued, and nothing more: the other end is told that this one has ended."""
        self._out.put(_CLOSED)
        self._threads[1].join()
        # Closing alone would not do, while a thread reads; where the other end has gone it is closed.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_WR)

    def _write(self) -> None:
        while (record := self._out.get()) is not _CLOSED:
            try:
                self._connection.send_bytes(pickle.dumps(record, pickle.HIGHEST_PROTOCOL))
            except OSError:
                return

    def _read(self) -> None:
        try:
            while True:
                record = pickle.loads(self._connection.recv_bytes())
                try:
                    self._take(record)
                except Exception:
                    log.exception("%s was not handled", type(record).__name__)
        except (EOFError, OSError):
            self._out.put(_CLOSED)
            self._connection.close()
            self._ended()

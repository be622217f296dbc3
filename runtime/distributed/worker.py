"""Turns messages of rank 0 into steps of this rank, until it says stop."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Sequence

from ...graphs.types import Mesh
from ..cpu_executor import CpuExecutor
from .control_plane import RankError, plain
from .messages import Message
from .peer import SILENCE_S, Link
from .sharded_executor import OUTPUTS, told


class Worker:
    """The link to rank 0, of any other rank.

    Args:
        rank: of this process.
        stream: connected to rank 0.
        on_end: called from another thread when the job has failed: whatever this process waits for may never come.
        silence_s: how long rank 0 may be silent.
    """

    def __init__(
        self, rank: int, stream: socket.socket, *, on_end: Callable[[str], None] = lambda _: None, silence_s: float = SILENCE_S
    ) -> None:
        self.rank = rank
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopped = False
        self._link = Link(stream, self._arrived, self._lost, silence_s=silence_s)
        self._link.start()

    def serve(self, make: Callable[[], CpuExecutor], outputs: Sequence[str] = OUTPUTS) -> None:
        """Makes an executor, and runs what rank 0 says until it says stop.

        Args:
            make: called once; may raise.
            outputs: names of what rank 0 wants to know of each step, from the first rank of each dp group but its own.

        Raises:
            RankError: the job has failed, here or elsewhere.
        """
        try:
            executor = make()
            answers = _answers(executor, self.rank)
            buckets = {bucket.name: bucket for bucket in executor.buckets}
        except Exception as error:
            raise self._failed("getting ready", error) from error
        self._link.send("ready")
        while (message := self._next()).kind != "stop":
            step = message.fields
            try:
                (found,) = executor.launch(buckets[step["bucket"]], [step["inputs"]]).result()
            except Exception as error:
                raise self._failed(str(step.get("bucket")), error) from error
            if answers:
                self._link.send("outputs", step=step["step"], outputs=told(outputs, step["inputs"], found))

    def close(self) -> None:
        """Lets go of rank 0."""
        self._link.close()

    def _next(self) -> Message:
        message = self._inbox.get()
        if message.kind == "abort":
            raise RankError(str(message.fields["message"]))
        return message

    def _failed(self, what: str, error: Exception) -> RankError:
        text = f"{what}: {plain(error)}"
        self._link.send("failed", message=text)
        return RankError(f"rank {self.rank} failed: {text}")

    def _arrived(self, message: Message) -> None:
        self._stopped = self._stopped or message.kind == "stop"
        self._inbox.put(message)
        if message.kind == "abort":
            self._on_end(str(message.fields["message"]))

    def _lost(self, reason: str) -> None:
        if not self._stopped:
            text = f"rank {self.rank} lost rank 0: {reason}"
            self._inbox.put(Message("abort", {"message": text}))
            self._on_end(text)


def _answers(executor: CpuExecutor, rank: int) -> bool:
    """Whether rank 0 reads this rank's outputs: it is the first of its dp group."""
    return Mesh.parse(executor.artifact.manifest.mesh).coordinates(rank)["tp"] == 0

"""The worker loop of every rank but 0: runs the steps that rank 0 sends, until it sends "stop"."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Sequence

from ...graphs.types import Mesh
from ..cpu_executor import CpuExecutor
from .control_plane import RankError, error_text
from .messages import RankMessage
from .peer import SILENCE_S, Peer
from .sharded_executor import OUTPUTS, select_outputs


class Worker:
    """The connection to rank 0, of any other rank.

    Args:
        rank: of this process.
        stream: connected to rank 0.
        on_end: called from another thread when the ranks have failed: whatever this process waits for may never come.
        silence_s: how long rank 0 may be silent.
    """

    def __init__(
        self, rank: int, stream: socket.socket, *, on_end: Callable[[str], None] = lambda _: None, silence_s: float = SILENCE_S
    ) -> None:
        self.rank = rank
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        self._stopped = False
        self._rank_0 = Peer(stream, self._received, self._lost, silence_s=silence_s)
        self._rank_0.start()

    def serve(self, load_executor: Callable[[], CpuExecutor], outputs: Sequence[str] = OUTPUTS) -> None:
        """Loads an executor and runs the steps of rank 0 until it sends "stop".

        Args:
            load_executor: called once; may raise.
            outputs: names of the outputs to return of each step, by the first rank of each dp group but rank 0's.

        Raises:
            RankError: a rank failed, this one or another.
        """
        try:
            executor = load_executor()
            answers = _is_first_of_group(executor, self.rank)
            buckets = {bucket.name: bucket for bucket in executor.buckets}
        except Exception as error:
            raise self._fail("getting ready", error) from error
        self._rank_0.send("ready")
        while (message := self._next()).kind != "stop":
            step = message.fields
            try:
                (arrays,) = executor.launch(buckets[step["bucket"]], [step["inputs"]]).result()
            except Exception as error:
                raise self._fail(str(step.get("bucket")), error) from error
            if answers:
                self._rank_0.send("outputs", step=step["step"], outputs=select_outputs(outputs, step["inputs"], arrays))

    def close(self) -> None:
        """Closes the connection to rank 0."""
        self._rank_0.close()

    def _next(self) -> RankMessage:
        message = self._inbox.get()
        if message.kind == "abort":
            raise RankError(str(message.fields["message"]))
        return message

    def _fail(self, during: str, error: Exception) -> RankError:
        text = f"{during}: {error_text(error)}"
        self._rank_0.send("failed", message=text)
        return RankError(f"rank {self.rank} failed: {text}")

    def _received(self, message: RankMessage) -> None:
        self._stopped = self._stopped or message.kind == "stop"
        self._inbox.put(message)
        if message.kind == "abort":
            self._on_end(str(message.fields["message"]))

    def _lost(self, reason: str) -> None:
        if not self._stopped:
            text = f"rank {self.rank} lost rank 0: {reason}"
            self._inbox.put(RankMessage("abort", {"message": text}))
            self._on_end(text)


def _is_first_of_group(executor: CpuExecutor, rank: int) -> bool:
    """Whether this is the rank of its dp group whose outputs rank 0 reads."""
    return Mesh.parse(executor.artifact.manifest.mesh).coordinates(rank)["tp"] == 0

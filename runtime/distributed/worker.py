"""The worker loop of every rank but 0: launches the steps that rank 0 sends, until it sends "stop".

Where the executor allows a step to be launched before the one before it has ended, a thread of its own waits for results and answers.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...graphs.types import Mesh
from ..executor import Executor, Pending
from .control_plane import RankError, error_text
from .messages import RankMessage
from .peer import SILENCE_S, RankPeer
from .rank_transfers import KINDS, Later, RankTransfers
from .sharded_executor import OUTPUTS, select_outputs


class Worker:
    """The connection to rank 0, of any other rank.

    Args:
        rank: of this process.
        mesh: of all ranks.
        stream: connected to rank 0.
        on_end: called from another thread when the ranks have failed: whatever this process waits for may never come.
        silence_s: how long rank 0 may be silent.
        node: which machine this is, behind the number of this rank in messages; "" where there is one machine.
        rank_0: rank 0 in messages.
    """

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        stream: socket.socket,
        *,
        on_end: Callable[[str], None] = lambda _: None,
        silence_s: float = SILENCE_S,
        node: str = "",
        rank_0: str = "rank 0",
    ) -> None:
        self.rank, self._mesh, self._stream = rank, mesh, stream
        self._node, self._rank_0_name = node, rank_0
        # The ranks of a tp group compute the same outputs; rank 0 reads those of the first.
        self._answers = mesh.coordinates(rank)["tp"] == 0
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        self._stopped = False
        self._rank_0 = RankPeer(stream, self._received, self._lost, silence_s=silence_s)
        self._rank_0.start()

    def serve(self, load_executor: Callable[[], Executor], outputs: Sequence[str] = OUTPUTS) -> None:
        """Loads an executor and runs the steps of rank 0 until it sends "stop".

        Args:
            load_executor: called once; may raise.
            outputs: names of the outputs to return of each step, by the first rank of each dp group but rank 0's.

        Raises:
            RankError: a rank failed, this one or another.
        """
        try:
            executor = load_executor()
            buckets = {bucket.name: bucket for bucket in executor.buckets}
        except Exception as error:
            raise self._fail("getting ready", error) from error
        self._rank_0.send("ready", missing={bucket.name: reason for bucket, reason in executor.missing.items()})
        with self._transfers(executor) as transfers, self._finisher(executor.run_ahead) as later:
            while (message := self._next()).kind != "stop":
                step = message.fields
                if message.kind in KINDS:
                    transfers.received(message.kind, step, later)
                    continue
                try:
                    if message.kind == "start":
                        executor.start_decoding(0, **step)
                        continue
                    if message.kind == "landed":
                        executor.landed(0, **step)
                        continue
                    pending = executor.launch(buckets[step["bucket"]], [step["inputs"]])
                except Exception as error:
                    raise self._fail(str(step.get("bucket", message.kind)), error) from error
                later(functools.partial(self._finish, step, pending, outputs))

    def close(self) -> None:
        """Closes the connection to rank 0."""
        self._rank_0.close()

    @contextlib.contextmanager
    def _finisher(self, run_ahead: int) -> Iterator[Later]:
        """What finishes launched steps, in order: at once, or by a thread that is done with all of them on leaving."""
        if not run_ahead:
            yield lambda finish: finish()
            return
        launched: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def run() -> None:
            while (finish := launched.get()) is not None:
                try:
                    finish()
                except RankError as error:
                    self._inbox.put(RankMessage("abort", {"message": str(error)}))
                    return

        thread = threading.Thread(target=run, name="npucompile-results", daemon=True)
        thread.start()
        try:
            yield launched.put
        finally:
            launched.put(None)
        thread.join()

    @contextlib.contextmanager
    def _transfers(self, executor: Executor) -> Iterator[RankTransfers]:
        def answer(number: int, reason: str, **fields: Any) -> None:
            self._rank_0.send("answer", number=number, reason=reason, **fields)

        with contextlib.closing(RankTransfers(executor, self.rank, self._mesh, self._stream, answer)) as transfers:
            yield transfers

    def _finish(self, step: Mapping[str, Any], pending: Pending, outputs: Sequence[str]) -> None:
        """Waits for a step, and sends its outputs where rank 0 reads them."""
        try:
            (arrays,) = pending.result()
        except Exception as error:
            raise self._fail(str(step.get("bucket")), error) from error
        if self._answers:
            self._rank_0.send("outputs", step=step["step"], outputs=select_outputs(outputs, step["inputs"], arrays))

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
            text = f"rank {self.rank}{self._node} lost {self._rank_0_name}: {reason}{' [node_lost]' if self._node else ''}"
            self._inbox.put(RankMessage("abort", {"message": text}))
            self._on_end(text)

"""Turns the links of rank 0 to all other ranks into one job: what they answer, and the first reason why it cannot go on.

One rank that ends brings others down with it, so what is told first need not be the cause: for a moment after the first bad news
more is gathered, and a rank that ended without a word is blamed before one that reports an error, which may be that it lost the other.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...graphs.errors import NpucompileError
from ...graphs.types import Mesh
from .messages import Message, encode
from .peer import BEAT_S, SILENCE_S, Link

log = logging.getLogger(__name__)

SETTLE_S = 0.4
STILL_S = 5 * BEAT_S


class RankError(NpucompileError):
    """Raised when the ranks of a job do not fit each other, or one of them is lost; no step can run after that."""


class News(NamedTuple):
    """Something that ends the job.

    Attributes:
        gone: the rank ended, or fell silent, without saying why.
    """

    rank: int
    text: str
    gone: bool


class Job:
    """Rank 0's end of every link. Any thread may call it.

    Args:
        mesh: of all ranks.
        peers: a connected socket for every rank but 0.
        how_it_ended: for a rank that is gone, what its process left ("killed by SIGKILL"); None when that is not known.
        on_failure: called once, from a thread of the job, with what ended it.
        silence_s: how long a rank may be silent.
    """

    def __init__(
        self,
        mesh: Mesh,
        peers: Mapping[int, socket.socket],
        *,
        how_it_ended: Callable[[int], str | None] = lambda _: None,
        on_failure: Callable[[RankError], None] = lambda _: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.mesh = mesh
        self.failure: RankError | None = None
        self._how_it_ended, self._on_failure = how_it_ended, on_failure
        self._answers: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()
        self._news: list[News] = []
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._closing = False
        self._links = {rank: self._link(rank, stream, silence_s) for rank, stream in peers.items()}
        for link in self._links.values():
            link.start()

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks but 0."""
        return tuple(self._links)

    def send(self, rank: int, frame: bytes) -> None:
        """Sends a frame of `wire.encode` to one rank."""
        self._links[rank].send_frame(frame)

    def gather(self, ranks: Sequence[int], kind: str, timeout_s: float | None) -> dict[int, Message]:
        """Waits for one message of this kind from each of these ranks.

        Raises:
            RankError: when the job fails meanwhile, a rank says something else, or the time is over.
        """
        found: dict[int, Message] = {}
        while missing := [rank for rank in ranks if rank not in found]:
            self.check()
            try:
                answer = self._answers.get(timeout=timeout_s)
            except queue.Empty:
                late = ", ".join(map(str, missing))
                self.fail(missing[0], f"no {kind} from rank {late} within {timeout_s:g} s", gone=False)
                answer = None
            if answer is None:
                raise self.wait_failure()
            rank, message = answer
            if message.kind != kind or rank in found or rank not in ranks:
                self.fail(rank, f"rank {rank} sent {message.kind!r} where {kind!r} of ranks {list(ranks)} was due", gone=False)
                raise self.wait_failure()
            found[rank] = message
        return found

    def fail(self, rank: int, text: str, *, gone: bool) -> None:
        """Records what ends the job; the first call starts the end."""
        with self._lock:
            if self._closing:
                return
            self._news.append(News(rank, text, gone))
            first = len(self._news) == 1
        if first:
            threading.Thread(target=self._conclude, name="npucompile-job", daemon=True).start()

    def failing(self, settle_s: float = 2 * SETTLE_S) -> RankError | None:
        """The failure, if there is one or news of one comes within this time."""
        self._failed.wait(settle_s)
        return self.failure

    def wait_failure(self) -> RankError:
        """The failure that was just recorded, once it is known whose it is."""
        self._failed.wait()
        assert self.failure is not None
        return self.failure

    def check(self) -> None:
        """Returns while the job can go on.

        Raises:
            RankError: what ended it.
        """
        if self._news:
            raise self.wait_failure()

    def close(self) -> None:
        """Tells all ranks to end, and lets go of them."""
        with self._lock:
            self._closing = True
        for link in self._links.values():
            link.send("stop")
        for link in self._links.values():
            link.close()

    def _link(self, rank: int, stream: socket.socket, silence_s: float) -> Link:
        def lost(reason: str) -> None:
            self.fail(rank, reason, gone=True)

        def arrived(message: Message) -> None:
            if message.kind == "failed":
                self.fail(rank, str(message.fields.get("message")), gone=False)
            else:
                self._answers.put((rank, message))

        return Link(stream, arrived, lost, silence_s=silence_s)

    def _conclude(self) -> None:
        threading.Event().wait(SETTLE_S)
        with self._lock:
            news = list(self._news)
        said = {one.rank for one in news if not one.gone}
        # A rank that stands still closes nothing: the others only tell that they waited for too long.
        still = [
            News(rank, f"it has been silent for {link.silent_s:.0f} s", True)
            for rank, link in self._links.items()
            if rank not in said and link.silent_s > STILL_S
        ]
        cause = next((one for one in (*news, *still) if one.gone and one.rank not in said), news[0])
        self.failure = RankError(self._told(cause))
        abort = encode("abort", message=str(self.failure))
        for rank, link in self._links.items():
            if rank != cause.rank:
                link.send_frame(abort)
        self._failed.set()
        self._answers.put(None)
        try:
            self._on_failure(self.failure)
        except Exception:
            log.exception("the end of the job could not be told")

    def _told(self, cause: News) -> str:
        if not cause.gone:
            return f"rank {cause.rank} of mesh {self.mesh} failed: {cause.text}; all ranks end"
        how = self._how_it_ended(cause.rank)
        return f"rank {cause.rank} of mesh {self.mesh} {f'died: {how}' if how else f'was lost: {cause.text}'}; all ranks end"


def plain(error: BaseException) -> str:
    """An error as one rank tells it to another."""
    return str(error) if isinstance(error, NpucompileError) else f"{type(error).__name__}: {error}"

"""Rank 0's control plane: messages to and from all other ranks, and the failure that ends them.

One rank that ends brings others down with it, so the first failure reported need not be the cause. For a moment after the first
report more are gathered; a rank that ended without a report is blamed before one that reports an error, because that error may be the
loss of the other rank.
"""

from __future__ import annotations

import itertools
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ...graphs.errors import NpucompileError
from ...graphs.types import Mesh
from ..executor import ExecutorError
from .messages import RankMessage, encode
from .peer import HEARTBEAT_S, SILENCE_S, RankPeer

log = logging.getLogger(__name__)

Answered = Callable[[Mapping[str, Any]], None]
"""Called with the fields of an answer; `reason` is empty where the rank has done what it was asked, and else says why not."""

SETTLE_S = 0.4
STALLED_S = 5 * HEARTBEAT_S
CODE = re.compile(r"\[([a-z_]+)\]$")


class RankError(ExecutorError):
    """Raised when the ranks do not match, or one of them is lost; no step can run after that.

    Args:
        message: both sides of the disagreement.
        code: a short name for programs, which is printed behind the message in brackets.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(f"{message} [{code}]" if code else message)

    @property
    def code(self) -> str:
        """The short name; "" where there is none. It crosses machines as part of the text."""
        named = CODE.search(str(self))
        return named.group(1) if named else ""


class FailureReport(NamedTuple):
    """A reason why the ranks cannot continue.

    Attributes:
        lost: the rank ended, or fell silent, without a report of its own.
    """

    rank: int
    text: str
    lost: bool


class _Answers:
    """What ranks say of their steps, for the one thread that gathers it."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[int, RankMessage] | None] = queue.SimpleQueue()
        # Answers of steps that nobody has asked for yet.
        self.early: list[tuple[int, RankMessage]] = []


class ControlPlane:
    """Rank 0's connections to all other ranks. Any thread may call it.

    Args:
        mesh: of all ranks.
        connections: a connected socket for every rank but 0.
        exit_reason: how the process of a lost rank ended ("killed by SIGKILL"); None if that is not known.
        on_failure: called once, from a thread of the control plane, with the failure.
        silence_s: how long a rank may be silent.
        nodes: which machine a rank runs on, as words; empty where all are on one.
    """

    def __init__(
        self,
        mesh: Mesh,
        connections: Mapping[int, socket.socket],
        *,
        exit_reason: Callable[[int], str | None] = lambda _: None,
        on_failure: Callable[[RankError], None] = lambda _: None,
        silence_s: float = SILENCE_S,
        nodes: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.mesh = mesh
        self._nodes = nodes
        self.failure: RankError | None = None
        self._exit_reason, self._on_failure = exit_reason, on_failure
        # By rank.
        self._answers: Mapping[int, _Answers] = dict.fromkeys(connections, _Answers())
        self._reports: list[FailureReport] = []
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._closing = False
        self._asked: dict[int, tuple[int, Answered]] = {}
        self._numbers = itertools.count(1)
        # Ranks that will answer nothing any more, with the reason.
        self._gone: dict[int, str] = {}
        self._peers = {rank: self._peer(rank, stream, silence_s) for rank, stream in connections.items()}
        for peer in self._peers.values():
            peer.start()

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks but 0."""
        return tuple(self._peers)

    def send(self, rank: int, frame: bytes) -> None:
        """Sends a frame of `messages.encode` to one rank."""
        self._peers[rank].send_frame(frame)

    def ask(self, rank: int, kind: str, answered: Answered, **fields: Any) -> None:
        """Sends a message that a rank answers when it has done it, beside the steps.

        Args:
            answered: called once, by a thread of the control plane or this one: with the answer, or when the rank is lost. While a rank
                lives it may be doing what it was asked, so the failure of another one is no answer.
        """
        number = next(self._numbers)
        with self._lock:
            reason = self._gone.get(rank)
            if reason is None:
                self._asked[number] = rank, answered
        if reason is None:
            self._peers[rank].send(kind, number=number, **fields)
        else:
            answered({"reason": reason})

    def gather(self, ranks: Sequence[int], kind: str, timeout_s: float | None, step: int = 0) -> dict[int, RankMessage]:
        """Waits for one message of this kind from each of these ranks; called by one thread, or after `split` by one for each group.

        Args:
            ranks: of one group.
            step: number of the step that the messages answer; answers of later steps are kept for their own call, those of earlier ones
                dropped. 0 for other messages.

        Raises:
            RankError: when the ranks fail meanwhile, a rank sends another message, or the time is over.
        """
        messages: dict[int, RankMessage] = {}
        answers = self._answers[ranks[0]] if ranks else _Answers()
        for early in [early for early in answers.early if early[1].fields.get("step") == step]:
            answers.early.remove(early)
            messages[early[0]] = early[1]
        while missing := [rank for rank in ranks if rank not in messages]:
            self.check()
            began_s = time.monotonic()
            try:
                answer = answers.queue.get(timeout=timeout_s)
            except queue.Empty:
                if timeout_s is not None and time.monotonic() - began_s > 2 * timeout_s:
                    # This process stood still, and has yet to read what was answered.
                    continue
                late = ", ".join(map(str, missing))
                self.fail(missing[0], f"no {kind} from rank {late} within {timeout_s:g} s", lost=False)
                answer = None
            if answer is None:
                raise self.concluded_failure()
            rank, message = answer
            if step and message.kind == kind and (number := message.fields.get("step", 0)) != step:
                # Nobody will ask for a step before this one any more.
                answers.early += [answer] if number > step else []
                continue
            if message.kind != kind or rank in messages or rank not in ranks:
                self.fail(rank, f"rank {rank} sent {message.kind!r} where {kind!r} of ranks {list(ranks)} was due", lost=False)
                raise self.concluded_failure()
            messages[rank] = message
        return messages

    def split(self, groups: Mapping[int, int]) -> None:
        """Has the steps of groups of ranks gathered apart; to be called while no rank has anything to say of one.

        Args:
            groups: the group of each rank.
        """
        by_group = {group: _Answers() for group in groups.values()}
        self._answers = {rank: by_group[groups[rank]] for rank in self._answers}

    def fail(self, rank: int, text: str, *, lost: bool) -> None:
        """Reports a failure; the first report starts the shutdown."""
        with self._lock:
            if self._closing:
                return
            self._reports.append(FailureReport(rank, text, lost))
            first = len(self._reports) == 1
        if first:
            threading.Thread(target=self._conclude, name="npucompile-control-plane", daemon=True).start()

    def wait_for_failure(self, timeout_s: float = 2 * SETTLE_S) -> RankError | None:
        """The failure, if there is one or one is concluded within this time."""
        self._failed.wait(timeout_s)
        return self.failure

    def concluded_failure(self) -> RankError:
        """The failure that was just reported, once its cause is concluded."""
        self._failed.wait()
        assert self.failure is not None
        return self.failure

    def check(self) -> None:
        """Returns while no failure is reported.

        Raises:
            RankError: the failure.
        """
        if self._reports:
            raise self.concluded_failure()

    def close(self) -> None:
        """Sends "stop" to all ranks and closes the connections."""
        with self._lock:
            self._closing = True
        for peer in self._peers.values():
            peer.send("stop")
        for rank, peer in self._peers.items():
            peer.close()
            self._end_asked(rank, f"rank {rank} was stopped")

    def _peer(self, rank: int, stream: socket.socket, silence_s: float) -> RankPeer:
        def lost(reason: str) -> None:
            self.fail(rank, reason, lost=True)
            self._end_asked(rank, f"rank {rank} was lost: {reason}")

        def received(message: RankMessage) -> None:
            if message.kind == "failed":
                self.fail(rank, str(message.fields.get("message")), lost=False)
            elif message.kind == "answer":
                self._answered(message.fields)
            else:
                self._answers[rank].queue.put((rank, message))

        return RankPeer(stream, received, lost, silence_s=silence_s)

    def _answered(self, fields: Mapping[str, Any]) -> None:
        with self._lock:
            _, answered = self._asked.pop(int(fields["number"]), (0, None))
        if answered is not None:
            answered(fields)

    def _end_asked(self, rank: int, reason: str) -> None:
        """Answers for a rank that does so no more."""
        with self._lock:
            self._gone.setdefault(rank, reason)
            ended = [number for number, (asked, _) in self._asked.items() if asked == rank]
            waiting = [self._asked.pop(number)[1] for number in ended]
        for answered in waiting:
            answered({"reason": self._gone[rank]})

    def _conclude(self) -> None:
        threading.Event().wait(SETTLE_S)
        with self._lock:
            reports = list(self._reports)
        reported = {report.rank for report in reports if not report.lost}
        # A stalled rank closes nothing: the others only report that they waited too long.
        stalled = [
            FailureReport(rank, f"it has been silent for {peer.silent_s:.0f} s", True)
            for rank, peer in self._peers.items()
            if rank not in reported and peer.silent_s > STALLED_S
        ]
        cause = next((report for report in (*reports, *stalled) if report.lost and report.rank not in reported), reports[0])
        self.failure = self._described(cause, {report.rank for report in (*reports, *stalled) if report.lost} - reported)
        abort = encode("abort", message=str(self.failure))
        for rank, peer in self._peers.items():
            if rank != cause.rank:
                peer.send_frame(abort)
        self._failed.set()
        for answers in set(self._answers.values()):
            answers.queue.put(None)
        try:
            self._on_failure(self.failure)
        except Exception:
            log.exception("the callback for the failure raised")

    def _described(self, cause: FailureReport, lost: set[int]) -> RankError:
        """The failure, and the machine that it happened on; a machine all of whose ranks are lost is lost itself."""
        node = self._nodes.get(cause.rank, "")
        who = f"rank {cause.rank} of mesh {self.mesh}{f' on {node}' if node else ''}"
        if not cause.lost:
            return RankError(f"{who} failed: {cause.text}; all ranks end", "rank_failed" if node else "")
        reason = self._exit_reason(cause.rank)
        if reason:
            return RankError(f"{who} died: {reason}; all ranks end")
        on_node = {rank for rank, other in self._nodes.items() if other == node}
        if node and on_node <= lost:
            ranks = ", ".join(map(str, sorted(on_node)))
            return RankError(f"{node} with rank {ranks} of mesh {self.mesh} was lost: {cause.text}; all ranks end", "node_lost")
        return RankError(f"{who} was lost: {cause.text}; all ranks end", "rank_lost" if node else "")


def error_text(error: BaseException) -> str:
    """An error as one rank reports it to another."""
    return str(error) if isinstance(error, NpucompileError) else f"{type(error).__name__}: {error}"

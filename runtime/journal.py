"""The journal of an engine: its inputs and decisions in their order, so that a run can be repeated.

The scheduler is a pure function of its state, and a request's random numbers of its seed. So the requests and cancels, and the call of
`Engine.step` that handled each, decide every step; the journal has these, and each step with its tokens to compare with. Clocks decide
nothing but which deadlines have passed: where one has, the journal has the time, and when the requests with deadlines were submitted. And
where the policy goes by the times that steps take, those are in it, too.

A file is the format's number in msgpack, and then records: a mapping of facts about the run, and one list an entry, which begins with a
word of `Entry`, each as bytes of msgpack behind their CRC-32. Each is written as it happens; a process that dies leaves a file that can be
read up to its last whole entry, and one that ends in order writes `END`.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import numpy.typing as npt

from ..graphs.errors import SpecError
from .constraint import Bitmask, Constraint
from .picture_spans import PictureInput, Span
from .request import Flush, Landed, Request, Sampling
from .scheduler.advance import GroupResults
from .scheduler.request_state import RequestState
from .scheduler.scheduled_step import ScheduledStep

log = logging.getLogger(__name__)

FORMAT = 8
STEP, PICTURE, SUBMIT, CANCEL, FLUSH, LANDED, EXPIRED = "step", "picture", "submit", "cancel", "flush", "landed", "expired"
HELD, MASKS, DEAD_END = "held", "masks", "dead end"
LAUNCH, RESULT, TOOK, FAILURE, END = "launch", "result", "took", "failure", "end"
"""First words of entries: a call of `Engine.step`; the key, shape and patches of a picture of a request that follows; a request, with the
time of its submission if it has a deadline, the arrival of one to cancel, the order to forget all prefixes, and the arrival of one whose
pages a handover has filled, handled by it; the time and the requests whose deadlines have passed; the arrivals of requests that sit it
out, since their bitmasks are not filled; the bitmasks of constrained requests in the step that it launches; a request that cannot go on
under its constraint; a step that is launched; the tokens of a step, or which segments of an encode step are finite; how many ms it took; a
step that failed; the end of the run."""

MOST_PICTURE_BYTES = 1 << 30
"""Of patches in a journal. Those of later pictures are left out, and what has them cannot be repeated."""

Entry = list[Any]


class Journal:
    """Turns what an engine tells it into entries.

    Args:
        write: takes each entry.
    """

    def __init__(self, write: Callable[[Entry], None]) -> None:
        self._write = write
        self._step_is_new = True
        self._pictures, self._picture_bytes_left = set[tuple[bytes, bytes]](), MOST_PICTURE_BYTES

    def received(self, messages: Sequence[RequestState | int | Flush | Landed]) -> None:
        """A call of `Engine.step` begins, with these new requests, arrivals of requests to cancel, orders to forget prefixes, and
        requests whose pages a handover has filled, or will not fill.

        A call that does nothing is not written.
        """
        self._step_is_new = True
        for message in messages:
            if isinstance(message, RequestState):
                timed = message.deadline_ms < math.inf
                for picture in message.request.pictures:
                    self._picture(picture)
                self._add(SUBMIT, as_plain(message.request), *([message.submitted_ms] if timed else []))
            elif isinstance(message, Flush):
                self._add(FLUSH)
            elif isinstance(message, Landed):
                self._add(LANDED, *message)
            else:
                self._add(CANCEL, message)

    def expired(self, now_ms: float, request_ids: Sequence[str]) -> None:
        """Requests whose deadlines have passed are ended."""
        self._add(EXPIRED, now_ms, list(request_ids))

    def held(self, arrivals: Sequence[int]) -> None:
        """Requests of these arrivals sit out the next decode step: their bitmasks are not filled."""
        if arrivals:
            self._add(HELD, list(arrivals))

    def launched(self, step: ScheduledStep, bitmasks: Mapping[str, Bitmask]) -> None:
        """A step is about to be launched, with these bitmasks by request id."""
        constrained = {row.request.id for row in step.rows_with_rules if row.request.constraint is not None}
        masks = {name: bitmask.tobytes() for name, bitmask in bitmasks.items() if name in constrained}
        if masks:
            self._add(MASKS, masks)
        rows = [[[row.request.id, row.start, row.num_tokens] for row in part.rows] for part in step.groups]
        self._add(LAUNCH, step.bucket.name, rows, [list(part.preempted) for part in step.groups], *_segments(step))

    def dead_end(self, request_id: str) -> None:
        """A request is ended because it cannot go on under its constraint."""
        self._add(DEAD_END, request_id)

    def finished(self, step: ScheduledStep, results: Sequence[GroupResults], finite: Sequence[Sequence[bool]] = ()) -> None:
        """The results of the oldest step in flight are known; of an encode step of each segment whether it is finite."""
        tokens = [[None if row is None else list(row.token_ids) for row in rows] for rows in results or [()] * len(step.groups)]
        self._add(RESULT, step.bucket.name, tokens, *([[list(own) for own in finite]] if finite else []))

    def took(self, ms: float) -> None:
        """The step that finished took so long, and the policy goes by that."""
        self._add(TOOK, ms)

    def failed(self, step: ScheduledStep, message: str) -> None:
        """The oldest step in flight failed."""
        self._add(FAILURE, step.bucket.name, message)

    def _picture(self, picture: PictureInput) -> None:
        """A picture's patches, once; none where the journal has as many as it may."""
        key, patches = _picture_key(picture), picture.patches
        if key in self._pictures or patches.nbytes > self._picture_bytes_left:
            return
        self._pictures.add(key)
        self._picture_bytes_left -= patches.nbytes
        self._add(PICTURE, list(key), list(patches.shape), patches.tobytes())

    def _add(self, *entry: Any) -> None:
        if self._step_is_new:
            self._step_is_new = False
            self._write([STEP])
        self._write(list(entry))


class NoJournal(Journal):
    """Writes nothing, at no cost."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)

    def received(self, *_: Any) -> None: ...
    def expired(self, *_: Any) -> None: ...
    def held(self, *_: Any) -> None: ...
    def launched(self, *_: Any) -> None: ...
    def dead_end(self, *_: Any) -> None: ...
    def finished(self, *_: Any) -> None: ...
    def took(self, *_: Any) -> None: ...
    def failed(self, *_: Any) -> None: ...


class JournalFile:
    """A journal's file, open for writing, and its user's alone to read: it has prompts. A write that fails ends the record, and not the
    engine.

    Args:
        file: is replaced.
        facts: about the run: whatever `msgpack` can hold.
    """

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        self._packer = msgpack.Packer()
        self._file: BinaryIO = open(file, "wb", buffering=0, opener=_private)  # noqa: SIM115 - closed by `close`
        try:
            self._file.write(self._packer.pack(FORMAT) + self._framed(dict(facts)))
        except OSError:
            self._file.close()
            raise

    def write(self, entry: Entry) -> None:
        """Writes an entry; it is in the file when this returns."""
        if self._file.closed:
            return
        try:
            self._file.write(self._framed(entry))
        except OSError as error:
            log.error("%s cannot be written; the record ends here: %s", self._file.name, error)
            self._file.close()

    def close(self) -> None:
        """Closes the file, at the end of the run."""
        self.write([END])
        self._file.close()

    def _framed(self, value: Any) -> bytes:
        data = self._packer.pack(value)
        return bytes(self._packer.pack([zlib.crc32(data), data]))


def _private(path: str, flags: int) -> int:
    """Opens a file that only its user may read, also where there was one that others might."""
    number = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(number).st_mode):
        os.fchmod(number, 0o600)
    return number


def read(file: Path) -> tuple[dict[str, Any], Iterator[Entry]]:
    """The facts and the entries of a journal; an entry at the end that is not whole is left out.

    Raises:
        SpecError: the file is no journal of this format, or, where an entry is taken, that is not what was written.
    """
    records = _records(file)
    facts = next(records, None)
    if not isinstance(facts, dict):
        raise SpecError(f"{file} has no facts of a run; legal is a journal of `npucompile serve --record`")
    return facts, records


def _records(file: Path) -> Iterator[Any]:
    """What a journal has behind the number of its format, up to its end or to a record that is not whole.

    Raises:
        SpecError: as `read`.
    """
    with file.open("rb") as source:
        items = msgpack.Unpacker(source, max_buffer_size=0)
        number = _next(items, file, 0)
        if number != FORMAT:
            raise SpecError(f"{file} begins with {number!r}; legal is a journal of `npucompile serve --record`, which begins with {FORMAT}")
        for place in itertools.count(1):
            if (record := _next(items, file, place)) is None:
                return
            digest, data = record if isinstance(record, list) and len(record) == 2 else (None, b"")
            if not isinstance(data, bytes) or zlib.crc32(data) != digest:
                raise _damaged(file, place)
            yield msgpack.unpackb(data)


def _next(items: msgpack.Unpacker, file: Path, place: int) -> Any:
    try:
        return next(items, None)
    except (ValueError, msgpack.UnpackException):
        raise _damaged(file, place) from None


def _damaged(file: Path, place: int) -> SpecError:
    what = f"record {place} of {file}" if place else f"the beginning of {file}"
    return SpecError(f"{what} is not what was written; legal is a journal of `npucompile serve --record` as it left it")


def as_plain(request: Request) -> dict[str, Any]:
    """A request as plain data; of its constraint only whether it has one, since the bitmasks of its steps are in the journal, and of its
    pictures not their patches."""
    plain = {field.name: getattr(request, field.name) for field in fields(request)}
    pictures = [[p.span.first, p.span.rows, p.span.columns, *p.grid, list(_picture_key(p))] for p in request.pictures]
    changed = {"sampling": asdict(request.sampling), "stop_token_ids": sorted(request.stop_token_ids)}
    return plain | changed | {"constraint": request.constraint is not None, "pictures": pictures}


def _picture_key(picture: PictureInput) -> tuple[bytes, bytes]:
    """What is equal for pictures of equal patches: a digest of the patches beside that of what is made of them."""
    return picture.digest, hashlib.sha256(picture.patches.tobytes()).digest()


def _segments(step: ScheduledStep) -> list[Any]:
    """Of an encode step, which pictures of whom it encodes: ids, and digests."""
    if not any(part.segments for part in step.groups):
        return []
    return [[[[item.row.request.id, item.picture.digest] for item in part.segments] for part in step.groups]]


Patches = Mapping[tuple[bytes, bytes], npt.NDArray[np.uint8]]
"""Patches of the pictures of a journal, by the key of its entries."""


def as_picture(shape: Sequence[int], patches: bytes) -> npt.NDArray[np.uint8]:
    """The patches of an entry of `PICTURE`."""
    return np.frombuffer(patches, np.uint8).reshape(shape)


def as_request(plain: Mapping[str, Any], constraint: Constraint | None = None, patches: Patches | None = None) -> Request:
    """The request of `as_plain`, with this constraint if it had one.

    Raises:
        SpecError: there are no patches of one of its pictures.
    """
    pictures = []
    for first, rows, columns, height, width, key in plain["pictures"]:
        own = (patches or {}).get(tuple(key))
        if own is None:
            kept = f"a journal keeps those of {MOST_PICTURE_BYTES} bytes"
            raise SpecError(f"request {plain['id']!r} has picture {key[0].hex()[:16]}, of which the journal has no patches; {kept}")
        pictures.append(PictureInput(Span(first, rows, columns), own, (height, width), key[0]))
    changed: dict[str, Any] = {"prompt": tuple(plain["prompt"]), "stop_token_ids": frozenset(plain["stop_token_ids"])}
    sampling = Sampling(**{name: _tuples(value) for name, value in plain["sampling"].items()})
    changed |= {"constraint": constraint if plain["constraint"] else None, "pictures": tuple(pictures)}
    return Request(**{**plain, **changed, "sampling": sampling})


def _tuples(value: Any) -> Any:
    """Lists, which is what msgpack makes of them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

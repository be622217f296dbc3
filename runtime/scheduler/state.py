"""The scheduler's records of the live requests of all dp groups, which its pure functions turn into others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from operator import attrgetter

from ...graphs.types import Limits
from .draft_widths import NOTHING, Acceptance
from .picture_ledger import PictureLedger
from .policy import Policy
from .prefix_index import PrefixIndex
from .request_state import RequestState
from .step_times import UNMEASURED, StepTimes
from .turns import Turns

_num_pages: Callable[[RequestState], int] = attrgetter("num_pages")


@dataclass(frozen=True, slots=True)
class GroupState:
    """The live requests of one dp group.

    Attributes:
        waiting: oldest first.
        running: most urgent first (`turns.rank`), which is oldest first among equals.
        turns: None while all requests are of one priority and tenant, and order of arrival decides.
        prefixes: what is in the group's caches; None where prefixes are not kept. It is no record: it changes when a step's pages and
            slots are given out, when its results are known, and when a request ends, and is read in between.
        pictures: who has which rows of pictures, where the graphs take any; no record either.
    """

    waiting: tuple[RequestState, ...] = ()
    running: tuple[RequestState, ...] = ()
    turns: Turns | None = None
    prefixes: PrefixIndex | None = None
    pictures: PictureLedger | None = None

    @property
    def num_requests(self) -> int:
        """Live requests."""
        return len(self.waiting) + len(self.running)

    @property
    def used_pages(self) -> int:
        """Pages that running requests hold; one that several share counts once."""
        return sum(map(_num_pages, self.running)) - (self.prefixes.num_shared if self.prefixes else 0)

    def free_pages(self, limits: Limits) -> int:
        """Pages that no running request holds, without the null page."""
        return limits.num_pages - 1 - self.used_pages

    def free_slots(self, limits: Limits) -> int:
        """State slots that no running request holds, and no step to come writes or reads, without the null slot."""
        in_use = self.prefixes.num_held if self.prefixes else 0
        return limits.num_slots - 1 - len(self.running) * limits.slots_per_request - in_use

    def cached_tokens(self, request: RequestState) -> int:
        """How many tokens of a waiting request are known to be in the caches."""
        return self.prefixes.match(request).num_tokens(self.prefixes.page_size) if self.prefixes else 0

    def known_tokens(self, request: RequestState) -> int:
        """Those, and those behind them in whose places rows of pictures are there or on their way."""
        cached = self.cached_tokens(request)
        return cached + (self.pictures.known_rows(request.request, cached) if self.pictures else 0)

    def without(self, arrivals: Collection[int]) -> GroupState:
        """The group without these requests."""
        if not arrivals:
            return self
        waiting, running = (tuple(r for r in requests if r.arrival not in arrivals) for requests in (self.waiting, self.running))
        return replace(self, waiting=waiting, running=running)

    def decodable(self, limits: Limits, unready: Collection[int] = ()) -> tuple[RequestState, ...]:
        """Running requests that a decode step can continue, without those of these arrivals; one that depends on its tokens only once
        these are known."""
        most = limits.max_model_len
        return tuple(
            r
            for r in self.running
            if r.decoding
            and not (unready and r.arrival in unready)
            and (r.num_computed_tokens + r.steps_in_flight + 1 < min(r.request.longest, most) or not r.finishes_in_flight(most))
            and (r.request.plain or r.settled or not r.follows_output)
        )


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The live requests of all dp groups.

    Attributes:
        prefill_steps: prefill and encode steps since the last decode step, including those in flight.
        steps_in_flight: steps launched whose results are not known.
        num_scheduled: rows scheduled since the start (see `RequestState.last_scheduled`).
        times: measured times of steps; none where the policy does not go by them.
        prefill_ms: what these steps take by these times.
        acceptance: of drafts, where decode buckets are of several widths.
        next_deadline_ms: no request ends by time before; infinity where none has a deadline.
        unready: arrivals of requests that sit out the next decode step, since their bitmasks are not filled.
        encoded: the last step that was not a decode step was an encode step.
    """

    policy: Policy
    groups: tuple[GroupState, ...]
    prefill_steps: int = 0
    steps_in_flight: int = 0
    num_scheduled: int = 0
    times: StepTimes = UNMEASURED
    prefill_ms: float = 0.0
    acceptance: Acceptance = NOTHING
    next_deadline_ms: float = math.inf
    unready: frozenset[int] = frozenset()
    encoded: bool = False

    @property
    def used_pages(self) -> int:
        """Pages that running requests hold, of all groups."""
        return sum(group.used_pages for group in self.groups)

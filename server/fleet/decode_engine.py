"""The decode side of pairs: an engine whose prompts are computed by prefill servers."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from ...graphs.errors import RequestError
from ...runtime.delivery import Sink
from ...runtime.engine import Engine
from ...runtime.engine_groups import EngineGroups
from ...runtime.kv_transfer.landed_requests import LandedRequests
from ...runtime.kv_transfer.layout import Instance
from ...runtime.kv_transfer.lease import clock_s
from ...runtime.kv_transfer.messages import VERSION, Hello, Message
from ...runtime.kv_transfer.open_rooms import PeerConnection
from ...runtime.kv_transfer.pools import Pools
from ...runtime.kv_transfer.receiver import CANCELLED, Receiver
from ...runtime.kv_transfer.room import DEFAULTS, Timeouts
from ...runtime.kv_transfer.write_access import WriteAccess
from ...runtime.request import RECEIVE, Event, ExecutionRecord, FinishEvent, ParkedEvent, Request
from ...runtime.scheduler import admission
from ...runtime.scheduler.picture_admission import check_pictures
from ..engine.choice import RouterChoice, chosen
from ..requests.error_objects import Refusal
from .prefill_link import PrefillLink

IMBALANCE = 8
"""A prompt goes where prompts that begin alike went, unless that prefill server has so many more rooms open than the one with fewest."""

AFFINE_TOKENS = 256
"""So many first tokens say which prompts begin alike."""

CAUSES, REFUSED = ("timeout", "disconnected"), "prefill"
"""What reasons begin with, as metrics name them; REFUSED are all others: the prefill server said why."""


class DecodeEngine:
    """An `EngineClient` over an engine and prefill servers.

    A prompt is computed by a prefill server; where none of them can, here, if there are prefill buckets; else the request ends with an
    error that says what each of them said. All rooms live on a thread of their own.

    Args:
        engine: decodes.
        instance: how this server describes itself.
        pools: of this server.
        urls: of the prefill servers.
        headers: of requests to them, by name.
    """

    def __init__(
        self,
        engine: Engine | EngineGroups,
        instance: Instance,
        pools: Pools,
        urls: Sequence[str],
        headers: Mapping[str, str],
        timeouts: Timeouts = DEFAULTS,
    ) -> None:
        self._engine = engine
        self._landed = LandedRequests(engine, self._call, self._lost, self._late)
        # Replaced and never changed: the engine's thread goes through it.
        self._receivers: tuple[Receiver, ...] = ()
        # The engine has a request that is handed over again under another name, since the first one's pages may still be written.
        self._names: dict[str, str] = {}
        # How requests end that this server gives up, by the name that the engine has for them: reason, message, code.
        self._ends: dict[str, tuple[str, str | None, str | None]] = {}
        self._local_count = 0
        self._failures: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()

        def make(send: Callable[[Message], None], number: Callable[[], int]) -> Receiver:
            return Receiver(PeerConnection(engine, send, self._call, clock_s, timeouts), number, self._landed, access)

        def reopened() -> None:
            for link in self.links:
                if link.receiver is not None:
                    link.receiver.reopened(pools.sessions)

        access, description = WriteAccess(pools, self._call, clock_s, reopened), Raw(msgspec.json.encode(instance))
        hello = lambda: Hello(VERSION, description, pools.sessions)  # noqa: E731
        self.links = tuple(PrefillLink(url, hello, headers, make, self._replaced) for url in urls)
        engine.on_parked(self._parked)
        self._thread = threading.Thread(target=self._run, name="npucompile-handovers", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """See `EngineClient`.

        Raises:
            RequestError: it can never be served, or no prefill server is connected and there are no prefill buckets.
        """
        executor = self._engine.executor
        admission.check(request, executor.limits, executor.vocab_size, executor.max_logprobs, executor.max_ranked)
        choice = chosen.get()
        if request.pictures:
            # Neither their patches nor their rows travel, so a prompt with pictures is computed where it is decoded.
            here = self._landed.local and choice is None
            check_pictures(request if here else replace(request, handover=RECEIVE), executor.limits, executor.buckets, executor.segments)
            self._local_count += 1
            self._engine.submit(request, sink)
            return
        if choice is not None:
            link, room = self._named(choice), choice.take()
            self._call(lambda: self._begin(request, sink, link, room))
            return
        if not any(link.receiver for link in self.links):
            if not self._landed.local:
                raise Refusal("no_prefill_server", reasons="; ".join(f"{link.url} {link.state}" for link in self.links))
            self._local_count += 1
            self._engine.submit(request, sink)
            return
        self._call(lambda: self._begin(request, sink))

    def hold(self) -> None:
        """See `EngineClient`."""
        self._engine.hold()

    def release(self) -> None:
        """See `EngineClient`."""
        self._engine.release()

    def cancel(self, *request_ids: str) -> None:
        """See `EngineClient`."""
        self._call(lambda: self._cancel(request_ids))

    def flush_prefix_cache(self) -> bool:
        """See `EngineClient`."""
        return self._engine.flush_prefix_cache()

    def stats(self) -> Mapping[str, Any]:
        """See `EngineClient`."""
        rooms = sum(receiver.rooms for receiver in self._receivers)
        own = {
            "kv_transfer_rooms": rooms,
            "kv_transfer_connections": sum(link.receiver is not None for link in self.links),
            "kv_transfer_withheld": sum(receiver.withheld for receiver in self._receivers),
            "kv_transfer_requests_total": self._landed.count,
            "kv_transfer_seconds_total": self._landed.seconds,
            "kv_transfer_local_total": self._local_count + self._landed.computed_here,
            "kv_transfer_failures": dict(self._failures),
        }
        stats = self._engine.stats()
        return {**stats, **own, "num_requests_waiting": stats["num_requests_waiting"] + rooms}

    def close(self) -> None:
        """Ends the connections and the thread."""
        self._call(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        tasks = [self._loop.create_task(link.run()) for link in self.links]
        self._loop.run_forever()
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def _replaced(self) -> None:
        """A link has another receiver; one without a connection stays until its last room has ended."""
        current = [link.receiver for link in self.links if link.receiver]
        self._receivers = (*(receiver for receiver in self._receivers if receiver not in current and receiver.rooms), *current)

    def _parked(self, event: ParkedEvent) -> None:
        """Called by the engine's thread."""
        self._landed.parked(event) or any(receiver.parked(event) for receiver in self._receivers)

    def _at(self, place: str) -> PrefillLink | None:
        """The prefill server that a router names: by its URL, or, where that has SGLang's bootstrap port, by its host, if that has one."""
        exact = next((link for link in self.links if link.is_at(place)), None)
        at_host = [link for link in self.links if link.is_at(place.rpartition(":")[0])]
        return exact or (at_host[0] if len(at_host) == 1 else None)

    def _named(self, choice: RouterChoice) -> PrefillLink:
        """The prefill server that a router has chosen.

        Raises:
            RequestError: it is none of this server's, or not connected.
        """
        link = self._at(choice.place)
        if link is None:
            legal = ", ".join(link.url for link in self.links)
            raise Refusal("unknown_prefill_server", param=choice.field, field=choice.field, place=choice.place, legal=legal)
        if link.receiver is None:
            raise Refusal("no_prefill_server", reasons=f"{link.url} {link.state}")
        return link

    def decline(self, choice: RouterChoice, status: int, reason: str) -> None:
        """Tells the prefill server of a router's choice that its requests are not asked for."""
        link = self._at(choice.place)
        if link is not None and (receiver := link.receiver) is not None:
            for room in choice.rooms:
                self._call(functools.partial(receiver.decline, room, status, reason))

    def _begin(self, request: Request, sink: Sink, link: PrefillLink | None = None, routed: int = 0) -> None:
        waits_ms = [ms for ms in (request.timeout_ms, request.first_token_timeout_ms) if ms is not None]
        if waits_ms:
            self._loop.call_later(min(waits_ms) / 1e3, self._expire, request.id)
        if link is None:
            self._place(request, sink, {})
        elif link.receiver is None:
            self._end(request, sink, "error", f"{link.url} {link.state}", "not_handed_over")
        else:
            # The router has told one prefill server, so another one is for it to choose.
            link.receiver.ask(request, sink, functools.partial(self._failed, request, sink, {link.url: ""}, other=False), routed)

    def _place(self, request: Request, sink: Sink, tried: Mapping[str, str]) -> None:
        """Asks the next prefill server, computes the prompt here, or ends the request.

        Args:
            tried: what those said that were asked, by URL.
        """
        link = self._chosen(request, tried)
        attempt, told = request, sink
        if tried:
            # The engine may have the last attempt still, since a prefill server writes to its pages.
            attempt = replace(request, id=f"{request.id}/{len(tried)}")
            self._names[request.id], told = attempt.id, functools.partial(self._renamed, sink, request.id)
        if link is not None and link.receiver is not None:
            link.receiver.ask(attempt, told, functools.partial(self._failed, request, sink, {**tried, link.url: ""}))
        elif self._landed.local:
            self._local_count += 1
            try:
                self._engine.submit(attempt, told)
            except RequestError as error:
                self._end(request, sink, "error", str(error), error.code)
        else:
            said = "; ".join(f"{url}: {reason}" for url, reason in tried.items())
            self._end(request, sink, "error", f"no prefill server computed the prompt: {said or 'none is connected'}", "not_handed_over")

    def _chosen(self, request: Request, tried: Collection[str]) -> PrefillLink | None:
        """A connected prefill server that was not tried: the one where prompts that begin alike go, if it has not too much to do."""
        links = [link for link in self.links if link.receiver and link.url not in tried]
        if not links:
            return None
        least = min(link.rooms for link in links)
        first = repr((request.cache_salt, request.prompt[:AFFINE_TOKENS])).encode()

        def affinity(link: PrefillLink) -> bytes:
            return hashlib.blake2b(link.url.encode() + first, digest_size=8).digest()

        return max((link for link in links if link.rooms <= least + IMBALANCE), key=affinity)

    def _failed(self, request: Request, sink: Sink, tried: dict[str, str], reason: str, other: bool = True) -> None:
        """Called instead of the request's first event."""
        if reason == CANCELLED:
            self._give_up(request, sink)
            return
        self._failures[next((cause for cause in CAUSES if reason.startswith(cause)), REFUSED)] += 1
        tried[next(reversed(tried))] = reason
        if other:
            self._place(request, sink, tried)
        else:
            self._end(request, sink, "error", f"the prefill server did not compute the prompt: {reason}", "not_handed_over")

    def _lost(self, request: Request, sink: Sink, parked: ParkedEvent) -> None:
        """A request that had landed has lost its pages to others; what it has generated is computed with its prompt."""
        output = len(parked.token_ids) - len(request.prompt)

        def failed(reason: str) -> None:
            if reason == CANCELLED:
                self._give_up(request, sink, output)
            else:
                message = f"the request lost its pages to others, and no prefill server computed them again: {reason}"
                self._end(request, sink, "error", message, "not_handed_over", output)

        link = self._chosen(request, ())
        if link is not None and link.receiver is not None:
            link.receiver.ask_again(request, sink, failed, parked)
        elif self._landed.local:
            self._landed.compute_here(request, sink)
        else:
            self._engine.cancel(request.id)
            failed("none is connected")

    def _cancel(self, request_ids: Sequence[str]) -> None:
        names = [self._names.get(request_id, request_id) for request_id in request_ids]
        # The engine must not free pages that are being written.
        self._engine.cancel(*[name for name in names if not any(receiver.cancel(name) for receiver in self._receivers)])

    def _expire(self, request_id: str) -> None:
        message = "the time of the request was over before its prompt was handed over"
        self._end_room(self._names.get(request_id, request_id), "timeout", message, "timeout")

    def _late(self, event: FinishEvent) -> None:
        """The engine has ended an attempt that waited for pages; one that was given up before is nobody's, and another may be under way."""
        self._end_room(event.request_id, event.reason, event.message, event.code)

    def _end_room(self, name: str, reason: str, message: str | None, code: str | None) -> None:
        for receiver in self._receivers:
            if receiver.asks(name):
                self._ends[name] = reason, message, code
                receiver.cancel(name)

    def _give_up(self, request: Request, sink: Sink, output: int = 0) -> None:
        """Ends a request whose client, deadline or engine has ended its room."""
        reason, message, code = self._ends.pop(self._names.get(request.id, request.id), ("cancelled", None, None))
        self._end(request, sink, reason, message, code, output)

    def _renamed(self, sink: Sink, request_id: str, event: Event) -> None:
        if isinstance(event, FinishEvent):
            self._names.pop(request_id, None)
            sink(replace(event, request_id=request_id))
        else:
            sink(event._replace(request_id=request_id))

    def _end(self, request: Request, sink: Sink, reason: str, message: str | None = None, code: str | None = None, output: int = 0) -> None:
        """Ends a request that the engine does not have, or no longer."""
        self._names.pop(request.id, None)
        event = FinishEvent(request.id, reason, len(request.prompt), output, ExecutionRecord(), message, code=code)
        sink(event)
        self._engine.on_end(event)

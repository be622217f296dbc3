"""Admits requests: how many, and of how many tokens, may wait and run, of each client and of all.

So that one client cannot fill the engine's queue, a client has a share: as long as others have requests, it may hold at most an equal
part of the places. Limits of a client are refused as such (429): it would be no better off elsewhere. Where this server is full, or others
want its places, another may have room, and routers ask it (503). Who of those that wait is next is the scheduler's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

from ..requests.error_objects import Refusal
from .tally import Tally


class Admission:
    """Requests that wait or run; used on the event loop alone.

    Args:
        places: requests that may wait or run, all together.
        per_client: of one client; None is as many.
        tokens: of their prompts, all together; None is any number.
        tokens_per_client: of one client; None is as many.
    """

    def __init__(self, places: int, per_client: int | None = None, tokens: int | None = None, tokens_per_client: int | None = None) -> None:
        self._places, self._per_client = places, math.inf if per_client is None else per_client
        self._tokens = math.inf if tokens is None else tokens
        self._tokens_per_client = math.inf if tokens_per_client is None else tokens_per_client
        self._held, self._held_tokens = Tally(), Tally()

    @property
    def live(self) -> int:
        """Requests admitted here that have not ended."""
        return self._held.own

    @property
    def live_tokens(self) -> int:
        """Tokens of the prompts of all that were admitted, by other doors too."""
        return self._held_tokens.total

    @property
    def tallies(self) -> Mapping[str, Tally]:
        """What its limits are of, by name."""
        return {"requests": self._held, "tokens": self._held_tokens}

    def enter(self, client: str, count: int = 1, tokens: int = 0) -> Callable[[], None]:
        """Takes places for requests of one client, all or none.

        Args:
            tokens: of their prompts together.

        Returns:
            Gives back one of the places, and the last call all tokens; to be called once for each request.

        Raises:
            RequestError: there are too few (codes too_many_requests, queue_full), or these alone are too many or have too many tokens, so
                that there never is room (too_many_completions, too_many_tokens).
        """
        self._check_alone(count, tokens)
        self._check_places(client, count)
        self._check_tokens(client, tokens)
        self._held.add(client, count)
        self._held_tokens.add(client, tokens)
        left = count

        def leave() -> None:
            nonlocal left
            left -= 1
            self._held.add(client, -1)
            if not left:
                self._held_tokens.add(client, -tokens)

        return leave

    @contextlib.contextmanager
    def reserved(self, client: str, count: int, tokens: int) -> Iterator[None]:
        """Holds places for requests that are prepared; raises what `enter` does."""
        leave = self.enter(client, count, tokens)
        try:
            yield
        finally:
            for _ in range(count):
                leave()

    def _check_alone(self, count: int, tokens: int) -> None:
        """Refuses what has no room however long it waits."""
        most = min(self._per_client, self._places)
        if count > most:
            raise Refusal("too_many_completions", count=count, most=most)
        if tokens > (most := min(self._tokens_per_client, self._tokens)):
            raise Refusal("too_many_tokens", tokens=tokens, most=most)

    def _check_tokens(self, client: str, tokens: int) -> None:
        held = self._held_tokens[client]
        if held + tokens > self._tokens_per_client:
            raise Refusal("too_many_requests.tokens", tokens=tokens, held=held, most=self._tokens_per_client)
        if self.live_tokens + tokens > self._tokens:
            raise Refusal("queue_full.tokens", held=self.live_tokens, most=self._tokens)

    def _check_places(self, client: str, count: int) -> None:
        held, total = self._held[client], self._held.total
        if held + count > self._per_client:
            raise Refusal("too_many_requests.places", count=count, held=held, most=self._per_client)
        clients = len(self._held.names() | {client})
        share = self._places // clients
        if total + count > self._places:
            raise Refusal("queue_full.places", held=total, most=self._places)
        # The last half of the places is shared out, so that a client that comes second finds some.
        if held + count > share and total + count > self._places // 2 and clients > 1:
            raise Refusal("queue_full.share", held=held, clients=clients, share=share, places=self._places)

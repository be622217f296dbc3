"""Admits requests: how many, and of how many tokens, may wait and run, of each client and of all.

So that one client cannot fill the engine's queue, a client has a share: as long as others have requests, it may hold at most an equal
part of the places. Who of those that wait is next is the scheduler's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from ...graphs.errors import RequestError


class Admission:
    """Requests that wait or run; used on the event loop alone.

    Args:
        places: requests that may wait or run, all together.
        per_client: of one client.
        tokens: of their prompts, all together; None is any number.
        tokens_per_client: of one client; None is as many.
    """

    def __init__(self, places: int, per_client: int, tokens: int | None = None, tokens_per_client: int | None = None) -> None:
        self._places, self._per_client = places, per_client
        self._tokens = math.inf if tokens is None else tokens
        self._tokens_per_client = self._tokens if tokens_per_client is None else min(tokens_per_client, self._tokens)
        self._held: Counter[str] = Counter()
        self._held_tokens: Counter[str] = Counter()

    @property
    def live(self) -> int:
        """Requests admitted that have not ended."""
        return self._held.total()

    @property
    def live_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._held_tokens.total()

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
        self._held[client] += count
        self._held_tokens[client] += tokens
        left = count

        def leave() -> None:
            nonlocal left
            left -= 1
            self._held[client] -= 1
            if not left:
                self._held_tokens[client] -= tokens
            if not self._held[client]:
                del self._held[client], self._held_tokens[client]

        return leave

    def _check_alone(self, count: int, tokens: int) -> None:
        """Refuses what has no room however long it waits."""
        most = min(self._per_client, self._places)
        if count > most:
            message = f"{count} completions at once, and of one client {most} may wait or run; legal are that many, n of each prompt"
            raise RequestError(message, code="too_many_completions")
        if tokens > self._tokens_per_client:
            limit = f"{self._tokens_per_client} may wait or run; send fewer prompts or completions at once"
            raise RequestError(f"the prompts have {tokens} tokens together, and of one client {limit}", code="too_many_tokens")

    def _check_tokens(self, client: str, tokens: int) -> None:
        held = self._held_tokens[client]
        if held + tokens > self._tokens_per_client:
            raise RequestError(
                f"{tokens} prompt tokens more beside {held} that wait or run; one client may have {self._tokens_per_client}",
                code="too_many_requests",
            )
        if self.live_tokens + tokens > self._tokens:
            raise RequestError(f"{self.live_tokens} prompt tokens wait or run, and {self._tokens} may; come back later", code="queue_full")

    def _check_places(self, client: str, count: int) -> None:
        held = self._held[client]
        if held + count > self._per_client:
            raise RequestError(
                f"{count} requests more beside {held} that wait or run; one client may have {self._per_client}", code="too_many_requests"
            )
        clients = len(self._held.keys() | {client})
        share = self._places // clients
        if self.live + count > self._places:
            raise RequestError(f"{self.live} requests wait or run, and {self._places} may; come back later", code="queue_full")
        # The last half of the places is shared out, so that a client that comes second finds some.
        if held + count > share and self.live + count > self._places // 2 and clients > 1:
            raise RequestError(
                f"{held} requests of this client wait or run; its share among {clients} clients is {share} of {self._places}",
                code="too_many_requests",
            )

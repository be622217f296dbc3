"""What is done with responses that are kept: read again, followed, continued, cancelled and deleted, by whichever door of the server.

A response is kept by the door that made it, which its id names; the others ask that door.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from ..engine.service import Service
from ..requests.error_objects import Refusal
from ..requests.fields import show
from ..requests.frames import JSON, encode_bytes
from ..requests.items import Item
from ..siblings.caller import FOLLOW, Methods
from ..siblings.link import CANCEL
from ..storage.store import Followed, Reader, StoredResponse

CANCEL_WAIT_S = 10.0
"""How long a cancel waits for the response to end before it answers with what there is."""

BODY, DELETE, CONVERSATION = "body", "delete", "conversation"


def methods(service: Service) -> Methods:
    """What other doors may ask of the responses that this one keeps."""

    def follow(reader: Reader, *arguments: Any) -> Callable[[], None]:
        run = _follow(service, reader, *arguments)
        return lambda: service.cancel(*run.leave(reader)) if run else None

    return {
        BODY: lambda response_id, owner: _body(service, response_id, owner),
        CANCEL: lambda response_id, owner: _cancel(service, response_id, owner),
        DELETE: lambda response_id, owner: _delete(service, response_id, owner),
        CONVERSATION: service.store.conversation,
        FOLLOW: follow,
    }


async def body(service: Service, response_id: str, owner: str) -> bytes:
    """The response object as JSON.

    Raises:
        RequestError: there is no such response; this and all others here, also where the door that keeps it is not there.
    """
    keeper = service.keeper(response_id)
    return await keeper.ask(BODY, response_id, owner) if keeper else _body(service, response_id, owner)


async def cancel(service: Service, response_id: str, owner: str) -> bytes:
    """Ends a response that runs; what it has become, as JSON. One that has ended is left as it is."""
    keeper = service.keeper(response_id)
    return await (keeper.ask(CANCEL, response_id, owner) if keeper else _cancel(service, response_id, owner))


async def delete(service: Service, response_id: str, owner: str) -> None:
    """Forgets a response; one that runs is cancelled."""
    keeper = service.keeper(response_id)
    if keeper:
        await keeper.ask(DELETE, response_id, owner)
    else:
        _delete(service, response_id, owner)


async def conversation(service: Service, response_id: str, owners: Collection[str]) -> tuple[Item, ...]:
    """The items of the conversation up to the end of a response."""
    keeper = service.keeper(response_id)
    return await keeper.ask(CONVERSATION, response_id, owners) if keeper else service.store.conversation(response_id, owners)


async def follow(service: Service, reader: Reader, response_id: str, owner: str, starting_after: int) -> Followed | None:
    """Has a reader get the events behind a sequence number, the first before this returns; None where these were all."""
    keeper = service.keeper(response_id)
    if keeper:
        return await keeper.follow(reader, response_id, owner, starting_after)
    return _follow(service, reader, response_id, owner, starting_after)


def _body(service: Service, response_id: str, owner: str) -> bytes:
    stored = service.store.named(response_id, (owner,))
    if stored.run is not None:
        return encode_bytes(stored.run.snapshot(), JSON)
    return _ended(stored)


def _ended(stored: StoredResponse) -> bytes:
    if stored.body is None:
        raise Refusal("response_not_found.unkept", param="response_id", response=show(stored.response_id))
    return stored.body


async def _cancel(service: Service, response_id: str, owner: str) -> bytes:
    stored = service.store.named(response_id, (owner,))
    run = stored.run
    if run is None:
        return _ended(stored)
    run.cancel()
    # Where it does not end in time, it is told as it is.
    with suppress(TimeoutError):
        await asyncio.wait_for(run.ended.wait(), CANCEL_WAIT_S)
    return encode_bytes(run.snapshot(), JSON)


def _delete(service: Service, response_id: str, owner: str) -> None:
    stored = service.store.named(response_id, (owner,))
    service.store.remove(response_id)
    if stored.run is not None:
        stored.run.unkept()
        stored.run.cancel()


def _follow(service: Service, reader: Reader, response_id: str, owner: str, starting_after: int) -> Followed | None:
    stored = service.store.named(response_id, (owner,))
    if stored.replay is None:
        raise Refusal("not_resumable", param="response_id", response=show(response_id))
    events, run = stored.replay.after(starting_after), stored.run
    if run is not None:
        run.join(reader)
    reader.read(events, run is None)
    return run

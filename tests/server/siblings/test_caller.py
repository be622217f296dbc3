"""server/siblings/caller.py: what a door is asked without waiting is done, and what it followed is left when it ends."""

from __future__ import annotations

import asyncio
from typing import Any

from npucompile.server.siblings.caller import FOLLOW, Caller
from npucompile.server.siblings.records import AnswerPart, Follow, Leave, SiblingQuestion, SiblingRefusal, Told


def test_nobody_is_told_what_nobody_waits_for_and_who_ends_follows_nothing() -> None:
    sent, done, left = list[Any](), list[int](), list[str]()

    async def later(value: int) -> int:
        done.append(value)
        return value

    def follow(reader: Any, name: str) -> Any:
        reader.read([{"of": name}], name == "whole")
        return lambda: left.append(name)

    async def ask() -> None:
        caller = Caller(sent.append, {"later": later, FOLLOW: follow})
        caller.take(SiblingQuestion(None, "later", (1,)))
        caller.take(SiblingQuestion(4, "later", (2,)))
        caller.take(SiblingQuestion(None, "nothing", ()))
        caller.take(SiblingQuestion(5, "nothing", ()))
        for number, name in enumerate(("whole", "left", "lost")):
            caller.take(Follow(number, (name,)))
        # The first has ended by itself; an unknown number is none of this door.
        for number in (0, 1, 9):
            caller.take(Leave(number))
        assert left == ["left"]
        caller.gone()
        await asyncio.sleep(0.01)

    asyncio.run(ask())
    assert (left, done) == (["left", "lost"], [1, 2])
    parts = [AnswerPart(number, ({"of": name},), name == "whole") for number, name in enumerate(("whole", "left", "lost"))]
    refused, *others = sent
    assert isinstance(refused, SiblingRefusal)
    assert (refused.number, refused.reply.status) == (5, 500)
    assert others == [*parts, Told(4, 2)]

"""server/siblings/siblings.py: doors know of each other what they hold, who keeps what, and who has ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from support import ranks

from npucompile.graphs.errors import RequestError
from npucompile.server.guard.tally import Tally
from npucompile.server.siblings import siblings
from npucompile.server.siblings.ids import new_response_id
from npucompile.server.siblings.records import Place
from npucompile.server.siblings.siblings import Siblings

OTHER = """
import asyncio, sys
from npucompile.server.guard.tally import Tally
from npucompile.server.siblings.records import Place
from npucompile.server.siblings.siblings import Siblings

async def run():
    tally = Tally()
    tally.add("a", 2)
    methods = {"numbers": lambda: 7, "hang": lambda: asyncio.sleep(60)}
    door = Siblings(Place(1, 2, sys.argv[1], b"key"), asyncio.get_running_loop(), methods, {"requests": tally})
    door.start()
    await asyncio.sleep(0.5)
    tally.add("b", 1)
    await asyncio.sleep(60)

asyncio.run(run())
"""


def test_another_process_tells_what_it_holds_until_it_ends(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path)], env=ranks.environment())

    async def until(true: object) -> None:
        deadline = time.monotonic() + 30
        while not true():  # type: ignore[operator]
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    async def run() -> None:
        tally = Tally()
        door = Siblings(Place(0, 2, str(tmp_path), b"key"), asyncio.get_running_loop(), {}, {"requests": tally})
        door.start()
        assert not door.complete
        assert await door.ask_all("numbers") == []
        await until(lambda: door.complete)
        assert await door.ask_all("numbers") == [7]
        await until(lambda: tally.names() == {"a", "b"})
        assert (tally["a"], tally.total) == (2, 3)
        link = door.keeper(new_response_id(1))
        assert link is not None
        hanging = asyncio.ensure_future(link.ask("hang"))
        await asyncio.sleep(0.05)
        process.kill()
        with pytest.raises(RequestError, match="has ended or is starting") as caught:
            await hanging
        assert caught.value.code == "not_ready"
        await until(lambda: not tally.names())
        assert not door.complete
        # Of no door, of this one, and of more than there are.
        assert [door.keeper(name) for name in ("resp_1", door.new_response_id(), new_response_id(2))] == [None, None, None]
        await asyncio.to_thread(door.close)

    try:
        asyncio.run(run())
    finally:
        process.kill()
        process.wait()


def test_who_lacks_the_key_is_no_door(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        pair = [Siblings(Place(number, 2, str(tmp_path), key), loop, {}, {}) for number, key in enumerate((b"key", b"other"))]
        for door in pair:
            door.start()
        await asyncio.sleep(0.3)
        assert [door.complete for door in pair] == [False, False]
        for door in pair:
            await asyncio.to_thread(door.close)

    asyncio.run(run())
    assert "without the key" in caplog.text


def test_another_user_is_no_door_and_is_not_asked_for_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        door = Siblings(Place(0, 2, str(tmp_path), b"key"), asyncio.get_running_loop(), {}, {})
        door.start()
        address = Place(0, 2, str(tmp_path), b"key").address(0)
        with await asyncio.to_thread(Client, address, "AF_UNIX", b"key"):
            pass
        monkeypatch.setattr(siblings, "user_of", lambda _: os.getuid() + 1)
        with pytest.raises((EOFError, OSError)):
            await asyncio.to_thread(Client, address, "AF_UNIX", b"key")
        await asyncio.to_thread(door.close)

    asyncio.run(run())

"""server/pictures/pool.py: processes that crash, hang, grow or lie cost one picture, and none is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from support.published_pictures import encoded, picture
from support.shown import VISION

from npucompile.graphs.errors import RequestError
from npucompile.server.pictures.decoding import decode
from npucompile.server.pictures.limits import DecoderLimits, PictureLimits
from npucompile.server.pictures.pool import DecoderPool
from npucompile.server.requests.shared_threads import asking

ODD = """
import os, sys, time
import msgspec

def send(payload, length=None):
    sys.stdout.buffer.write((len(payload) if length is None else length).to_bytes(8, "big") + payload)
    sys.stdout.buffer.flush()

send(msgspec.msgpack.encode({}))
while head := sys.stdin.buffer.read(8):
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(int.from_bytes(head, "big")))
    match task["data"]:
        case b"crash":
            os.abort()
        case b"hang":
            time.sleep(1000)
        case b"slow":
            time.sleep(1.1)
            send(msgspec.msgpack.encode({"error": "it says"}))
        case b"garbage":
            send(b"\\xc1" * 9)
        case b"endless":
            send(b"", 2**62)
        case b"type":
            send(msgspec.msgpack.encode({"size": ["a", "b"]}))
        case b"pixels":
            send(msgspec.msgpack.encode({"grid": [1, 2, 2], "pixels": b"x"}))
        case b"code":
            send(msgspec.msgpack.encode({"error": "it says", "code": "host_not_allowed"}))
        case _:
            send(msgspec.msgpack.encode({"size": [3, 4]}))
"""


@contextlib.contextmanager
def pool(program=("-c", ODD), **limits):
    with contextlib.closing(DecoderPool(DecoderLimits(**{"processes": 1, "time_s": 60.0, **limits}), PictureLimits(), program)) as one:
        yield one


def gone(process_id):
    """Whether a process has ended; nobody may have asked for its status."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(process_ids):
    deadline = time.monotonic() + 60
    while not all(map(gone, process_ids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("data", [b"crash", b"garbage", b"endless", b"type"])
def test_a_process_that_fails_costs_its_picture_alone(data):
    with pool() as one:
        before = one.process_ids
        with pytest.raises(RequestError) as caught:
            one.size(data, "the place").result(60)
        assert (caught.value.code, caught.value.param) == ("image_parse_error", "the place")
        assert one.size(b"good", "p").result(60) == (3, 4)
        assert one.stats()["picture_decodes"] == {"decoded": 0, "refused": 0, "killed": 1}
        assert before.isdisjoint(one.process_ids)
        assert all(map(gone, before))
    assert all(map(gone, one.process_ids))


def test_a_process_that_hangs_is_ended_in_time_and_others_go_on_meanwhile():
    with pool(processes=2, time_s=1.0) as one:
        one.size(b"good", "p").result(60)
        hangs = one.size(b"hang", "p")
        assert [one.size(b"good", "p").result(60) for _ in range(3)] == [(3, 4)] * 3
        with pytest.raises(RequestError, match="cannot be decoded within 1 s"):
            hangs.result(60)
        assert one.size(b"good", "p").result(60) == (3, 4)


def test_a_client_with_many_slow_pictures_holds_up_no_other():
    with pool(processes=2, time_s=60.0) as one:

        def ask(client, data):
            token = asking.set(client)
            try:
                return one.picture(data, VISION.processor, "p")
            finally:
                asking.reset(token)

        with pytest.raises(RequestError, match="it says"):
            ask("many", b"slow").result(60)
        slow = [ask("many", b"slow") for _ in range(20)]
        began_s = time.monotonic()
        for _ in range(3):
            with pytest.raises(RequestError, match="it says"):
                ask("another", b"code").result(60)
        # Twenty of them take eleven seconds on two processes.
        assert time.monotonic() - began_s < 5
        assert sum(work.done() for work in slow) < 10


def test_a_process_that_ended_while_it_was_idle_costs_no_picture():
    with pool() as one:
        assert one.size(b"good", "p").result(60) == (3, 4)
        before = one.process_ids
        for process_id in before:
            os.kill(process_id, signal.SIGKILL)
        wait_gone(before)
        assert one.size(b"good", "p").result(60) == (3, 4)
        assert before.isdisjoint(one.process_ids)


@pytest.mark.parametrize(("data", "message"), [(b"pixels", "cannot be decoded"), (b"code", "it says")])
def test_what_a_process_says_is_checked(data, message):
    with pool() as one:
        with pytest.raises(RequestError, match=message) as caught:
            one.picture(data, VISION.processor, "p").result(60)
        assert caught.value.code == "image_parse_error"


def test_a_pool_that_is_closed_ends_what_hangs_and_refuses_what_waits():
    with pool() as one:
        work = [one.size(b"hang", "p"), one.size(b"good", "p")]
        time.sleep(0.2)
        ids = one.process_ids
    assert all(future.done() for future in work)
    assert all(map(gone, ids))


KILLED = """
import sys, time
from npucompile.server.pictures.limits import DecoderLimits, PictureLimits
from npucompile.server.pictures.pool import DecoderPool
pool = DecoderPool(DecoderLimits(2), PictureLimits(), ("-c", sys.argv[1]))
pool.size(b"good", "p").result()
print(*pool.process_ids, flush=True)
time.sleep(1000)
"""


def test_processes_end_with_a_server_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", KILLED, ODD], stdout=subprocess.PIPE, text=True) as server:
        ids = [int(word) for word in server.stdout.readline().split()]
        assert len(ids) == 2
        assert not any(map(gone, ids))
        os.kill(server.pid, signal.SIGKILL)
    wait_gone(ids)


def test_a_real_process_keeps_within_its_memory():
    small, large = encoded(picture(40, 70, 1)), encoded(Image.new("RGB", (5000, 5000), "red"))
    with contextlib.closing(DecoderPool(DecoderLimits(1, 60.0, 2**26), PictureLimits())) as one:
        with pytest.raises(RequestError) as caught:
            one.picture(large, VISION.processor, "p").result(120)
        assert (caught.value.code, caught.value.param) == ("image_parse_error", "p")
        assert one.size(large, "p").result(120) == (5000, 5000)
        made, expected = one.picture(small, VISION.processor, "p").result(120), VISION.processor.picture(decode(small))
        assert (made.pixels == expected.pixels).all()
        assert (made.grid, made.digest) == (expected.grid, expected.digest)


LARGE = [("PNG", "RGBA", {}), ("WEBP", "RGBA", {"lossless": True, "method": 0}), ("JPEG", "CMYK", {"progressive": True}), ("GIF", "P", {})]


@pytest.mark.parametrize("side", [1024, pytest.param(8192, marks=pytest.mark.long)])
def test_the_largest_picture_of_any_format_is_decoded_in_the_memory_that_its_pixels_take(side):
    """Whatever is left of 64 MiB is for what decoders have beside pixels."""
    most, memory = PictureLimits(max_pixels=side * side), 2**26 + 20 * side * side
    with contextlib.closing(DecoderPool(DecoderLimits(1, 60.0, memory), most)) as one:
        for form, mode, options in LARGE:
            file = encoded(Image.new(mode, (side, side), 7 if mode == "P" else (9, 40, 200, 99)), form, **options)
            shown = one.picture(file, VISION.processor, "p").result(120)
            assert shown.tokens > 0, form
        assert one.stats()["picture_decodes"] == {"decoded": len(LARGE), "refused": 0, "killed": 0}
        assert one.stats()["picture_decode_seconds_total"] > 0
        with pytest.raises(RequestError):
            one.picture(b"x", VISION.processor, "p").result(60)
        assert one.stats()["picture_decodes"]["refused"] == 1
    assert DecoderLimits().memory_bytes >= 2**26 + 20 * PictureLimits().max_pixels

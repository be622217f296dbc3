"""server/pictures/decoder.py: tasks as a process reads them, and what a process may do then."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import asdict

import msgspec
import pytest
from support.published_pictures import encoded, picture
from support.shown import VISION

from npucompile.server.pictures.decoder import DecodeTask, Outcome, outcome, read, write
from npucompile.server.pictures.decoding import decode


def task(data, processor=VISION.processor, **fields):
    limits = {"max_bytes": 10**6, "max_pixels": 10**6, "time_s": 5.0, **fields}
    return DecodeTask(data, processor=processor and asdict(processor), **limits)


def test_an_outcome_is_what_the_processor_makes():
    file = encoded(picture(70, 45, 2, "LA"))
    expected = VISION.processor.picture(decode(file))
    done = outcome(task(file))
    assert (done.grid, done.pixels) == (expected.grid, expected.pixels.numpy().tobytes())
    assert outcome(task(file, None)) == Outcome(size=(70, 45))


@pytest.mark.parametrize("processor", [None, VISION.processor])
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"data": b""}, "empty_image_file"),
        ({"data": b"x"}, "unsupported_image_media_type"),
        ({"max_bytes": 9}, "image_file_too_large"),
        ({"max_pixels": 9}, "image_too_large"),
    ],
)
def test_an_error_is_data(processor, changed, code):
    done = outcome(task(**{"data": encoded(picture(40, 40, 1)), "processor": processor, **changed}))
    assert (done.code, done.pixels) == (code, b"")
    assert done.error


def test_messages_have_lengths():
    stream = io.BytesIO()
    for message in (task(b"abc"), Outcome(error="x")):
        write(stream, message)
    stream.seek(0)
    assert msgspec.msgpack.decode(read(stream, 1000), type=DecodeTask) == task(b"abc")
    assert msgspec.msgpack.decode(read(stream, 1000), type=Outcome) == Outcome(error="x")
    assert read(stream, 1000) is None
    write(stream, task(bytes(100)))
    stream.seek(stream.tell() - 20)
    assert read(stream, 10) is None


LIMITED = """
import sys
from npucompile.server.pictures.decoder import limit
limit(2**26)
def tries(name, what):
    try:
        what()
        print(name)
    except (OSError, MemoryError):
        pass
tries("memory", lambda: bytearray(2**28))
tries("files", lambda: [open("/dev/null") for _ in range(99)])
tries("writing", lambda: open(sys.argv[1], "wb", 0).write(b"x" * 99))
bytearray(2**20)
print("lives")
"""


def test_a_process_is_left_what_decoding_needs(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "x")], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["lives"], done.stderr
    assert not (tmp_path / "x").exists() or not (tmp_path / "x").read_text()

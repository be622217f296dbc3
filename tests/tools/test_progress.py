"""tools/progress.py: lines without a terminal, bars on one."""

import io
import logging
import re
import threading
import time
import warnings

import pytest

from npucompile.tools import progress as progress_module
from npucompile.tools.progress import BAR_BYTES, BAR_STEPS, MB, Progress, quiet_torch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_has_one_line_a_step() -> None:
    out = io.StringIO()
    progress = Progress(out)
    progress.say("plan")
    with progress.bar("compile", 2) as bar:
        bar.step("decode-b1-q1")
        bar.step("decode-b2-q1")
    assert out.getvalue() == "plan\ncompile 1/2 decode-b1-q1\ncompile 2/2 decode-b2-q1\n"


def test_a_terminal_sees_one_bar_redrawn_below_the_lines() -> None:
    out = Terminal()
    progress = Progress(out)
    with progress.bar("compile", 4) as bar:
        bar.step("first", 1)
        progress.say("a line")
        bar.step("second", 1)
    assert "a line\n" in out.getvalue()
    last = out.getvalue().split("\r")[-1]
    assert last.startswith("compile:  50%|")
    assert "2/4" in last
    assert ", second]" in last
    assert last.endswith("\n")


def test_a_file_is_told_how_far_it_is_where_nothing_is_said_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "SILENT_S", 0.1)
    out = io.StringIO()

    def heard(count: int) -> bool:
        return len(out.getvalue().splitlines()) >= count

    with Progress(out).bar("compile", 3) as bar:
        deadline = time.monotonic() + 30
        while not heard(1) and time.monotonic() < deadline:
            time.sleep(0.01)
        bar.step("decode-b1-q1")
        bar.begin("decode-b2-q1")
        before = len(out.getvalue().splitlines())
        while not heard(before + 1) and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert re.fullmatch(r"compile 0/3 \.\.\., \d+ s so far", lines[0])
    assert any(re.fullmatch(r"compile 1/3 decode-b1-q1, \d+ s so far, about \d+ s left", line) for line in lines)
    assert re.fullmatch(r"compile 1/3 decode-b2-q1 \.\.\., \d+ s so far, about \d+ s left", lines[-1])
    assert not [thread for thread in threading.enumerate() if "break_silence" in thread.name]


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    progress = Progress(out, quiet=True)
    progress.say("x")
    with progress.bar("y", 1) as bar:
        bar.step("z")
    assert out.getvalue() == ""


def test_torch_is_quiet_for_a_while() -> None:
    logger = logging.getLogger("torch")
    level = logger.level
    with quiet_torch():
        warnings.warn("of its own code", stacklevel=1)
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.level == level
    with pytest.warns(UserWarning, match="after it"):
        warnings.warn("after it", stacklevel=1)


def test_bytes_advance_a_bar_in_twentieths_and_few_have_none() -> None:
    out = io.StringIO()
    with Progress(out).byte_bar("read", 300 * MB) as bar:
        for _ in range(100):
            bar.add(3 * MB)
    lines = out.getvalue().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("read 15/300 MB", "read 300/300 MB", BAR_STEPS)
    with Progress(out).byte_bar("few", BAR_BYTES - 1) as bar:
        bar.add(BAR_BYTES - 1)
    assert "few" not in out.getvalue()

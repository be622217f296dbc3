"""tools/child_process.py: a child answers line by line; how it ends, and that it does not answer, are errors with a code."""

from __future__ import annotations

import os
import sys
import time

import pytest

from npucompile.tools.child_process import SILENT, ChildError, ChildProcess

ECHO = "import sys\nfor line in sys.stdin: print(line.strip() + '\\n' + '{\"two\": 2}', flush=True)"


def child(code: str) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], os.environ)


def test_lines_that_come_together_are_received_one_by_one():
    with child(ECHO) as process:
        for number in range(2):
            process.send(number=number)
            assert [process.receive(30), process.receive(30)] == [{"number": number}, {"two": 2}]


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("import os; os.abort()", "SIGABRT", ""),
        ("import sys; sys.exit('no device')", "status 1", ": no device"),
        ("import time; time.sleep(60)", SILENT, ""),
    ],
)
def test_how_it_ends_is_the_code_of_the_error(code, ended, said):
    with child(code) as process, pytest.raises(ChildError) as caught:
        process.receive(5 if ended == SILENT else 60)
    assert caught.value.code == ended
    assert str(caught.value).endswith(said)


def test_it_may_end_by_itself():
    process, began = child(ECHO), time.monotonic()
    process.end(60)
    assert process._process.returncode == 0
    assert time.monotonic() - began < 50


def test_what_cannot_be_started_says_why():
    with pytest.raises(ChildError, match="/nowhere cannot be started: No such file"):
        ChildProcess(["/nowhere"], {})

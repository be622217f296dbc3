"""tools/progress.py: lines without a terminal, bars on one."""

import io

from npucompile.tools.progress import Progress


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


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    progress = Progress(out, quiet=True)
    progress.say("x")
    with progress.bar("y", 1) as bar:
        bar.step("z")
    assert out.getvalue() == ""

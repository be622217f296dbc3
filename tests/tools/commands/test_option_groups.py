"""tools/commands/option_groups.py: the help of `serve` has every option once, in its section."""

from __future__ import annotations

import re

import click
from click.testing import CliRunner

from npucompile.tools.commands.option_groups import OTHER, grouped
from npucompile.tools.commands.serve import GROUPS, command


def test_every_option_of_serve_is_in_one_section():
    names = [name for names in GROUPS.values() for name in names]
    options = [option for option in command.params if isinstance(option, click.Option)]
    known = {name for option in options if not option.hidden for name in option.opts}
    assert len(names) == len(set(names))
    assert set(names) == {name for option in options for name in option.opts}
    output = CliRunner().invoke(command, ["--help"]).output
    sections = [title for title, own in GROUPS.items() if known & set(own)]
    assert re.findall(r"^(\S.*):$", output, re.MULTILINE)[-len(sections) - 1 :] == [*sections, OTHER]
    # What most need comes within the first lines, and no line is spent on ranges, which errors name.
    assert output.index("--port N ") < 1100
    assert "RANGE" not in output
    assert not re.search(r"x[<>]|\]\]", output)
    assert "[default: 8000]" in output
    shown = re.findall(r"^  (--[a-z-]+)", output, re.MULTILINE)
    assert set(shown) - {"--nproc-per-node"} == known | {"--help"}


def test_a_command_without_other_options_has_no_such_section():
    @click.command(cls=grouped({"One": ("--a", "--help")}))
    @click.option("--a", help="An option.")
    def run(a):
        """A command."""

    assert OTHER not in CliRunner().invoke(run, ["--help"]).output

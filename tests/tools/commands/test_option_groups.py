"""tools/commands/option_groups.py: the help of `serve` has every option once, in its section."""

from __future__ import annotations

import re

import click
from click.testing import CliRunner

from npucompile.tools.commands.option_groups import OTHER, grouped
from npucompile.tools.commands.serve import GROUPS, command


def test_every_option_of_serve_is_in_one_section():
    names = [name for names in GROUPS.values() for name in names]
    known = {name for option in command.params if not getattr(option, "hidden", False) for name in option.opts}
    assert len(names) == len(set(names))
    assert set(names) <= known
    output = CliRunner().invoke(command, ["--help"]).output
    assert re.findall(r"^(\S.*):$", output, re.MULTILINE)[-len(GROUPS) - 1 :] == [*GROUPS, OTHER]
    # What most need comes within the first lines, and no line is spent on ranges, which errors name.
    assert output.index("--port N ") < 1000
    assert "RANGE" not in output
    assert not re.search(r"x[<>]|\]\]", output)
    assert "[default: 8000]" in output
    shown = re.findall(r"^  (--[a-z-]+)", output, re.MULTILINE)
    assert set(shown) - {"--nproc-per-node"} == {name for name in known if name.startswith("--")} | {"--help"}


def test_a_command_without_other_options_has_no_such_section():
    @click.command(cls=grouped({"One": ("--a", "--help")}))
    @click.option("--a", help="An option.")
    def run(a):
        """A command."""

    assert OTHER not in CliRunner().invoke(run, ["--help"]).output

"""tools/commands/config_file.py: options of `serve` and `build` from a TOML file, and the file that each prints."""

from __future__ import annotations

import tomllib

import click
import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import SpecError
from npucompile.tools.commands import build
from npucompile.tools.commands.config_file import config_file
from npucompile.tools.commands.serve import GROUPS, command
from npucompile.tools.commands.server_options import media_limits, serving_settings


def options(tmp_path, text, *typed, command=command):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return command.make_context(command.name, ["--config", str(file), *typed]).params


def test_a_file_sets_what_is_not_typed(tmp_path):
    text = """
max-queue = 7
request-timeout = 2.5
allowed-host = ["a.example", "b.example"]
strict-fields = true
image-decoders = 3
step-timeout = 90
"""
    taken = options(tmp_path, text, "--max-queue", "9", "--port", "1")
    settings = serving_settings({}, taken)
    assert (settings.limits.max_queue, settings.limits.request_timeout_s, settings.limits.strict_fields) == (9, 2.5, True)
    assert settings.access.hosts == {"a.example", "b.example"}
    assert (media_limits(taken).decoders.processes, taken["step_timeout"], taken["port"]) == (3, 90.0, 1)
    assert options(tmp_path, 'allowed-host = "a.example"', "--allowed-host", "c.example")["allowed_host"] == ("c.example",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_queue = 1", "max_queue is no option of serve; legal are those of --print-config"),
        ("[clients]\nmax-queue = 1", "clients is no option of serve"),
        ("config = 'x'", "config is no option of serve"),
        ("max-queue = 1.5", r"max-queue is 1.5: '1.5' is not a valid integer range"),
        ("max-queue = true", "max-queue is true: legal is a value of the kind integer range"),
        ("max-queue = [1]", r"max-queue is \[1\]: legal is a value of the kind"),
        ("max-queue = -1", "max-queue is -1: -1 is not in the range x>=0"),
        ("strict-fields = 1", "strict-fields is 1: legal are true and false"),
        ("allowed-host = [true]", r"allowed-host is \[true\]: legal is a list or a value of the kind text"),
        ("role = 'neither'", "role is \"neither\": 'neither' is not one of 'both', 'prefill', 'decode'"),
        ("api-key = 1979-05-27", 'api-key is "1979-05-27": legal is a value'),
        ("max-queue", "legal is TOML, as --print-config writes it"),
    ],
)
def test_what_an_option_does_not_take_is_refused_with_its_name_and_the_file(tmp_path, text, said):
    with pytest.raises(SpecError, match=said) as caught:
        options(tmp_path, text)
    assert str(tmp_path / "serve.toml") in str(caught.value)


@pytest.mark.parametrize(("command", "typed", "default"), [(command, [], ("port", 8000)), (build.command, ["m"], ("jobs", 2))])
def test_the_printed_file_has_every_option_once_and_its_default(tmp_path, command, typed, default):
    result = CliRunner().invoke(command, ["--print-config"])
    assert result.exit_code == 0, result.output
    settings = [line[1:] for line in result.output.splitlines() if line.startswith("#") and not line.startswith(("# ", "#  "))]
    names = [line.partition(" = ")[0] for line in settings]
    known = {name[2:] for option in command.params if isinstance(option, click.Option) for name in option.opts}
    assert sorted(names) == sorted(known - {"config", "print-config", "decided-by"})
    written = "\n".join(line for line in settings if not line.endswith(">"))
    assert tomllib.loads(written)[default[0]] == default[1]
    # What it has as defaults changes nothing.
    assert options(tmp_path, written, *typed, command=command) == command.make_context(command.name, typed).params


def test_options_outside_of_sections_are_printed_last():
    @config_file({"One": ("--a",)})
    @click.option("--b", default=2, help="Second.")
    @click.option("--a", help="First.")
    def run(a, b):
        """A command."""

    output = CliRunner().invoke(click.command("run")(run), ["--print-config"]).output
    assert output.splitlines()[2:] == ["# One", "", "#   First.", "#a = <TEXT>", "", "# Others", "", "#   Second.", "#b = 2"]
    assert "One" not in GROUPS

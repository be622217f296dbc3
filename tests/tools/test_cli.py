"""tools/cli.py: commands, errors as one line with status 1, and a help that imports nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from npucompile import __version__
from npucompile.graphs.errors import NpucompileError, SpecError, VerifyError
from npucompile.tools import cli
from npucompile.tools.cli import COMMANDS, Commands, Home, main


def test_help_and_version_import_neither_torch_nor_a_command():
    script = """
import sys
from npucompile.tools.cli import main
for words in (["--help"], ["--version"], []):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code in (0, 2), ended.code
heavy = {"torch", "numpy", "starlette", "uvicorn", "websockets", "safetensors", "tokenizers", "msgpack"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not [name for name in sys.modules if name.startswith("npucompile.tools.commands.")]
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert __version__ in process.stdout


@pytest.mark.parametrize("words", [["models"], ["deployments"], ["chat", "hello", "--url", "ws://127.0.0.1:1"], ["build", "--help"]])
def test_what_needs_no_torch_does_not_load_it(words):
    """Loading it takes seconds."""
    script = """
import sys
from npucompile.tools.cli import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""
    process = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert "AssertionError" not in process.stderr
    assert process.stdout or "cannot connect" in process.stderr


def test_a_launch_line_is_planned_without_what_partitions_graphs():
    """A plan needs torch for its types, and neither DTensor nor sympy, which take as long to load again."""
    script = """
import sys
from npucompile.tools.cli import main
try:
    main(["import", "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --max-model-len 8192"])
finally:
    assert not {"torch.distributed.tensor", "sympy", "torch._inductor", "transformers"} & set(sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "planned: " in process.stdout


def test_help_lists_every_command_and_a_first_session():
    help_text = CliRunner().invoke(main, ["--help"]).stdout
    for name in COMMANDS:
        assert f"\n  {name} " in help_text
    assert "npucompile serve" in help_text
    assert "NPUCOMPILE_HOME" in help_text


def test_commands_are_the_files_that_hold_one():
    sources = Path(cli.__file__).parent.glob("commands/*.py")
    files = {path.stem.replace("_", " ") for path in sources if "\n@click.command(" in path.read_text()}
    assert {cli.FILES.get(name, name).replace("_", " ") for name in COMMANDS} == files


# `bench serve` has the options of `vllm bench serve`, and six that are refused with the command that has them;
# `serve` has those of a server that faces a network, each of which has a default; `build` has 30, and
# leaves those that few need to `--print-config`.
MOST_OPTIONS = {"bench serve": 30, "build": 31, "serve": 33}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    context = click.Context(main)
    command = main.get_command(context, name)
    assert command.name == name
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden]
    assert len(options) < MOST_OPTIONS.get(name, 25)
    assert all(option.help for option in options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sevre"], "there is no command 'sevre'; did you mean serve?"),
        (["serv"], "did you mean serve?"),
        (["run"], "there is no command 'run'; legal are plan, build, "),
        (["chat", "--model", "x", "hi"], "there is no option --model; legal are --url, --max-tokens, "),
        (["chat", "--max-token", "3", "hi"], "there is no option --max-token; did you mean --max-tokens?"),
    ],
)
def test_an_unknown_name_is_answered_with_those_there_are(arguments, said):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def group_of(callback: Callable[[], object]) -> Commands:
    """A group whose every command does this."""
    group = Commands("group")
    group.get_command = lambda context, name: click.Command(name, callback=callback)
    return group


def raising(error: Exception) -> Commands:
    def fail():
        raise error

    return group_of(fail)


@pytest.mark.parametrize("words", [["--help"], ["say"]])
def test_whoever_has_read_enough_of_the_output_ends_the_command_well(monkeypatch, words):
    """`npucompile models | head -1` under `set -o pipefail`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(SystemExit) as ended:
            group_of(lambda: click.echo("something")).main(words)
    assert ended.value.code == 0


FULL = "for artifacts, caches and temporary files; what is finished is kept, and the next try goes on"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SpecError("16 is not 17"), "16 is not 17"),
        (VerifyError("they differ"), "they differ"),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), "[Errno 13] Permission denied: '/out'"),
        # As write() raises it: without the name of a file.
        *((OSError(number, os.strerror(number)), f"{os.strerror(number)} {FULL}") for number in (errno.ENOSPC, errno.EDQUOT)),
    ],
)
def test_a_refusal_is_one_line_and_status_1(error, message):
    result = CliRunner().invoke(raising(error), ["fail"])
    assert (result.exit_code, result.output) == (1, f"Error: {message}\n")


@pytest.mark.parametrize("error", [KeyError("x"), BrokenPipeError(), RuntimeError("x")])
def test_a_defect_is_not_dressed_up_as_a_refusal(error):
    with pytest.raises(type(error)) as caught:
        raising(error).main(["fail"], standalone_mode=False)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("error", [NpucompileError("error code is 207008"), RuntimeError("error code is 207008")])
def test_an_error_of_a_device_says_what_to_type_next(error):
    result = CliRunner().invoke(raising(error), ["fail"])
    said = "".join(result.exception.__notes__) if isinstance(error, RuntimeError) else result.stderr
    assert "207008: there are no more streams. Next: npucompile serve ARTIFACT --off buckets" in said


def test_home_is_where_the_environment_says(monkeypatch, tmp_path):
    calls = []

    @click.command("look")
    @click.pass_obj
    def look(home):
        calls.append(home)

    monkeypatch.setattr(main, "get_command", lambda context, name: look)
    CliRunner().invoke(main, ["look"], env={"NPUCOMPILE_HOME": str(tmp_path / "here")})
    CliRunner().invoke(main, ["look"], env={"NPUCOMPILE_HOME": None, "HOME": str(tmp_path)})
    CliRunner().invoke(main, ["look"], env={"NPUCOMPILE_HOME": "", "HOME": str(tmp_path)})
    assert [home.root for home in calls] == [tmp_path / "here", tmp_path / ".npucompile", tmp_path / ".npucompile"]
    assert calls[0].environment["NPUCOMPILE_HOME"] == str(tmp_path / "here")
    assert calls[0].environment["PATH"] == os.environ["PATH"]
    assert Home(tmp_path, {}).artifacts == tmp_path / "artifacts"
    assert Home(tmp_path, {}).cache == tmp_path / "cache"


def test_variables_reach_this_process_and_those_it_starts(monkeypatch, tmp_path):
    """Libraries read them when they are loaded; `Home` is what processes are started with."""
    monkeypatch.setenv("NPUCOMPILE_TEST", "before")
    home = Home(tmp_path, {"PATH": "/bin", "NPUCOMPILE_TEST": "before"})
    changed = home.with_variables({"NPUCOMPILE_TEST": "after"})
    assert os.environ["NPUCOMPILE_TEST"] == "after"
    assert changed == Home(tmp_path, {"PATH": "/bin", "NPUCOMPILE_TEST": "after"})
    assert home.environment["NPUCOMPILE_TEST"] == "before"
    assert changed.without_variable("NPUCOMPILE_TEST") == Home(tmp_path, {"PATH": "/bin"})
    assert "NPUCOMPILE_TEST" not in os.environ

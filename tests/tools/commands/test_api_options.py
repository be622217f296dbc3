"""tools/commands/api_options.py: the options arrive as one setting."""

from __future__ import annotations

from pathlib import Path

import click
from click.testing import CliRunner

from npucompile.tools.commands import serve
from npucompile.tools.commands.api_options import api_options
from npucompile.tools.serve.api_settings import OPENAI, ApiSettings


@click.command()
@click.option("--port", type=int)
@api_options
def command(port, api):
    click.echo(f"{port} {api!r}")


def test_the_options_arrive_as_one_setting(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("")
    assert CliRunner().invoke(command, []).output == f"None {ApiSettings()!r}\n"
    arguments = ["--port", "1", "--served-model-name", "a", "--served-model-name", "b", "--chat-template", str(file)]
    arguments += ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--default-sampling", "openai"]
    expected = ApiSettings(("a", "b"), Path(file), "qwen3", "hermes", OPENAI)
    assert CliRunner().invoke(command, arguments).output == f"1 {expected!r}\n"


def test_serve_has_them():
    assert {"names", "chat_template", "reasoning_parser", "tool_call_parser", "sampling"} <= {
        option.name for option in serve.command.params
    }

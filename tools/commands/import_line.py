"""`npucompile import`: reads a launch line of SGLang or vLLM, and says how the same is built and served here."""

from __future__ import annotations

import json
import sys

import click

from ...graphs.errors import SpecError
from ...graphs.paths import file_named
from ..advice import adviser
from ..builder.settings.place import TARGETS


@click.command("import")
@click.argument("line", metavar="LINE", nargs=-1, required=True)
@click.option("--model", metavar="MODEL", help="Checkpoint directory or preset that the line's model is.  [default: by its name]")
@click.option(
    "--target", "target_name", type=click.Choice(TARGETS[1:]), help="Machine, where the line does not say it.  [default: ascend-a3]"
)
@click.option("--out", metavar="DIR", help="Directory of the artifact in the commands.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Variable of the script, whatever it sets it to itself; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    line: tuple[str, ...], model: str | None, target_name: str | None, out: str | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Say what becomes of every flag and variable of LINE, a launch of SGLang or vLLM in quotes, a file with such lines, or - for input.

    Nothing is run. A script may set variables and launch several servers, prefill and decode apart, and routers: the commands at the end
    build what they serve and start each server, a line a machine.

    \b
    Examples: npucompile import 'vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --max-model-len 8192'
              npucompile import run_decode.sh --model qwen3.5-397b
    """
    imported = adviser("launch_lines.imported").import_text(text_of(line), model, target_name, out, _pairs(settings))
    lines = adviser("launch_lines.report").report(imported)
    click.echo(json.dumps(imported.as_dict(), indent=1) if as_json else "\n".join(lines))


def text_of(line: tuple[str, ...]) -> str:
    """The text to read: standard input, a file, or the line itself, in one word or several.

    Raises:
        SpecError: a file cannot be read as text.
    """
    if line == ("-",):
        return sys.stdin.read()
    if len(line) > 1:
        return " ".join(line)
    if path := file_named(line[0]):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{path} cannot be read as a script: {error}") from None
    if line[0] and not any(map(str.isspace, line[0])):
        raise SpecError(f"{line[0]}: no such file; legal is a launch line in quotes, a file with such lines, or - for input")
    return line[0]


def _pairs(settings: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for each in settings:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise SpecError(f"--set {each}: legal is NAME=VALUE")
        pairs[name] = value
    return pairs

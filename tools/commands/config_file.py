"""`--config FILE`: the options of a command as TOML, and `--print-config`, which prints such a file with what each option says."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import SpecError
from .option_groups import plain

WIDTH = 120
"""Of the comments of a printed file."""
_OWN = ("config", "print-config", "help", "decided-by")
"""Those of no file: what reads and prints one, and what a repeated build says."""


def config_file(groups: Mapping[str, Sequence[str]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds both options to a command.

    Args:
        groups: sections of a printed file: title to option names, as in "--port".
    """

    def added(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--print-config", is_flag=True, is_eager=True, expose_value=False, callback=_printed(groups),
            help="Print a file for --config with every option, what it says and its default, and end.",
        )(command)  # fmt: skip
        return click.option(
            "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), is_eager=True, expose_value=False, callback=_read,
            help="TOML file of options, name = value; what is typed goes before.",
        )(command)  # fmt: skip

    return added


def _read(ctx: click.Context, param: click.Parameter, file: Path | None) -> None:
    """Makes the options of a file the defaults of a command."""
    if file is None:
        return
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"--config {file}: {error}; legal is TOML, as --print-config writes it") from None
    known = dict(_options(ctx))
    defaults: dict[str, Any] = {}
    for key, value in said.items():
        option = known.get(key)
        if option is None:
            raise SpecError(f"--config {file}: {key} is no option of {ctx.command.name}; legal are those of --print-config")
        try:
            defaults[option.name or ""] = _taken(ctx, option, value)
        except click.BadParameter as error:
            raise SpecError(f"--config {file}: {key} is {json.dumps(value, default=str)}: {error.message}") from None
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _taken(ctx: click.Context, option: click.Option, value: Any) -> Any:
    """A value as click takes a default. Numbers are read as they would be typed, so that 1.5 is no whole number."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("legal are true and false")
        return value
    values = value if isinstance(value, list) else [value]
    plain_values = all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values)
    if not plain_values or (isinstance(value, list) and not option.multiple):
        raise click.BadParameter(f"legal is {'a list or ' if option.multiple else ''}a value of the kind {option.type.name}")
    words = [str(each) for each in values]
    typed: Any = words if option.multiple else words[0]
    option.type_cast_value(ctx, typed)
    return typed


def _options(ctx: click.Context) -> Iterator[tuple[str, click.Option]]:
    for option in ctx.command.get_params(ctx):
        if isinstance(option, click.Option):
            for name in option.opts:
                if name.startswith("--") and name[2:] not in _OWN:
                    yield name[2:], option


def _printed(groups: Mapping[str, Sequence[str]]) -> Callable[[click.Context, click.Parameter, bool], None]:
    def print_config(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
        if asked:
            click.echo("\n".join(lines(ctx, groups)))
            ctx.exit()

    return print_config


def lines(ctx: click.Context, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A file with every option of a command, all of them comments."""
    known = dict(_options(ctx))
    yield f"# Options of {ctx.command_path} as --config reads them; take away the # before a name to set it."
    named = {name for names in groups.values() for name in names}
    rest = [f"--{name}" for name in known if f"--{name}" not in named]
    for title, names in (*groups.items(), *([("Others", rest)] if rest else [])):
        yield from ("", f"# {title}")
        for name, option in ((name, known[name[2:]]) for name in names if name[2:] in known):
            yield from ("", *textwrap.wrap(option.help or "", WIDTH, initial_indent="#   ", subsequent_indent="#   "))
            yield f"#{name[2:]} = {_shown(ctx, option)}"


def _shown(ctx: click.Context, option: click.Option) -> str:
    """The default as TOML; where there is none, what the option takes."""
    default = option.get_default(ctx)
    if option.is_flag:
        return "<true>" if default is None else str(default).lower()
    if option.multiple:
        return "[]"
    return json.dumps(default) if isinstance(default, str | int | float) else f"<{plain(option.make_metavar(ctx)).strip('[]')}>"

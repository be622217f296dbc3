"""The help of a command with many options, in sections."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import click

OTHER = "Other options"
WIDTH = 120
RANGE = r"(?:[-\d.]+<=?)?x(?:[<>]=?[-\d.]+)?"
"""Legal numbers as click writes them."""


def grouped(groups: Mapping[str, Sequence[str]], base: type[click.Command] = click.Command) -> type[click.Command]:
    """A class of commands whose help has these sections, in this order, then all other options.

    Args:
        groups: title to option names, as in "--port".
        base: what else such a command does.
    """

    class GroupedCommand(base):  # type: ignore[valid-type, misc]
        """See `grouped`."""

        def get_help(self, ctx: click.Context) -> str:
            """The help, as wide as the terminal up to WIDTH: most options take a line."""
            ctx.max_content_width = ctx.max_content_width or WIDTH
            return str(super().get_help(ctx))

        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            """Writes the sections."""
            records = {name: record for option in self.get_params(ctx) if (record := _record(option, ctx)) for name in option.opts}
            rest = [record for option in self.get_params(ctx) if (record := _rest(option, ctx, groups))]
            for title, names in groups.items():
                # Hidden options have no record.
                if shown := [records[name] for name in names if name in records]:
                    with formatter.section(title):
                        formatter.write_dl(shown)
            if rest:
                with formatter.section(OTHER):
                    formatter.write_dl(rest)

    return GroupedCommand


def _rest(option: click.Parameter, ctx: click.Context, groups: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    named = {name for names in groups.values() for name in names}
    return None if named & set(option.opts) else _record(option, ctx)


def _record(option: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    """An option and its line, without the range of its numbers, which an error names."""
    record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
    if record is None:
        return None
    name, said = record
    # The range stands behind a default or in a bracket of its own.
    return plain(name), re.sub(rf"\s*\[{RANGE}\]", "", re.sub(rf"; {RANGE}\]", "]", said))


def plain(metavar: str) -> str:
    """What an option takes, in a letter where it is a number."""
    return metavar.replace("INTEGER RANGE", "N").replace("FLOAT RANGE", "X")

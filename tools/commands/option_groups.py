"""The help of a command with many options, in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

OTHER = "Other options"


def grouped(groups: Mapping[str, Sequence[str]], base: type[click.Command] = click.Command) -> type[click.Command]:
    """A class of commands whose help has these sections, in this order, then all other options.

    Args:
        groups: title to option names, as in "--port".
        base: what else such a command does.
    """

    class GroupedCommand(base):  # type: ignore[valid-type, misc]
        """See `grouped`."""

        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            """Writes the sections."""
            records = {name: record for option in self.get_params(ctx) if (record := option.get_help_record(ctx)) for name in option.opts}
            rest = [record for option in self.get_params(ctx) if (record := _rest(option, ctx, groups))]
            for title, names in groups.items():
                with formatter.section(title):
                    formatter.write_dl([records[name] for name in names])
            if rest:
                with formatter.section(OTHER):
                    formatter.write_dl(rest)

    return GroupedCommand


def _rest(option: click.Parameter, ctx: click.Context, groups: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    named = {name for names in groups.values() for name in names}
    return None if named & set(option.opts) else option.get_help_record(ctx)

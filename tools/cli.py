"""Turns a command line into calls: one file a command, loaded when it is asked for; the only reader of the environment."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..graphs.errors import NpucompileError

COMMANDS = {
    "build": "Build an artifact: one verified executable per bucket.",
    "serve": "Serve an artifact over websockets.",
    "chat": "Stream an answer from a running server.",
    "generate": "Generate offline, without a server.",
    "inspect": "Show an artifact's graphs, costs and memory.",
    "verify": "Repeat the build's proof that every bucket equals the reference.",
    "bench": "Measure builds, steps and throughput.",
    "deployments": "List published deployments that can be built by name.",
    "doctor": "Say what this machine can build and run, and what it lacks.",
    "models": "List the models that can be named.",
}


@dataclass(frozen=True)
class Home:
    """Where npucompile keeps things.

    Attributes:
        root: `$NPUCOMPILE_HOME`, or `~/.npucompile`.
        environment: for processes that this one starts.
    """

    root: Path
    environment: Mapping[str, str]

    @property
    def artifacts(self) -> Path:
        """Where builds go when nothing else is said."""
        return self.root / "artifacts"

    @property
    def cache(self) -> Path:
        """What may be removed at any time."""
        return self.root / "cache"


class Commands(click.Group):
    """A group whose commands live in `tools/commands/<name>.py` as `command`; `--help` alone imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the pipeline."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Imports one command."""
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".commands.{name}", __package__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; a refusal, ours or that of the file system, prints its reason and exits with 1."""
        try:
            return super().invoke(ctx)
        except NpucompileError as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(str(error)) from None


@click.command(
    cls=Commands,
    epilog="A first session: `npucompile serve` (builds the bundled model when there is nothing to serve), then, in another "
    'terminal, `npucompile chat "In the beginning"`.',
)
@click.version_option(__version__, prog_name="npucompile")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Ahead-of-time compiled LLM inference: build on any machine, verify there, serve exactly what was verified.

    Artifacts and caches live in ~/.npucompile, or where $NPUCOMPILE_HOME says.
    """
    ctx.obj = Home(Path(os.environ.get("NPUCOMPILE_HOME") or Path.home() / ".npucompile"), dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())

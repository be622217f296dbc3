"""The command line: loads the file of the requested command. Nothing else reads the environment."""

from __future__ import annotations

import contextlib
import difflib
import errno
import gc
import importlib
import os
import select
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import click

from .. import __version__
from ..graphs.control_group import processors
from ..graphs.errors import NpucompileError
from ..lowering import isa
from ..lowering.device_error import known, with_way_out

COMMANDS = {
    "plan": "Predict latencies, and search the layout for a workload.",
    "build": "Build an artifact: one verified executable per bucket.",
    "quantize": "Write the quantised checkpoint of a float one.",
    "serve": "Serve an artifact over websockets.",
    "chat": "Stream a response from a running server.",
    "generate": "Continue a prompt without a server.",
    "inspect": "Show an artifact's graphs, costs and memory.",
    "diff": "Show what two artifacts differ in.",
    "experts": "Plan which rank holds which experts, by counts.",
    "verify": "Verify again that every bucket equals the reference.",
    "bringup": "Find what is wrong on a device.",
    "golden": "Record what transformers answers, for bringup --golden.",
    "bench": "Measure builds, load time, steps and throughput.",
    "bench host": "Measure how many streams this machine's host carries.",
    "bench serve": "Load a running server and report its latencies.",
    "replay": "Repeat what a server recorded, and compare every token.",
    "import": "Read a launch line of SGLang or vLLM into ours.",
    "explain": "Say what a build decided, and who decided it.",
    "deployments": "List the published deployments that can be built.",
    "calibrate": "Fit the parameters of plan to measurements.",
    "doctor": "Check what this machine can build and run.",
    "models": "List the model presets.",
}

FILES = {"import": "import_line"}
"""Files of commands whose names are words of Python."""


@dataclass(frozen=True)
class Home:
    """The directories of npucompile, and its environment.

    Attributes:
        root: `$NPUCOMPILE_HOME`, or `~/.npucompile`.
        environment: variables of this process, passed on to those it starts.
    """

    root: Path
    environment: Mapping[str, str]

    def with_variables(self, variables: Mapping[str, str]) -> Home:
        """The same with these variables, which are set in this process too: libraries that it loads afterwards read them."""
        os.environ.update(variables)
        return replace(self, environment={**self.environment, **variables})

    def without_variable(self, name: str) -> Home:
        """The same without a variable, which is unset in this process too."""
        os.environ.pop(name, None)
        return replace(self, environment={other: value for other, value in self.environment.items() if other != name})

    @property
    def artifacts(self) -> Path:
        """The default directory of builds."""
        return self.root / "artifacts"

    @property
    def cache(self) -> Path:
        """What may be removed at any time."""
        return self.root / "cache"

    @property
    def temporary(self) -> Path:
        """Where torch unpacks executables."""
        return Path(self.environment.get("TMPDIR") or "/tmp")


class Commands(click.Group):
    """A group whose commands are `command` in `tools/commands/<name>.py`; `--help` imports none of them.

    A name may have two words, of which the first is a command itself; the file has `_` between them.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the pipeline."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Imports one command."""
        if name not in COMMANDS:
            return None
        module = FILES.get(name, name.replace(" ", "_"))
        command: click.Command = importlib.import_module(f".commands.{module}", __package__).command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first two words name, else the first."""
        if (name := " ".join(args[:2])) in COMMANDS:
            return name, self.get_command(ctx, name), args[2:]
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            ctx.fail(f"there is no command {args[0]!r}; {_near(args[0], COMMANDS)}")

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any) -> click.Context:
        """Parses arguments, and prints the help if they ask for it."""
        with _read_or_not():
            return super().make_context(info_name, args, parent, **extra)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; errors of npucompile and of the file system are printed without a traceback, with exit status 1."""
        # Graphs are many objects that stay: to look for cycles after every 700 of them takes a fifth of what `inspect` does.
        gc.set_threshold(50_000, 20, 50)
        try:
            with _read_or_not():
                return super().invoke(ctx)
        except click.NoSuchOption as error:
            options = [option for option in error.ctx.command.params if isinstance(option, click.Option)] if error.ctx else []
            near = _near(error.option_name, [name for option in options for name in option.opts])
            raise click.NoSuchOption(error.option_name, f"there is no option {error.option_name}; {near}", ctx=error.ctx) from None
        except NpucompileError as error:
            raise click.ClickException(with_way_out(str(error))) from None
        except RuntimeError as error:
            # A defect keeps its traceback, a device's error too.
            if found := known(str(error)):
                code, row = found
                error.add_note(f"{code}: {row.meaning}. Next: {row.next}")
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                where = error.filename or "artifacts, caches and temporary files"
                raise click.ClickException(f"{error.strerror} for {where}; what is finished is kept, and the next try goes on") from None
            if error.filename is None:
                raise
            raise click.ClickException(str(error)) from None


def _near(name: str, legal: Iterable[str]) -> str:
    """The legal names that one may have meant, or else all."""
    bare = {word.lstrip("-"): word for word in legal}
    near = [bare[word] for word in difflib.get_close_matches(name.lstrip("-"), bare)]
    return f"did you mean {' or '.join(near)}?" if near else f"legal are {', '.join(bare.values())}"


@contextlib.contextmanager
def _read_or_not() -> Iterator[None]:
    """Ends the command with status 0 where whoever read its output, such as `head`, has enough of it."""
    try:
        yield
    except BrokenPipeError:
        if not _unread(sys.stdout):
            raise
        # What is buffered goes nowhere, or the interpreter would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None


def _unread(stream: TextIO) -> bool:
    """Whether nobody reads a pipe any more."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def home_of_process() -> Home:
    """The directories that the environment names; sets the variables by which torch keeps to its threads and instruction sets.

    Raises:
        SpecError: there are no such instruction sets here.
    """
    home = Home(Path(os.environ.get("NPUCOMPILE_HOME") or Path.home() / ".npucompile"), dict(os.environ))
    if "OMP_NUM_THREADS" not in home.environment and (count := processors()) < len(os.sched_getaffinity(0)):
        # Before torch is loaded, here and in processes that are started: threads beyond a quota of a control group stop all others.
        home = home.with_variables({"OMP_NUM_THREADS": str(count)})
    if isa.ISA:
        home = home.with_variables(isa.variables())
        isa.in_use()
    return home


@click.command(
    cls=Commands,
    epilog="To begin: `npucompile serve`, which builds the bundled model if nothing is built yet; then, in another terminal, "
    '`npucompile chat "In the beginning"`.',
)
@click.version_option(__version__, prog_name="npucompile")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Ahead-of-time compiled LLM inference: build on any machine, verify there, serve exactly what was verified.

    Artifacts and caches are stored in ~/.npucompile, or in $NPUCOMPILE_HOME if it is set.
    """
    try:
        ctx.obj = home_of_process()
    except NpucompileError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())

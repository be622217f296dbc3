"""Options of `build` and `serve` by the names that people know from SGLang and vLLM.

A name that means exactly the same is taken for ours. One that does not is refused with what says the same here. The tables of
tools/advisor/launch_lines know all other flags of both, and say what becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

from ...graphs.errors import SpecError
from ..advice import adviser
from ..builder.settings.table import SETTINGS
from ..serve.options import OPTIONS

MODEL = ""
"""Stands for the first argument of a command."""

_MODEL = {"--model-path": MODEL, "--model": MODEL}
SAME: Mapping[str, Mapping[str, str]] = {
    "build": _MODEL | {name: f"--{setting.option}" for setting in SETTINGS for name in setting.same},
    "serve": _MODEL | {name: f"--{option.option}" for option in OPTIONS for name in option.same},
}
"""Their name to ours where both mean the same, by command."""

_RANKS = {"--tp-size": "tp", "--tensor-parallel-size": "tp", "--dp-size": "dp", "--data-parallel-size": "dp"}
"""Names of the two sizes of a mesh, which mean the same in both engines where one of them alone is more than 1."""

_REFUSED = {name: legal for setting in SETTINGS for name, legal in setting.otherwise.items()}
_OURS = {name: setting.option for setting in SETTINGS if setting.option != "family" for name in (f"--{setting.option}", *setting.same)}
_BUILT = _REFUSED | {
    name: f"legal is an option of `npucompile build`: --{ours}" for name, ours in (_OURS | dict.fromkeys(_RANKS, "mesh")).items()
}
OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "build": _REFUSED | {f"--{option.option}": "legal is an option of serve" for option in OPTIONS},
    "serve": {name: f"the build decides it; {legal}" for name, legal in _BUILT.items()}
    | {"--stream-interval-ms": "it is gone, tokens of each step are sent at once; legal is to leave it out"},
}
"""Their name, or one that was ours, to what says the same here, by command."""


class KnowsOtherNames(click.Command):
    """A command that takes the names of SAME, and says of other engines' names what is legal here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments.

        Raises:
            SpecError: an option of SGLang or vLLM that is none here.
        """
        given = self.name or ""
        try:
            return super().parse_args(ctx, renamed(given, args))
        except click.NoSuchOption as error:
            raise SpecError(elsewhere(given, error.option_name)) if elsewhere(given, error.option_name) else error from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The epilog, and the names that mean the same."""
        super().format_epilog(ctx, formatter)
        taken = {**SAME[self.name or ""], **({name: "--mesh" for name in _RANKS} if self.name == "build" else {})}
        names = ", ".join(f"{theirs} ({ours or 'the first argument'})" for theirs, ours in taken.items())
        formatter.write_paragraph()
        formatter.write_text(
            f"Names of SGLang and vLLM that mean the same are taken too: {names}. `npucompile import` reads a whole launch line."
        )


def renamed(command: str, args: list[str]) -> list[str]:
    """Arguments with our names; numbers behind a list of SGLang's are joined by commas."""
    out: list[str] = []
    rest, ranks = list(args), dict[str, str]()
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        theirs, equals, value = word.partition("=")
        ours = SAME[command].get(theirs)
        if command == "build" and theirs in _RANKS and (equals or rest):
            ranks[_RANKS[theirs]] = value if equals else rest.pop(0)
            continue
        if ours is None:
            out.append(word)
            continue
        values = [value] if equals else [rest.pop(0)] if rest else []
        while ours == "--buckets" and rest and rest[0].isdecimal():
            values.append(rest.pop(0))
        out += [*([ours] if ours else []), *([",".join(values)] if values else [])]
    return [*out, *_mesh(ranks, out)]


def _mesh(ranks: Mapping[str, str], others: list[str]) -> list[str]:
    """`--mesh` for the two sizes."""
    if not ranks:
        return []
    tp, dp = ranks.get("tp", "1"), ranks.get("dp", "1")
    if any(word.partition("=")[0] == "--mesh" for word in others):
        raise SpecError(f"--mesh is given beside tp {tp} and dp {dp} by other names; legal is --mesh alone")
    if not (tp.isdecimal() and dp.isdecimal() and int(tp) and int(dp)):
        raise SpecError(f"tp is {tp!r} and dp is {dp!r}; legal are whole numbers from 1, or --mesh dp=G,tp=R for G groups of R ranks")
    if int(tp) > 1 and int(dp) > 1:
        inner = f"--mesh dp={dp},tp={int(tp) // int(dp)}" if int(tp) % int(dp) == 0 else "nothing"
        raise SpecError(
            f"tp {tp} with dp {dp} is --mesh dp={dp},tp={tp} where vLLM means it, {inner} where SGLang does with --enable-dp-attention; "
            "legal is --mesh"
        )
    return ["--mesh", f"dp={dp},tp={tp}"]


def elsewhere(command: str, name: str) -> str:
    """What is said of an option that is none of a command's; "" where neither SGLang nor vLLM has it."""
    if name in OTHERWISE[command]:
        return f"{name}: {OTHERWISE[command][name]}"
    tables = adviser("launch_lines.tables")
    row = tables.engine("sglang").flags.get(name) or tables.engine("vllm").flags.get(name) or tables.of_topic(name)
    why = f"{tables.topics()[row.topic].why}; " if row and row.topic else ""
    return f"{name} is a flag of SGLang or vLLM: {why}`npucompile import` says what becomes of a whole launch line" if row else ""

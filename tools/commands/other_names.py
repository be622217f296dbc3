"""Options of `build` and `serve` by the names that people know from SGLang and vLLM.

A name that means exactly the same is taken for ours. One that does not is refused with what says the same here. The tables of
tools/launch_lines know all other flags of both, and say what becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

from ...graphs.errors import SpecError
from ..launch_lines.tables import engine, topics

MODEL = ""
"""Stands for the first argument of a command."""

SAME: Mapping[str, Mapping[str, str]] = {
    "build": {
        "--model-path": MODEL,
        "--model": MODEL,
        "--context-length": "--max-model-len",
        "--cuda-graph-bs": "--buckets",
        "--cuda-graph-bs-decode": "--buckets",
        "--speculative-num-steps": "--speculative-tokens",
        "--num-speculative-tokens": "--speculative-tokens",
        "--spec-tokens": "--speculative-tokens",
        "--speculative-draft-model-path": "--draft-model",
        "--spec-model": "--draft-model",
    },
    "serve": {
        "--model-path": MODEL,
        "--model": MODEL,
        "--max-queued-requests": "--max-queue",
        "--max-num-queued-reqs": "--max-queue",
        "--ssl-certfile": "--tls-cert",
        "--ssl-keyfile": "--tls-key",
        "--watchdog-timeout": "--step-timeout",
        "--dist-timeout": "--join-timeout",
        "--distributed-timeout-seconds": "--join-timeout",
        "--shutdown-timeout": "--drain-timeout",
    },
}
"""Their name to ours where both mean the same, by command."""

_MEMORY = "memory is planned in bytes, not by a share; --kv-cache-memory bounds the pages of a rank, --max-total-tokens those of a dp group"
_CHUNK = "legal is --prefill, with tokens of one prompt in one dp group, as in --prefill 2048"
_RANKS = {"--tp-size": "tp", "--tensor-parallel-size": "tp", "--dp-size": "dp", "--data-parallel-size": "dp"}
"""Names of the two sizes of a mesh, which mean the same in both engines where one of them alone is more than 1."""

OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "build": {
        "--max-running-requests": "it counts all dp groups; legal is --max-num-seqs, for each of them",
        "--mem-fraction-static": _MEMORY,
        "--gpu-memory-utilization": _MEMORY,
        "--kv-cache-memory-bytes": "it counts recurrent states too; legal is --kv-cache-memory, for the KV pages of a rank",
        "--cudagraph-capture-sizes": "it counts tokens of a step, drafts included; legal is --buckets, which counts requests",
        "--cuda-graph-max-bs": "legal is --buckets with all sizes, as in --buckets 1,2,4,...,32",
        "--cuda-graph-max-bs-decode": "legal is --buckets with all sizes, as in --buckets 1,2,4,...,32",
        "--max-cudagraph-capture-size": "legal is --buckets with all sizes, as in --buckets 1,2,4,...,32",
        "--chunked-prefill-size": f"it counts the tokens of all dp groups; {_CHUNK}",
        "--max-num-batched-tokens": f"it counts decode steps too; {_CHUNK}",
        "--max-prefill-tokens": f"it counts all prompts of a step; {_CHUNK}, or --prefill 4x512 for several",
        "--speculative-num-draft-tokens": "it counts the last known token too; legal is --speculative-tokens, one less",
        "--speculative-token-map": "it names a file of tokens; legal is --draft-vocab-size, the number of the vocabulary's first ones",
        "--host": "legal is an option of serve",
        "--port": "legal is an option of serve",
        "--served-model-name": "legal is an option of serve",
    },
    "serve": {
        name: f"the build decides it; legal is an option of `npucompile build`: {ours}"
        for name, ours in {
            "--tp-size": "--mesh",
            "--tensor-parallel-size": "--mesh",
            "--dp-size": "--mesh",
            "--data-parallel-size": "--mesh",
            "--context-length": "--max-model-len",
            "--max-model-len": "--max-model-len",
            "--max-running-requests": "--max-num-seqs, for each dp group",
            "--max-num-seqs": "--max-num-seqs",
            "--max-total-tokens": "--max-total-tokens",
            "--mem-fraction-static": "--max-total-tokens",
            "--gpu-memory-utilization": "--max-total-tokens",
            "--cuda-graph-bs": "--buckets",
            "--cuda-graph-max-bs": "--buckets",
            "--cudagraph-capture-sizes": "--buckets",
            "--chunked-prefill-size": "--prefill",
            "--max-num-batched-tokens": "--prefill",
            "--quantization": "--quantization",
            "--dtype": "--dtype",
            "--kv-cache-dtype": "--kv-cache-dtype",
            "--speculative-num-steps": "--speculative-tokens",
        }.items()
    },
}
"""Their name to what says the same here, by command."""


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
    """`--mesh` for the two sizes.

    Raises:
        SpecError: both are more than 1, which the engines mean differently, or the mesh is given too.
    """
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
    for program in ("sglang", "vllm"):
        row = engine(program).flags.get(name)
        if row is not None:
            why = f"{topics()[row.topic].why}; " if row.topic else ""
            return f"{name} is a flag of {program}'s: {why}`npucompile import` says what becomes of a whole launch line"
    return ""

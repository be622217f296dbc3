"""Measures an artifact beside other engines on the same checkpoint: start, prefill and decode, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from ...bench.report import Column, ReportTable, Value
from ...bench.stats import Clock, Spread, interleave, ratio, spread
from ...bench.streams import StreamLoad
from ...progress import Progress
from .process import PeerError, PeerProcess

THROUGHPUT_COLUMNS = (
    Column("streams", "streams", 0),
    Column("prompts", "prompt tokens"),
    Column("engine", "engine"),
    Column("prefill_tok_s", "prefill tok/s", 0),
    Column("prefill_range", "range"),
    Column("prefill_ratio", "prefill, first / this"),
    Column("decode_tok_s", "decode tok/s", 1),
    Column("decode_range", "range"),
    Column("decode_ratio", "decode, first / this"),
    Column("first_tokens", "equal first tokens"),
)
START_COLUMNS = (Column("engine", "engine"), Column("load_s", "load to first token s"), Column("remark", "how, or why not"))


@dataclass(frozen=True)
class Side:
    """One of those compared.

    Attributes:
        name: in the tables.
        open: starts its process.
        model: path that it loads.
        remark: what is to be known of its weights.
    """

    name: str
    open: Callable[[], PeerProcess]
    model: str
    remark: str = ""


@dataclass(frozen=True)
class Served:
    """One load, as one side served it.

    Attributes:
        prefill_s: until every stream had its first token.
        decode_s: from then to the last token.
        decoded: tokens of that time.
    """

    token_ids: tuple[tuple[int, ...], ...]
    prefill_s: float
    decode_s: float
    decoded: int


def serve(process: PeerProcess, load: StreamLoad, vocab: int) -> Served | PeerError:
    """Serves one load; returns the error where it fails, since the others go on."""
    try:
        reply = process.ask("generate", prompts=load.prompts(vocab), tokens=load.tokens)
    except PeerError as error:
        return error
    return Served(tuple(map(tuple, reply["token_ids"])), reply["prefill_s"], reply["decode_s"], reply["decoded"])


def rows(load: StreamLoad, results: Mapping[str, Sequence[Served]]) -> Iterator[dict[str, Value]]:
    """The table rows of one load.

    Args:
        results: of each side, the first of them ours, one a round.
    """
    rates = {
        name: (
            [sum(load.lengths) / each.prefill_s for each in served],
            [each.decoded / each.decode_s for each in served],
        )
        for name, served in results.items()
    }
    first = next(iter(results))
    ours = results[first][0].token_ids
    for name, served in results.items():
        equal = sum(a[0] == b[0] for a, b in zip(ours, served[0].token_ids, strict=True))
        prompts = f"{min(load.lengths)} to {max(load.lengths)}" if load.mixed else str(load.prompt_tokens)
        line: dict[str, Value] = {"streams": load.streams, "prompts": prompts, "engine": name, "first_tokens": f"{equal} of {load.streams}"}
        for what, own, mine in zip(("prefill", "decode"), rates[first], rates[name], strict=True):
            found = spread(mine)
            line[f"{what}_tok_s"], line[f"{what}_range"] = found.median, f"{found.low:,.0f}..{found.high:,.0f}"
            line[f"{what}_ratio"] = ratio(own, mine) if name != first else None
        yield line


def standing(lines: Sequence[Mapping[str, Value]]) -> list[str]:
    """Where the first side is behind the fastest of the others, the worst first, or that it is nowhere; nothing without others.

    Args:
        lines: table rows of all loads, those of the first side with no ratio.
    """
    behind, compared = list[tuple[float, str]](), 0
    for what in ("prefill", "decode"):
        best: dict[tuple[Value, Value], tuple[float, Value]] = {}
        for line in lines:
            if isinstance(found := line[f"{what}_ratio"], Spread):
                key = line["streams"], line["prompts"]
                best[key] = min(best.get(key, (math.inf, "")), (found.median, line["engine"]))
        compared += len(best)
        for (streams, prompts), (found_ratio, side) in best.items():
            if found_ratio < 1:
                behind.append((found_ratio, f"{what} at {streams} streams, prompts of {prompts} tokens: {found_ratio:.2f} times {side}"))
    if behind:
        return [f"behind in {len(behind)} of {compared}: {'; '.join(text for _, text in sorted(behind))}"]
    return [f"ahead of the best of the others in all {compared}"] if compared else []


def throughput(load: StreamLoad, processes: Mapping[str, PeerProcess], rounds: int, vocab: int) -> tuple[list[dict[str, Value]], list[str]]:
    """Serves a load on all sides in turns.

    Returns:
        rows, and a sentence for each side that failed.
    """
    results = interleave({name: partial(serve, process, load, vocab) for name, process in processes.items()}, rounds)
    served: dict[str, list[Served]] = {}
    failed = []
    for name, outcomes in results.items():
        if errors := [each for each in outcomes if isinstance(each, PeerError)]:
            failed.append(f"{name} failed at {load.streams} streams: {errors[0]}")
        else:
            served[name] = [each for each in outcomes if isinstance(each, Served)]
    return list(rows(load, served)) if served else [], failed


def start(
    side: Side, dtype: str, threads: int, loads: Sequence[StreamLoad], prompt: Sequence[int], clock: Clock = time.monotonic
) -> tuple[PeerProcess, dict[str, Value]]:
    """Starts a side that has room for all loads, and waits for its first token.

    Returns:
        its process, and its row in the table of starts.

    Raises:
        PeerError: it cannot be measured.
    """
    process = side.open()
    try:
        began = clock()
        max_model_len = max(max(load.lengths) + load.tokens for load in loads)
        most = max(load.streams for load in loads)
        reply = process.ask("load", model=side.model, dtype=dtype, threads=threads, max_model_len=max_model_len, max_num_seqs=most)
        process.ask("generate", prompts=[list(prompt)], tokens=1)
        taken = clock() - began
    except BaseException:
        process.close()
        raise
    remark = ", ".join(filter(None, (process.version, str(reply["loaded"]), side.remark)))
    return process, {"engine": side.name, "load_s": taken, "remark": remark}


def compare(
    sides: Sequence[Side],
    refused: Mapping[str, str],
    dtype: str,
    threads: int,
    loads: Sequence[StreamLoad],
    vocab: int,
    rounds: int,
    progress: Progress,
) -> list[ReportTable]:
    """The tables of throughput and of starts.

    Args:
        sides: ours first.
        refused: why others are not among them, by name.

    Raises:
        PeerError: ours does not start.
    """
    prompt = loads[0].prompts(vocab)[0]
    reasons = dict(refused)
    processes: dict[str, PeerProcess] = {}
    starts, lines, notes = list[dict[str, Value]](), list[dict[str, Value]](), list[str]()
    with ExitStack() as stack:
        for side in sides:
            try:
                # The first start fills the page cache.
                start(side, dtype, threads, loads, prompt)[0].close()
                processes[side.name], line = start(side, dtype, threads, loads, prompt)
            except PeerError as error:
                if side is sides[0]:
                    raise
                reasons[side.name] = str(error)
                progress.say(f"{side.name} is not measured: {error}")
                continue
            stack.callback(processes[side.name].close)
            processes[side.name].ask("settle")
            starts.append(line)
            progress.say(f"{side.name}: {line['load_s']:.1f} s to the first token")
        for load in loads:
            try:
                measured, failed = throughput(load, processes, rounds, vocab)
            except KeyboardInterrupt:
                if not lines:
                    raise
                notes.append(f"interrupted at {load.streams} streams; what was measured before is shown")
                break
            lines += measured
            notes += failed
            progress.say(short(load, measured))
    starts += [{"engine": name, "remark": why} for name, why in reasons.items()]
    how = (
        f"{loads[0].tokens} tokens generated, each stream; the same token ids for all, greedy, end of "
        f"text ignored; {dtype}, {threads} threads; medians (smallest..largest) of {rounds} rounds, in turns, each in a process that is "
        "stopped while another is measured",
        "prefill: prompt tokens over the time until every stream has its first token; decode: tokens after that over the rest of the time",
        "first / this: the first engine of the table over that of the row; equal first tokens: with the first engine; bfloat16 does not "
        "round equally everywhere",
    )
    second = ("the second start of each, from the request to load, imports excluded; the files are in the page cache",)
    return [
        ReportTable("peers", "Throughput beside other engines", THROUGHPUT_COLUMNS, tuple(lines), (*standing(lines), *how, *notes)),
        ReportTable("peers", "Start beside other engines", START_COLUMNS, tuple(starts), second),
    ]


def short(load: StreamLoad, lines: Sequence[Mapping[str, Value]]) -> str:
    """The medians of one load in a line, for who watches."""
    medians = ", ".join(f"{line['engine']} {line['prefill_tok_s']:.0f} and {line['decode_tok_s']:.1f}" for line in lines)
    mixture = f", prompts of {min(load.lengths)} to {max(load.lengths)} tokens" if load.mixed else ""
    return f"{load.streams} streams{mixture}: prefill and decode tok/s {medians}"

"""Measures an artifact beside other engines on the same checkpoint: prefill, decode, start and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ...bench.machine import Reader
from ...bench.report import Column, Table, Value
from ...bench.stats import Clock, Spread, interleave, ratio, seconds_per_call, spread
from ...bench.streams import Load
from .process import PeerError, PeerProcess

MEMORY = "memory"
"""Name of the read of memory among those measured in a round."""

STARTS = 3
"""Most counted starts of a side; an engine that compiles at each start takes a quarter of a minute for one."""

SLOW_START_S = 30
"""A first start that takes longer is repeated once and not `STARTS` times."""

THROUGHPUT_COLUMNS = (
    Column("streams", "streams", 0),
    Column("side", "engine"),
    Column("prefill_tokens_per_s", "prefill tok/s", 0),
    Column("prefill_ratio", "prefill, first / this"),
    Column("decode_tokens_per_s", "decode tok/s", 1),
    Column("decode_ratio", "decode, first / this"),
    Column("bandwidth_share", "share of bandwidth"),
    Column("first_tokens", "equal first tokens"),
)
START_COLUMNS = (
    Column("side", "engine"),
    Column("process_s", "start to first token s"),
    Column("load_s", "load to first token s"),
    Column("resident_mb", "RSS MB", 0),
    Column("remark", "how, or why not"),
)


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
        steps: decode steps, where the engine counts them.
    """

    token_ids: tuple[tuple[int, ...], ...]
    prefill_s: float
    decode_s: float
    decoded: int
    steps: int | None

    def prefill_rate(self, load: Load) -> float:
        """Prompt tokens a second."""
        return load.streams * load.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second after the first of every stream."""
        return self.decoded / self.decode_s


@dataclass(frozen=True)
class Started:
    """A running side.

    Attributes:
        process_s: from starting the process to the first token.
        load_s: from the request to load to the first token.
        loaded: how it serves, in its own words.
    """

    process: PeerProcess
    process_s: float
    load_s: float
    loaded: str


def start(side: Side, dtype: str, threads: int, room: Load, prompt: Sequence[int], clock: Clock = time.monotonic) -> Started:
    """Starts a side and waits for its first token.

    Args:
        room: the largest load that it will serve.
        prompt: token ids of the first request.

    Raises:
        PeerError: it cannot be measured.
    """
    process = side.open()
    try:
        began = clock()
        max_model_len = room.prompt_tokens + room.tokens
        reply = process.ask("load", model=side.model, dtype=dtype, threads=threads, max_model_len=max_model_len, max_num_seqs=room.streams)
        process.ask("generate", prompts=[list(prompt)], tokens=1)
        now = clock()
    except BaseException:
        process.close()
        raise
    return Started(process, now - process.started_s, now - began, str(reply["loaded"]))


def serve(process: PeerProcess, load: Load, vocab: int) -> Served | PeerError:
    """Serves one load; returns the error where it fails, since the others go on."""
    try:
        reply = process.ask("generate", prompts=load.prompts(vocab), tokens=load.tokens)
    except PeerError as error:
        return error
    token_ids = tuple(tuple(stream) for stream in reply["token_ids"])
    return Served(token_ids, reply["prefill_s"], reply["decode_s"], reply["decoded"], reply["steps"])


def equal_first(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    """How many streams begin with the same token."""
    return f"{sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))} of {len(ours)}"


def rows(
    load: Load,
    results: Mapping[str, Sequence[Served]],
    bytes_per_s: Sequence[float],
    step_bytes: Mapping[str, int],
) -> list[dict[str, Value]]:
    """The table rows of one load.

    Args:
        results: of each side, the first of them ours, one a round.
        bytes_per_s: bandwidth of memory, one a round.
        step_bytes: bytes that a decode step of a side must read; sides without have no share.
    """
    lines = []
    first = next(iter(results.values()))
    for name, served in results.items():
        prefill, decode = [each.prefill_rate(load) for each in served], [each.decode_rate for each in served]
        line: dict[str, Value] = {
            "streams": load.streams,
            "side": name,
            "prefill_tokens_per_s": spread(prefill),
            "decode_tokens_per_s": spread(decode),
            "first_tokens": equal_first(first[0].token_ids, served[0].token_ids),
        }
        if served is not first:
            line["prefill_ratio"] = ratio([each.prefill_rate(load) for each in first], prefill)
            line["decode_ratio"] = ratio([each.decode_rate for each in first], decode)
        if load.streams == 1 and name in step_bytes:
            # An engine that does not count its steps drafts nothing: one token a step.
            steps = [each.decoded if each.steps is None else each.steps for each in served]
            rates = [step_bytes[name] * n / each.decode_s for n, each in zip(steps, served, strict=True)]
            line["bandwidth_share"] = ratio(rates, bytes_per_s)
        lines.append(line)
    return lines


def short(lines: Sequence[Mapping[str, Value]]) -> str:
    """The medians of one load in a line, for who watches."""
    medians = [(str(line["side"]), line["prefill_tokens_per_s"], line["decode_tokens_per_s"]) for line in lines]
    said = [f"{name} {p.median:.0f} and {d.median:.1f}" for name, p, d in medians if isinstance(p, Spread) and isinstance(d, Spread)]
    return f"prefill and decode tok/s {', '.join(said)}"


def throughput(
    load: Load,
    processes: Mapping[str, PeerProcess],
    memory: Reader,
    rounds: int,
    vocab: int,
    step_bytes: Mapping[str, int],
    clock: Clock = time.perf_counter,
) -> tuple[list[dict[str, Value]], list[str], list[float]]:
    """Serves a load on all sides in turns, with a read of memory in each round.

    Returns:
        rows, a sentence for each side that failed, and the bandwidth of each round in bytes a second.
    """
    turns: dict[str, Callable[[], Served | PeerError | float]] = {
        name: partial(serve, process, load, vocab) for name, process in processes.items()
    }
    turns[MEMORY] = lambda: memory.nbytes / seconds_per_call(memory.read, clock, calls=3)
    results = interleave(turns, rounds)
    bytes_per_s = [float(each) for each in results.pop(MEMORY) if isinstance(each, float)]
    failed = []
    served: dict[str, list[Served]] = {}
    for name, outcomes in results.items():
        errors = [each for each in outcomes if isinstance(each, PeerError)]
        if errors:
            failed.append(f"{name} failed at {load.streams} streams: {errors[0]}")
        else:
            served[name] = [each for each in outcomes if isinstance(each, Served)]
    return rows(load, served, bytes_per_s, step_bytes) if served else [], failed, bytes_per_s


def start_row(side: Side, starts: Sequence[Started], resident_bytes: int) -> dict[str, Value]:
    """The row of one side in the table of starts."""
    last = starts[-1]
    return {
        "side": side.name,
        "process_s": spread(each.process_s for each in starts),
        "load_s": spread(each.load_s for each in starts),
        "resident_mb": resident_bytes / 1e6,
        "remark": ", ".join(filter(None, (last.process.version, last.loaded, side.remark))),
    }


def tables(
    throughput_rows: Sequence[Mapping[str, Value]],
    start_rows: Sequence[Mapping[str, Value]],
    notes: Sequence[str],
    start_notes: Sequence[str],
) -> list[Table]:
    """The two tables of the figure."""
    return [
        Table("peers", "Throughput beside other engines", THROUGHPUT_COLUMNS, tuple(throughput_rows), tuple(notes)),
        Table("peers", "Start beside other engines", START_COLUMNS, tuple(start_rows), tuple(start_notes)),
    ]

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest

from npucompile.tools.bench.stats import Spread
from npucompile.tools.bench.streams import StreamLoad
from npucompile.tools.lab.peers.compare import Served, Side, compare, rows, standing, throughput
from npucompile.tools.lab.peers.process import PeerError
from npucompile.tools.progress import Progress


def served(prefill_s: float, decode_s: float, decoded: int, first: int = 7) -> Served:
    return Served(((first, 1, 2),), prefill_s, decode_s, decoded)


def test_rates_and_ratios_are_of_their_own_round() -> None:
    results = {"ours": [served(1.0, 2.0, 60), served(2.0, 4.0, 60)], "peer": [served(2.0, 6.0, 60, first=8)] * 2}
    ours, peer = rows(StreamLoad(1, 100, 61), results)
    assert ours == {
        "streams": 1, "prompts": "100", "engine": "ours", "first_tokens": "1 of 1",
        "prefill_tok_s": 75.0, "prefill_range": "50..100", "prefill_ratio": None,
        "decode_tok_s": 22.5, "decode_range": "15..30", "decode_ratio": None,
    }  # fmt: skip
    assert peer == {
        "streams": 1, "prompts": "100", "engine": "peer", "first_tokens": "0 of 1",
        "prefill_tok_s": 50.0, "prefill_range": "50..50", "prefill_ratio": Spread(1.5, 1.0, 2.0, 2),
        "decode_tok_s": 10.0, "decode_range": "10..10", "decode_ratio": Spread(2.25, 1.5, 3.0, 2),
    }  # fmt: skip


def test_it_is_said_where_the_first_is_behind_the_best_of_the_others_the_worst_first() -> None:
    results = {"ours": [served(1.0, 2.0, 60)], "slow": [served(4.0, 4.0, 60)], "fast": [served(0.5, 3.0, 60)]}
    one, many = (list(rows(load, results)) for load in (StreamLoad(1, 100, 61), StreamLoad(1, 64, 61, mixed=True)))
    assert standing(one) == ["behind in 1 of 2: prefill at 1 streams, prompts of 100 tokens: 0.50 times fast"]
    results["ours"] = [served(1.0, 12.0, 60)]
    assert standing([*one, *rows(StreamLoad(2, 100, 61), results)][:0]) == []
    worse = standing([*one, *rows(StreamLoad(1, 9, 61), results)])[0]
    assert worse.startswith("behind in 3 of 4: decode at 1 streams, prompts of 9 tokens: 0.25 times fast; prefill at 1 streams")
    assert standing(list(rows(StreamLoad(1, 4, 61), {name: results[name] for name in ("fast", "slow")}))) == [
        "ahead of the best of the others in all 2"
    ]
    assert many[0]["prompts"] == "64 to 64"


def test_a_mixture_has_short_and_long_prompts_by_turns() -> None:
    load = StreamLoad(6, 64, 2, mixed=True)
    assert load.lengths == [64, 16, 128, 512, 64, 16]
    assert [len(prompt) for prompt in load.prompts(99)] == load.lengths


class Answering:
    """A process that answers after the seconds it is told, or fails."""

    def __init__(self, name: str, asked: list[str], fails_at: int = 99) -> None:
        self.name, self.asked, self.fails_at = name, asked, fails_at

    def ask(self, do: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        self.asked.append(self.name)
        if len(prompts) >= self.fails_at:
            raise PeerError("no room")
        return {"token_ids": [[1] * tokens for _ in prompts], "prefill_s": 1.0, "decode_s": 1.0, "decoded": len(prompts)}


def test_sides_take_turns_and_one_that_fails_has_a_reason() -> None:
    asked: list[str] = []
    processes: Any = {"ours": Answering("ours", asked), "peer": Answering("peer", asked, 2)}
    lines, failed = throughput(StreamLoad(1, 4, 2), processes, 2, 9)
    assert ([line["engine"] for line in lines], failed) == (["ours", "peer"], [])
    # An uncounted round, then one in reverse order, then one as the first.
    assert asked == ["ours", "peer", "peer", "ours", "ours", "peer"]
    lines, failed = throughput(StreamLoad(2, 4, 2), processes, 1, 9)
    assert [line["engine"] for line in lines] == ["ours"]
    assert failed == ["peer failed at 2 streams: no room"]


class Interrupted:
    """A side that is interrupted at its first load of so many streams."""

    version = "1"

    def __init__(self, at: int) -> None:
        self.at = at

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        if do != "generate":
            return {"loaded": "whole"}
        if len(values["prompts"]) == self.at:
            raise KeyboardInterrupt
        return {"token_ids": [[1] * values["tokens"] for _ in values["prompts"]], "prefill_s": 1.0, "decode_s": 1.0, "decoded": 1}

    def close(self) -> None:
        pass


def interrupted(at: int) -> Any:
    loads = (StreamLoad(2, 4, 2), StreamLoad(3, 4, 2), StreamLoad(4, 4, 2))
    open_side: Any = partial(Interrupted, at)
    return compare([Side("ours", open_side, "m")], {}, "bf16", 2, loads, 9, 1, Progress(io.StringIO()))[0]


def test_what_was_measured_before_an_interrupt_is_shown() -> None:
    table = interrupted(4)
    assert [line["streams"] for line in table.rows] == [2, 3]
    assert "interrupted at 4 streams; what was measured before is shown" in table.notes
    with pytest.raises(KeyboardInterrupt):
        interrupted(2)

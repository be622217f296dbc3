from __future__ import annotations

from typing import Any

import pytest

from npucompile.tools.bench.machine import Reader
from npucompile.tools.bench.stats import Spread
from npucompile.tools.bench.streams import Load
from npucompile.tools.lab.peers.compare import Served, equal_first, rows, throughput
from npucompile.tools.lab.peers.process import PeerError


def served(prefill_s: float, decode_s: float, decoded: int, steps: int | None = None, first: int = 7) -> Served:
    return Served(((first, 1, 2),), prefill_s, decode_s, decoded, steps)


def medians(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value.median if isinstance(value, Spread) else value for key, value in line.items()}


def test_rates_ratios_and_shares_are_of_their_own_round() -> None:
    results = {"ours": [served(1.0, 2.0, 60, 20), served(2.0, 4.0, 60, 20)], "peer": [served(2.0, 6.0, 60, first=8)] * 2}
    ours, peer = rows(Load(1, 100, 61), results, [400.0, 200.0], {"ours": 20, "peer": 10})
    assert medians(ours) == {
        "streams": 1,
        "side": "ours",
        "prefill_tokens_per_s": 75.0,
        "decode_tokens_per_s": 22.5,
        "bandwidth_share": 0.5,  # 20 bytes x 20 steps: in 2 s of 400 a second, in 4 s of 200
        "first_tokens": "1 of 1",
    }
    assert medians(peer) == {
        "streams": 1,
        "side": "peer",
        "prefill_tokens_per_s": 50.0,
        "prefill_ratio": 1.5,
        "decode_tokens_per_s": 10.0,
        "decode_ratio": 2.25,
        "bandwidth_share": pytest.approx(0.375),  # a token a step: 10 bytes x 60 in 6 s
        "first_tokens": "0 of 1",
    }
    assert ours["bandwidth_share"] == Spread(0.5, 0.5, 0.5, 2)


def test_only_one_stream_is_bound_by_its_weights() -> None:
    pair = Served(((1, 2), (1, 2)), 1.0, 1.0, 2, 1)
    assert "bandwidth_share" not in rows(Load(2, 4, 2), {"ours": [pair]}, [1.0], {"ours": 1})[0]
    assert equal_first([(1, 2), (3, 4)], [(1, 5), (4, 4)]) == "1 of 2"


class Answering:
    """A process that answers after the seconds it is told, or fails."""

    def __init__(self, name: str, asked: list[str], fails_at: int = 99) -> None:
        self.name, self.asked, self.fails_at = name, asked, fails_at

    def ask(self, do: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        self.asked.append(self.name)
        if len(prompts) >= self.fails_at:
            raise PeerError("no room")
        return {"token_ids": [[1] * tokens for _ in prompts], "prefill_s": 1.0, "decode_s": 1.0, "decoded": len(prompts), "steps": None}


def test_sides_take_turns_and_one_that_fails_has_a_reason() -> None:
    asked: list[str] = []
    processes: Any = {"ours": Answering("ours", asked), "peer": Answering("peer", asked, 2)}
    memory = Reader(lambda: asked.append("memory"), 100, "memory")
    now = iter(range(1000))
    lines, failed, bytes_per_s = throughput(Load(1, 4, 2), processes, memory, 2, 9, {}, lambda: float(next(now)))
    assert [line["side"] for line in lines] == ["ours", "peer"]
    assert (failed, bytes_per_s) == ([], [100.0, 100.0])
    # An uncounted round, then one in reverse order, then one as the first.
    assert [name for i, name in enumerate(asked) if i == 0 or asked[i - 1] != name] == [
        "ours",
        "peer",
        "memory",
        "peer",
        "ours",
        "peer",
        "memory",
    ]
    lines, failed, _ = throughput(Load(2, 4, 2), processes, memory, 1, 9, {}, lambda: float(next(now)))
    assert [line["side"] for line in lines] == ["ours"]
    assert failed == ["peer failed at 2 streams: no room"]

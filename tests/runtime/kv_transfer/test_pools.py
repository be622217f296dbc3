"""The pools of a pair over the real transfer engine."""

from __future__ import annotations

from pathlib import Path

from npucompile.runtime.kv_transfer.mooncake import Mooncake
from npucompile.runtime.kv_transfer.pools import LocalPools
from npucompile.runtime.request import FinishEvent, Request, Sampling
from tests.support import optional
from tests.support.pairs import PROMPT, Pair, alone


def test_over_the_real_engine(tiny_artifact: Path) -> None:
    """Two engines of one process, as Mooncake does not mind."""
    optional.transfer_engine()
    pair = Pair(tiny_artifact)
    engines = [Mooncake("127.0.0.1"), Mooncake("127.0.0.1")]
    pools = [LocalPools(engine, own) for engine, own in zip(engines, (pair.writes.own, pair.peer.instance.ranks[0]), strict=True)]
    pair.senders[-1]._pools = pools[0]
    pair.senders[-1]._peer = pair.peer._replace(sessions=[engines[1].session])
    pair.ask(Request("r", PROMPT, 6, Sampling(seed=1)))
    while not (events := pair.results["r"]) or not isinstance(events[-1], FinishEvent):
        pair.go_on()
    assert [token for event in events[:-1] for token in event.token_ids] == alone(tiny_artifact, PROMPT)
    for pool in pools:
        pool.close()

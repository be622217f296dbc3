"""lowering/ascend/streams.py: what runs beside a dispatch is labelled, what it waits for is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.emulated import DeviceGraph

from npucompile.lowering.ascend.ge_file import PRIORITY, STREAM
from npucompile.lowering.ascend.streams import EXCHANGE, SHARED_EXPERT, label


def body(parts: int) -> Any:
    """x -> norm -> router -> dispatch -> combine, beside norm -> up -> down, which the combine adds."""
    hand = DeviceGraph()
    x = hand.operand(0, "bf16[4,64]", "x")
    norm = hand.op("RmsNorm", {"x": x}, "norm")
    ids = hand.op("MatMul", {"x1": norm}, "router")
    down = hand.op("MatMul", {"x1": hand.op("MatMul", {"x1": norm}, "up")}, "down")
    for i in range(parts):
        sent = hand.op("MoeDistributeDispatchV2", {"x": norm, "expert_ids": ids}, f"dispatch{i}")
        hand.op("MoeDistributeCombineV2", {"expand_x": sent, "shared_expert_x": down}, f"combine{i}")
        if i:
            hand.model.graph[0].op[-2].input.append(f"combine{i - 1}:-1")
    return [op for op in hand.model.graph[0].op if op.type != "Data"]


def labelled(ops: Sequence[Any]) -> dict[str, tuple[bytes, bytes]]:
    return {op.name: (op.attr[STREAM].s, op.attr[PRIORITY].s) for op in ops if STREAM in op.attr}


def test_the_shared_expert_has_a_stream_of_its_own() -> None:
    ops = body(1)
    label(ops)
    assert labelled(ops) == dict.fromkeys(("up", "down"), (SHARED_EXPERT.encode(), b"0"))


@pytest.mark.parametrize("parts", [2, 3])
def test_several_exchanges_have_a_stream_of_their_own(parts: int) -> None:
    ops = body(parts)
    label(ops)
    names = [f"{kind}{i}" for i in range(parts) for kind in ("dispatch", "combine")]
    assert labelled(ops) == dict.fromkeys(names, (EXCHANGE.encode(), b"0"))


def test_a_body_without_a_shared_expert_has_one_stream() -> None:
    ops = [op for op in body(1) if not op.name.startswith("combine")]
    label(ops)
    assert not labelled(ops)

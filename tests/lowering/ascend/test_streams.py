"""lowering/ascend/streams.py: what runs beside a dispatch is labelled, what it waits for is not."""

from __future__ import annotations

from typing import Any

from support.emulated import DeviceGraph

from npucompile.lowering.ascend.streams import LABEL, PRIORITY, SHARED_EXPERT, label_shared_expert


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


def test_the_shared_expert_has_a_stream_of_its_own() -> None:
    for parts in (1, 3):
        ops = body(parts)
        label_shared_expert(ops)
        labelled = {op.name: (op.attr[LABEL].s, op.attr[PRIORITY].s) for op in ops if LABEL in op.attr}
        assert labelled == dict.fromkeys(("up", "down"), (SHARED_EXPERT.encode(), b"0"))


def test_a_body_without_a_shared_expert_has_one_stream() -> None:
    ops = [op for op in body(1) if not op.name.startswith("combine")]
    label_shared_expert(ops)
    assert not any(LABEL in op.attr for op in ops)

"""Experts applied one by one, sorted, grouped, sharded over ranks or quantised equal the fused experts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from npucompile.graphs import ops
from npucompile.graphs.quantise import bits_scale, quantise_w4, quantise_w8, unpack_w4

T, X, E, M, F = 7, 3, 8, 16, 8


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def choices(tokens: int = T, seed: int = 0) -> torch.Tensor:
    return torch.rand(tokens, E, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :X].int()


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    return {
        "x": draw(T, M),
        "ids": choices(),
        "share": draw(T, X, seed=1).abs(),
        "gate_up": draw(E, M, 2 * F, seed=2) * M**-0.5,
        "down": draw(E, F, M, seed=3) * F**-0.5,
    }


def fused(m: dict[str, torch.Tensor]) -> torch.Tensor:
    return ops.moe_experts(m["x"], m["share"], m["ids"], m["gate_up"].transpose(1, 2).unflatten(1, (2, F)), m["down"].transpose(1, 2))


def by_choice(m: dict[str, torch.Tensor]) -> torch.Tensor:
    """The definition of a mixture of experts, choice by choice in float64."""
    out = torch.zeros(m["x"].shape, dtype=torch.float64)
    for t, row in enumerate(m["x"].double()):
        for share, e in zip(m["share"][t].double(), m["ids"][t].tolist(), strict=True):
            gate, up = (row @ m["gate_up"][e].double()).chunk(2)
            out[t] += share * ((torch.nn.functional.silu(gate) * up) @ m["down"][e].double())
    return out.float()


def test_fused_is_the_definition(model: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(fused(model), by_choice(model), rtol=1e-5, atol=1e-5)


def test_sorted_rows_are_the_tokens_of_each_expert() -> None:
    x, ids = draw(T, M), choices()
    rows, _, counts, index = ops.moe_sort(x, ids, E, E, False)
    assert counts.tolist() == [int((ids == e).sum()) for e in range(E)]
    assert sorted(index.tolist()) == list(range(T * X))
    for choice, place in enumerate(index.tolist()):
        assert torch.equal(rows[place], x[choice // X])
        e = int(ids.flatten()[choice])
        assert counts[:e].sum() <= place < counts[: e + 1].sum()
    for e in range(E):
        mine = [place for place, i in zip(index.tolist(), ids.flatten().tolist(), strict=True) if i == e]
        assert mine == sorted(mine)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_each_device_adds_its_experts(model: dict[str, torch.Tensor], devices: int) -> None:
    local, apart, together = E // devices, torch.zeros(T, M), torch.zeros(T, M)
    for d in range(devices):
        mine = slice(d * local, (d + 1) * local)
        ids = torch.remainder(model["ids"] - d * local, E)
        rows, _, counts, index = ops.moe_sort(model["x"], ids, local, E, False)
        apart += ops.moe_unsort(ops.grouped_experts(rows, counts, model["gate_up"][mine], model["down"][mine]), model["share"], index)
        together += fused({**model, "ids": ids, "gate_up": model["gate_up"][mine], "down": model["down"][mine]})
    torch.testing.assert_close(apart, fused(model), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together, fused(model), rtol=1e-5, atol=1e-5)


def dequantised(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if parts[0].dtype == torch.int32:
        return unpack_w4(parts[0]).double() * bits_scale(parts[1]).double()
    return parts[0].double() * parts[1][:, None].double()


@pytest.mark.parametrize("form", [(quantise_w8, ops.grouped_experts_w8a8), (quantise_w4, ops.grouped_experts_w4a8)], ids=["w8a8", "w4a8"])
def test_quantised_experts_are_products_of_what_was_rounded(
    model: dict[str, torch.Tensor], form: tuple[Callable[..., Any], Callable[..., Any]]
) -> None:
    quantise, product = form
    rows, row_scale, counts, _ = ops.moe_sort(model["x"], model["ids"], E, E, True)
    gate_up, down = quantise(model["gate_up"]), quantise(model["down"])
    got = product(rows, row_scale, counts, *gate_up, *down, torch.float32)
    owner = torch.repeat_interleave(torch.arange(E), counts)
    for r, e in enumerate(owner.tolist()):
        gate, up = (rows[r].double() * row_scale[r] @ dequantised(gate_up)[e]).chunk(2)
        hidden = torch.nn.functional.silu(gate) * up
        step = hidden.abs().max() / 127
        want = (hidden / step).round() * step @ dequantised(down)[e]
        torch.testing.assert_close(got[r].double(), want, rtol=1e-3, atol=1e-4)


# --- exchange ---


def calls(ranks: int, group: str, quantise: bool) -> list[tuple[Any, ...]]:
    x = [draw(4, M, seed=r) for r in range(ranks)]
    return [(x[r], choices(4, seed=r), x[r], torch.tensor([r], dtype=torch.int32), E, group, ranks, quantise) for r in range(ranks)]


def combining(sent: list[Any], ranks: int, group: str, quantise: bool = False) -> list[tuple[Any, ...]]:
    return [
        (
            rows,
            choices(4, seed=r),
            draw(4, X, seed=60 + r),
            *s[3:],
            draw(4, M, seed=70 + r),
            torch.tensor([r]).int(),
            E,
            group,
            ranks,
            rows,
            quantise,
        )
        for r, s in enumerate(sent)
        for rows in [draw(*s[0].shape, seed=50 + r)]
    ]


def test_rows_arrive_by_expert_then_by_source() -> None:
    sent = ops.moe_dispatch.rule("group_reference")(operands := calls(2, "world", False))
    for rank, (rows, _, counts, assist, received) in enumerate(sent):
        origins = assist.view(-1, 128)[: int(counts.sum()), :3].tolist()
        place = 0
        for e in range(4):
            for source in range(2):
                for t, row in enumerate(operands[source][1].tolist()):
                    if rank * 4 + e in row:
                        assert origins[place] == [source, t, row.index(rank * 4 + e)]
                        assert torch.equal(rows[place], operands[source][0][t])
                        place += 1
                assert received[e * 2 + source] == place
        assert place == counts.sum()
        assert not rows[place:].any()


def in_threads(ranks: int, member: Callable[[int, str], Any]) -> list[Any]:
    """Runs every rank of a process group in its own thread."""
    results: list[Any] = [None] * ranks
    failures: list[BaseException] = []
    store = dist.HashStore()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)

    def run(rank: int) -> None:
        try:
            group, kind = dist.ProcessGroup(store, rank, ranks), dist.ProcessGroup.BackendType.GLOO
            group._set_default_backend(kind)
            group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, ranks))
            group._set_group_name("moe")
            torch._C._distributed_c10d._register_process_group("moe", group)
            results[rank] = member(rank, "moe")
        except BaseException as error:
            failures.append(error)
        finally:
            torch._C._distributed_c10d._unregister_process_group("moe")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise failures[0]
    return results


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_members_that_talk_get_what_together_says(ranks: int, quantise: bool) -> None:
    sent = ops.moe_dispatch.rule("group_reference")(calls(ranks, "moe", quantise))
    talked = in_threads(ranks, lambda rank, group: ops.moe_dispatch(*calls(ranks, group, quantise)[rank]))
    for got, want in zip(talked, sent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    whole = ops.moe_combine.rule("group_reference")(combining(sent, ranks, "moe", quantise))
    back = in_threads(ranks, lambda rank, group: ops.moe_combine(*combining(sent, ranks, group, quantise)[rank]))
    torch.testing.assert_close(back, whole, rtol=1e-5, atol=1e-5)

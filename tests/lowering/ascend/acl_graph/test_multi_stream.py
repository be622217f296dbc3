"""lowering/ascend/acl_graph/multi_stream.py: what may run beside exchanges does, on the second stream, where there is one."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import acl_graphs as ag

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.acl_graph.file import AclFile, graph_of
from npucompile.lowering.ascend.acl_graph.formats import weight_operands
from npucompile.lowering.ascend.acl_graph.multi_stream import with_second_stream
from npucompile.lowering.ascend.acl_graph.second_stream import beside, check, on_host
from npucompile.lowering.ascend.cost.estimate import estimate
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.prefetch import in_captured
from npucompile.lowering.collectives_check import of_acl_file
from npucompile.lowering.platform import Platform

A3, MESH, ROWS = Platform("ascend910_93", "9.1"), Mesh.parse("dp=16"), 512


def layer(parts: int, pool: Any, x: Any, ids: Any, weights: Any) -> tuple[Any, ...]:
    """A shared expert, then parts of the rows to experts and back, each dispatched before the rows of the one before come back."""
    npu, world = torch.ops.npu, ("dispatch", 16, 0, 64)
    pool.copy_(x[:2])
    shared = (x.exp() @ x.t().sin()) @ x
    sent, outs = list[Any](), list[Any]()
    for i in range(parts + 1):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        if i < parts:
            sent.append(npu.npu_moe_distribute_dispatch_v2(x[rows], ids[rows], *world, quant_mode=0, expert_token_nums_type=1))
        if i or parts == 1:
            made, part = sent[len(outs)], slice(len(outs) * ROWS, (len(outs) + 1) * ROWS)
            out, to = made[0].tanh(), (ids[part], made[2], made[4], weights[part])
            outs.append(npu.npu_moe_distribute_combine_v2(out, *to, *world, shared_expert_x=shared[part]))
        if parts == 1:
            break
    return (torch.cat(outs) if parts > 1 else outs[0],)


@functools.cache
def of_parts(parts: int) -> AclFile:
    rows = parts * ROWS
    shapes: dict[str, Any] = {"inputs_x": ((rows, 256), ag.BF16), "inputs_ids": ((rows, 4), ag.I32), "inputs_weights": ((rows, 4), ag.F32)}
    return ag.of_body(functools.partial(layer, parts), captured=parts == 1, state_pool=((2, 256), ag.BF16), **shapes)[0]


def second(file: AclFile) -> list[str]:
    nodes = list(graph_of(file).graph.nodes)
    return [str(node.target).split(".")[1] for node in nodes if node in beside(file, nodes) and not on_host(node)]


def step_ms(file: AclFile, platform: Platform = A3) -> float:
    return estimate(file, parameters(A3.chip), MESH, 0, platform).step_ms


@pytest.fixture(autouse=True)
def loaded(operators: None) -> None:
    """torch_npu's operators are there before a file is made."""


def test_the_shared_expert_runs_beside_the_only_dispatch() -> None:
    made = with_second_stream(of_parts(1), MESH, A3)
    check(made)
    assert second(made) == ["exp", "sin", "mm", "mm"]
    assert ag.names(made) == ag.names(of_parts(1))
    assert step_ms(made) < step_ms(of_parts(1))


@pytest.mark.parametrize("parts", [2, 3])
def test_kernels_of_several_parts_run_beside_exchanges_in_the_order_of_a_schedule(parts: int) -> None:
    before, made = of_parts(parts), with_second_stream(of_parts(parts), MESH, A3)
    check(made)
    assert of_acl_file(made) == of_acl_file(before), "exchanges keep their order"
    assert sorted(ag.names(made)) == sorted(ag.names(before))
    # The shared expert, listed first, is computed while rows travel.
    assert ag.names(before).index("aten.mm.default") < ag.names(before).index("npu.npu_moe_distribute_dispatch_v2.default")
    assert ag.names(made).index("aten.mm.default") > ag.names(made).index("npu.npu_moe_distribute_dispatch_v2.default")
    assert second(made).count("tanh") == parts
    assert second(made).count("mm") == 2
    assert step_ms(made) < step_ms(before)
    assert with_second_stream(of_parts(parts), MESH, A3) == made


def test_one_stream_is_left_as_it_is() -> None:
    assert with_second_stream(of_parts(2), MESH, Platform("", "9.1")) is of_parts(2)
    assert with_second_stream(of_parts(2), MESH, replace(A3, serial=True)) is of_parts(2)
    plain, _ = ag.of_body(lambda x: (x.exp(),), inputs_x=((4, 32), ag.BF16))
    assert with_second_stream(plain, MESH, A3) is plain


def fetched_layer(x: Any, ids: Any, scales: Any, weight: Any) -> tuple[Any, ...]:
    npu, world = torch.ops.npu, ("dispatch", 16, 0, 128)
    made = npu.npu_moe_distribute_dispatch_v2(x, ids, *world, quant_mode=0, expert_token_nums_type=1)
    out = npu.npu_moe_distribute_combine_v2(made[0].tanh(), ids, made[2], made[4], scales, *world)
    return (out @ weight.t(),)


def test_a_captured_graph_fetches_on_its_second_stream() -> None:
    shapes: dict[str, Any] = {
        "x": ((64, 1024), ag.BF16),
        "ids": ((64, 8), ag.I32),
        "scales": ((64, 8), ag.F32),
        "weight": ((2048, 1024), ag.BF16),
    }
    file, _ = ag.of_body(fetched_layer, captured=True, **{f"inputs_{name}": shape for name, shape in shapes.items()})
    made = in_captured(with_second_stream(file, MESH, A3), MESH, replace(A3, prefetch=True))
    check(made)
    nodes = [*graph_of(made).graph.nodes]
    (fetch,) = (node for node in nodes if str(node.target) == "npu.npu_prefetch.default")
    source, after, size = fetch.args
    assert (source.op, str(after.target), size) == ("placeholder", "aten.tanh.default", 4 * 2**20)
    assert str(fetch.next.target).endswith("combine_v2.default")
    assert beside(made, nodes) == {fetch}
    assert weight_operands(made) == weight_operands(file), "formats stay"
    assert len(list(made.bodies)) == len(nodes) - made.operands - 1
    assert step_ms(made) < step_ms(file)

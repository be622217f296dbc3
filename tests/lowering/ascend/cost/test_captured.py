"""lowering/ascend/cost/captured.py: a captured graph costs what the GE graph of the same operators does; what it lacks costs less."""

from __future__ import annotations

import functools

import pytest
import torch
from support import acl_graphs as ag
from support import fleets
from support import ge_bodies as gb

from npucompile.graphs.types import Bucket, Mesh
from npucompile.lowering.ascend.acl_graph import inspect_acl
from npucompile.lowering.ascend.acl_graph.file import graph_of
from npucompile.lowering.ascend.acl_graph.make import acl_file
from npucompile.lowering.ascend.cost import captured
from npucompile.lowering.ascend.cost.estimate import StepCost, estimate, estimate_captured
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.lowered import lower
from npucompile.lowering.platform import Platform
from npucompile.models import sharding_rules
from npucompile.models.variant import Variant

A3, MESH = parameters("ascend910_93"), Mesh.parse("dp=2,tp=2")
STOCK, PACKAGES = Platform("ascend910_93", "9.1"), Platform("ascend910_93", "9.1", ("vllm-ascend",))
F32, I32, I64, BF16 = torch.float32, torch.int32, torch.int64, torch.bfloat16


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """Costs of a small model's decode step as a GE graph and as a captured one, by batch size and context."""
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    model = fleets.model(Variant(grouped=True), drafts=1)

    @functools.cache
    def lowered(batch: int, backend: str):
        rules = sharding_rules.rules(MESH, experts=model.config.num_experts, expert_parallel=True, tokens=2 * batch)
        partitioned = fleets.partitioned(model, MESH, rules, Bucket("decode", batch, 2), fleets.limits(1), False, 0)
        return lower(partitioned, STOCK, backend)

    def both(batch: int, context: int) -> tuple[StepCost, StepCost]:
        ge, acl = lowered(batch, "ge"), lowered(batch, "aclgraph")
        file = acl_file(acl.graph, acl.signature, captured=True)
        shown = estimate_captured(file, A3, MESH, context, STOCK)
        assert shown.launches == len(inspect_acl.launches(graph_of(file).graph.nodes))
        return estimate(link(ge.graph, ge.signature, ta), A3, MESH, context), shown

    return both


def test_both_graphs_move_and_send_the_same(costs):
    """A captured graph has one stream, so that its exchanges hide behind nothing; layers and operators are otherwise the same."""
    ge, shown = costs(2, 16)
    assert shown.hbm_bytes == pytest.approx(ge.hbm_bytes, rel=0.05)
    assert shown.sent_bytes == pytest.approx(ge.sent_bytes, rel=0.01)
    assert {kind: count for kind, count in shown.bodies.items() if "attention" in kind} == {
        kind: count for kind, count in ge.bodies.items() if "attention" in kind
    }
    assert shown.step_ms == pytest.approx(ge.step_ms, rel=0.25)
    assert sum(shown.parts_ms.values()) == pytest.approx(shown.step_ms)
    assert sum(operator.total_ms for operator in shown.operators) == pytest.approx(shown.step_ms)


def test_a_larger_batch_and_a_longer_context_take_longer(costs):
    assert costs(2, 8)[1].step_ms < costs(2, 24)[1].step_ms
    assert costs(2, 8)[1].step_ms < costs(4, 8)[1].step_ms


def fused(x, w1, w2, ids, s1, s2, b1, b2, probs, group="fused_experts", ranks=4):
    return (torch.ops.npucompile_packages.dispatch_ffn_combine_w4a8(x, w1, w2, ids, s1, s2, b1, b2, probs, group, ranks, 64),)


def test_an_operator_that_computes_and_communicates_has_stages_of_both(tmp_path):
    gb.loaded(tmp_path)
    shapes = {
        "inputs_x": ((32, 64), BF16), "params_w1": ((4, 64, 8), I32), "params_w2": ((4, 32, 8), I32), "inputs_ids": ((32, 2), I32),
        "params_s1": ((4, 64), I64), "params_s2": ((4, 64), I64), "params_b1": ((4, 64), F32), "params_b2": ((4, 64), F32),
        "inputs_probs": ((32, 2), F32),
    }  # fmt: skip
    order = sorted(shapes, key=lambda name: ("params", "state", "inputs").index(name.partition("_")[0]))
    names = [name.partition("_")[2] for name in order]
    file, _ = ag.of_body(lambda *operands: fused(**dict(zip(names, operands, strict=True))), **{name: shapes[name] for name in order})
    cost = estimate_captured(file, A3, MESH, 16, PACKAGES)
    (operator,) = cost.operators
    assert (operator.type, operator.launches) == ("dispatch_ffn_combine", 1)
    assert operator.parts_ms["collectives"] > 0
    assert operator.parts_ms["memory"] + operator.parts_ms.get("matrix", 0) > 0
    # Rows there as int8 and back in bfloat16, three of four of them from or to other ranks.
    assert cost.sent_bytes == pytest.approx(32 * 2 * 64 * (1 + 2) * 3 / 4 * A3.expert_imbalance)


def test_views_are_the_memory_of_their_operands(tmp_path):
    gb.loaded(tmp_path)
    file, _ = ag.of_body(lambda w, x: (torch.mm(x, w.t()),), params_w=((8, 16), BF16), inputs_x=((4, 16), BF16))
    graph = captured.read(file, STOCK)
    (product,) = graph.operators
    assert product.type == "aclnnMatmulWeightNz"
    assert [graph.types[tensor].shape for tensor in product.input] == [(4, 16), (16, 8)]
    assert set(product.input) <= graph.resident

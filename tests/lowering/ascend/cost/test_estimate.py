"""lowering/ascend/cost/estimate.py: predictions of small emitted graphs move as they should when graph, batch, context or mesh change."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from support import acl_graphs as ag
from support import fleets
from support import ge_bodies as gb

from npucompile.graphs.types import Bucket, Mesh
from npucompile.lowering.ascend.acl_graph import inspect_acl
from npucompile.lowering.ascend.acl_graph.file import AclFile, graph_of
from npucompile.lowering.ascend.acl_graph.make import acl_file
from npucompile.lowering.ascend.cost.estimate import StepCost, estimate, timeline
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.cost.timing import CAUSES
from npucompile.lowering.ascend.ge_file import GeFile, parse
from npucompile.lowering.ascend.launches import launches
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.lowered import lower
from npucompile.lowering.platform import CPU, Platform
from npucompile.models import sharding_rules
from npucompile.models.variant import Variant

A3, A2 = parameters("ascend910_93"), parameters("ascend910b")
MESH = Mesh.parse("dp=2,tp=2")
STOCK, PACKAGES = Platform("ascend910_93", "9.1"), Platform("ascend910_93", "9.1", ("vllm-ascend",))
F32, I32, I64, BF16 = torch.float32, torch.int32, torch.int64, torch.bfloat16


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """File of a small model's decode step, by batch size, for GE or captured."""
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    model = fleets.model(Variant(grouped=True), drafts=1)

    @functools.cache
    def decode(batch: int, backend: str = "ge", platform: Platform = CPU) -> GeFile | AclFile:
        rules = sharding_rules.rules(MESH, experts=model.config.num_experts, expert_parallel=True, tokens=2 * batch)
        partitioned = fleets.partitioned(model, MESH, rules, Bucket("decode", batch, 2), fleets.limits(1), False, 0)
        lowered = lower(partitioned, platform, backend)
        if backend == "aclgraph":
            return acl_file(lowered.graph, lowered.signature, captured=True)
        return link(lowered.graph, lowered.signature, ta)

    return decode


def cost(ge_file: GeFile, *, speeds=A3, mesh: Mesh = MESH, context: int = 16) -> StepCost:
    return estimate(ge_file, speeds, mesh, context, STOCK)


def edited(ge_file: GeFile, edit) -> GeFile:
    """The GE file after `edit(graph)`."""
    model = parse(ge_file.graph)
    edit(model.graph[0])
    return replace(ge_file, graph=model.SerializeToString(deterministic=True))


def test_parts_add_up(graph):
    """Causes, kinds of bodies and operators are three cuts of the same step."""
    step = cost(graph(2))
    assert list(step.parts_ms) == list(CAUSES)
    assert sum(step.parts_ms.values()) == pytest.approx(step.step_ms)
    assert sum(operator.total_ms for operator in step.operators) + step.parts_ms["waiting"] == pytest.approx(step.step_ms)
    assert step.launches == sum(operator.launches for operator in step.operators) == len(launches(parse(graph(2).graph).graph[0].op))
    assert step.bodies["linear_attention"] == 3 * step.bodies["full_attention"]
    assert min(step.parts_ms["launch"], step.parts_ms["collectives"], step.floor_ms) > 0
    assert step.floor_ms < step.step_ms
    shown = step.as_dict()
    assert sum(kind["launches"] for kind in shown["kinds"].values()) == shown["launches"]


def test_launches_run_as_long_as_the_step_and_one_kernel_at_a_time(graph):
    began = timeline(graph(2), A3, MESH, 16, STOCK)
    assert max(launch.end_ms for launch in began) == pytest.approx(cost(graph(2)).step_ms)
    kernels = [launch for launch in began if launch.cause != "collectives"]
    assert all(before.end_ms <= after.start_ms + 1e-9 for before, after in itertools.pairwise(kernels))


def test_a_larger_batch_and_a_longer_context_take_longer(graph):
    assert cost(graph(2)).step_ms < cost(graph(4)).step_ms
    short, long = cost(graph(2), context=8), cost(graph(2), context=24)
    assert short.step_ms < long.step_ms
    changed = {a.type for a, b in zip(short.operators, long.operators, strict=True) if a.parts_ms != pytest.approx(b.parts_ms)}
    assert changed == {"FusedInferAttentionScore"}


def fuse(graph) -> None:
    """Replaces the first elementwise operator whose only reader is another one by one operator with the operands of both."""
    started = {op.name: op for op in launches(graph.op) if op.type in ("Add", "Mul", "Sub", "Sigmoid", "Neg", "Exp")}
    readers: dict[str, list] = {}
    for op in graph.op:
        for tensor in op.input:
            readers.setdefault(tensor.rpartition(":")[0], []).append(op)
    for first in started.values():
        (reader, *others) = readers.get(first.name, [None])
        if reader is not None and not others and reader.name in started:
            at = list(reader.input).index(f"{first.name}:0")
            inputs, descs = [*reader.input], [*reader.input_desc]
            inputs[at : at + 1], descs[at : at + 1] = [*first.input], [*first.input_desc]
            del reader.input[:], reader.input_desc[:]
            reader.input.extend(inputs)
            reader.input_desc.extend(descs)
            graph.op.remove(first)
            return
    raise AssertionError("no two neighbours to fuse")


def test_a_fused_pair_costs_less(graph):
    """A launch, and the intermediate result written and read once less."""
    before, after = cost(graph(2)), cost(edited(graph(2), fuse))
    assert after.launches == before.launches - 1
    saved_s = (before.step_ms - after.step_ms) / 1e3
    assert A3.vector_launch_s < saved_s < 2 * A3.vector_launch_s
    assert after.parts_ms["launch"] < before.parts_ms["launch"]
    assert after.parts_ms["collectives"] == pytest.approx(before.parts_ms["collectives"])


def test_collectives_grow_with_ranks_and_across_nodes(graph):
    """The same graph, its groups larger; and with 16 ranks on nodes of 16 and of 8."""
    small, large = cost(graph(2)), cost(graph(2), mesh=Mesh.parse("dp=4,tp=4"))
    assert small.parts_ms["collectives"] < large.parts_ms["collectives"]
    assert small.parts_ms["memory"] == pytest.approx(large.parts_ms["memory"])
    two_nodes = cost(graph(2), mesh=Mesh.parse("dp=4,tp=4"), speeds=A2)
    assert two_nodes.parts_ms["collectives"] > large.parts_ms["collectives"]


def test_a_stream_beside_the_experts_exchange_hides_it(graph):
    """The shared expert on a stream of its own: the same kernels, and part of dispatch or combine runs behind them."""

    def label(graph) -> None:
        ops = {op.name: op for op in graph.op}
        for op in list(ops.values()):
            if op.type == "SwiGlu" and "layer" in op.name:
                (product,) = [ops[tensor.rpartition(":")[0]] for tensor in op.input]
                if product.type != "MatMul":  # the routed experts'
                    continue
                chain = [product, op]
                for chained in chain:  # up to the combine, which adds the shared expert's result
                    chained.attr["_user_stream_label"].s = b"shared"
                    readers = [reader for reader in graph.op if f"{chained.name}:0" in reader.input and reader not in chain]
                    chain += [reader for reader in readers if not reader.type.startswith("Moe")]

    before, after = cost(graph(2)), cost(edited(graph(2), label))
    hidden = before.step_ms - after.step_ms
    assert hidden >= 4 * 2 * A3.matrix_launch_s * 1e3, "two products in each of four layers"
    assert after.parts_ms["collectives"] == pytest.approx(before.parts_ms["collectives"] - hidden)
    assert after.parts_ms["launch"] == pytest.approx(before.parts_ms["launch"])
    assert [*before.streams] == ["main"]
    assert before.streams["main"] == {"launches": before.launches, "busy_ms": pytest.approx(before.step_ms)}
    assert [*after.streams] == ["main", "shared"]
    assert sum(stream["launches"] for stream in after.streams.values()) == after.launches
    assert sum(stream["busy_ms"] for stream in after.streams.values()) == pytest.approx(before.step_ms)


def test_a_captured_graph_moves_and_sends_the_same(graph):
    """It has one stream, so that its exchanges hide behind nothing; layers and operators are otherwise the same."""
    ge, file = cost(graph(2, "ge", STOCK)), graph(2, "aclgraph", STOCK)
    captured = estimate(file, A3, MESH, 16, STOCK)
    assert captured.launches == len(inspect_acl.launches(graph_of(file).graph.nodes))
    assert captured.hbm_bytes == pytest.approx(ge.hbm_bytes, rel=0.05)
    assert captured.sent_bytes == pytest.approx(ge.sent_bytes, rel=0.01)
    assert {kind: count for kind, count in captured.bodies.items() if "attention" in kind} == {
        kind: count for kind, count in ge.bodies.items() if "attention" in kind
    }
    assert captured.step_ms == pytest.approx(ge.step_ms, rel=0.25)
    assert sum(captured.parts_ms.values()) == pytest.approx(captured.step_ms)


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
    cost = estimate(file, A3, MESH, 16, PACKAGES)
    (operator,) = cost.operators
    assert (operator.type, operator.launches) == ("dispatch_ffn_combine", 1)
    assert operator.parts_ms["collectives"] > 0
    assert operator.parts_ms["memory"] + operator.parts_ms.get("matrix", 0) > 0
    # Rows there as int8 and back in bfloat16, three of four of them from or to other ranks.
    assert cost.sent_bytes == pytest.approx(32 * 2 * 64 * (1 + 2) * 3 / 4 * A3.expert_imbalance)

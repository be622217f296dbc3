"""lowering/ascend/fuse.py: what is fused, what is not and why, and that nothing else changes: results, order of collectives, donations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import ge_bodies as gb
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Bucket, Limits, Mesh
from npucompile.lowering import collectives_check
from npucompile.lowering.ascend import fuse as module
from npucompile.lowering.ascend.convert import convert_body
from npucompile.lowering.ascend.emulator import ge_interpreter
from npucompile.lowering.ascend.emulator.emulator import Lockstep
from npucompile.lowering.ascend.emulator.ge_ops_fused_collectives import FUSED_TOGETHER
from npucompile.lowering.ascend.fuse import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, fuse, register
from npucompile.lowering.ascend.inspect_ge import census, census_by_body, check
from npucompile.lowering.ascend.link import stitch
from npucompile.lowering.ascend.lowered import lower
from npucompile.models import registry, step
from npucompile.models.sharding_rules import rules
from npucompile.models.variant import Variant

npu, aten, c10 = torch.ops.npu, torch.ops.aten, torch.ops._c10d_functional
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
FORMS = (REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE)
T, K, N, SLOTS = 1024, 256, 32, 1030


@pytest.fixture(scope="module", autouse=True)
def ta(tmp_path_factory):
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    register(ta)
    return ta


def body(fn, *shapes):
    made = gb.trace(FakeTensorMode(), fn, [shape if isinstance(shape[0], tuple) else (shape, BF16) for shape in shapes])
    (output,) = (node for node in made.graph.nodes if node.op == "output")
    output.args = (tuple(output.args[0]),)
    return made


def called(made) -> list[str]:
    return [str(n.target).split(".")[1] for n in made.graph.nodes if n.op == "call_function" and hasattr(n.target, "namespace")]


def scattered(x, how="sum", ranks=2, group="tp"):
    return c10.wait_tensor(c10.reduce_scatter_tensor(x, how, ranks, group))


def gathered(x, ranks=2, group="tp"):
    return c10.wait_tensor(c10.all_gather_into_tensor(x, ranks, group))


def reduced(x, how="sum", group="tp"):
    return c10.wait_tensor(c10.all_reduce(x, how, group))


# --- what is fused ---


def test_a_product_whose_sum_is_scattered():
    made = body(lambda x, w: (scattered(npu.npu_linear(x, w)) + 1,), (T, K), (N, K))
    assert fuse(made, FORMS) == 1
    assert called(made) == ["t", "npu_mm_reduce_scatter_base", "add"]
    (node,) = (n for n in made.graph.nodes if "scatter" in str(n.target))
    assert node.args[2:] == ("tp", 2)
    assert node.kwargs == {"reduce_op": "sum"}
    assert (tuple(node.meta["val"].shape), node.meta["val"].dtype) == ((T // 2, N), BF16)
    made.graph.lint()


def test_a_product_that_is_summed_everywhere():
    made = body(lambda x, w: (reduced(npu.npu_linear(x, w)),), (T, K), (N, K))
    assert fuse(made, FORMS) == 1
    assert called(made) == ["t", "npu_mm_all_reduce_base"]


def test_a_gather_goes_with_the_first_product_and_serves_the_others():
    def fn(x, first, second):
        whole = gathered(x)
        return npu.npu_linear(whole * 2, first), npu.npu_linear(whole, second.view(N, K)), npu.npu_linear(whole[: 2 * T], first)

    made = body(fn, (T // 2, K), (N, K), (2, N // 2, K))
    assert fuse(made, FORMS) == 1
    # The weight's reshape is in front of the operator now, and the slice that cut nothing is gone.
    assert called(made) == ["view", "t", "npu_all_gather_base_mm", "mul", "npu_linear", "npu_linear"]
    (node,) = (n for n in made.graph.nodes if "gather" in str(n.target))
    product, whole = (next(user for user in node.users if user.args[1] == i) for i in range(2))
    assert product in made.graph.output_node().args[0]
    assert sorted(user.name for user in whole.users) == ["mul", "npu_linear_2"]
    assert node.kwargs == {"gather_index": 0, "gather_output": True}
    made.graph.lint()


def test_a_gather_that_only_a_product_reads_leaves_no_second_result():
    made = body(lambda x, w: (npu.npu_linear(gathered(x)[:T], w),), (T // 2, K), (N, K))
    assert fuse(made, FORMS) == 1
    assert called(made) == ["t", "npu_all_gather_base_mm"]
    assert [str(n.target) for n in made.graph.nodes].count("<built-in function getitem>") == 1


def test_a_product_between_two_collectives_goes_with_one_of_them():
    made = body(lambda x, w: (scattered(npu.npu_linear(gathered(x), w)),), (T // 2, K), (N, K))
    assert fuse(made, FORMS) == 1
    assert called(made) == ["all_gather_into_tensor", "wait_tensor", "t", "npu_mm_reduce_scatter_base"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_ranks_and_dtypes_of_the_documents(ranks, dtype):
    made = body(lambda x, w: (scattered(npu.npu_linear(x, w), ranks=ranks),), ((T, K), dtype), ((N, K), dtype))
    assert fuse(made, FORMS) == 1


# --- what is not ---


def linear(x, w):
    return npu.npu_linear(x, w)


def twice(x, w):
    y = linear(x, w)
    return scattered(y), y


def written(x, w, pool, at):
    y = linear(pool[:T], w)
    npu.npu_scatter_nd_update_(pool, at, x[: at.shape[0]])
    return (scattered(y),)


def waits_apart(x, w):
    sent = c10.reduce_scatter_tensor(linear(x, w), "sum", 2, "tp")
    return c10.wait_tensor(sent), c10.wait_tensor(sent)


LEFT = {
    "two users of the product": (twice, (T, K), (N, K)),
    "two waits": (waits_apart, (T, K), (N, K)),
    "a largest instead of a sum": (lambda x, w: (scattered(linear(x, w), "max"),), (T, K), (N, K)),
    "an average everywhere": (lambda x, w: (reduced(linear(x, w), "avg"),), (T, K), (N, K)),
    "few rows": (lambda x, w: (scattered(linear(x, w)),), (T - 2, K), (N, K)),
    "few rows, summed": (lambda x, w: (reduced(linear(x, w)),), (T - 1, K), (N, K)),
    "few rows, gathered": (lambda x, w: (linear(gathered(x), w),), (T // 2 - 1, K), (N, K)),
    "the group of all ranks": (lambda x, w: (scattered(linear(x, w), group="world"),), (T, K), (N, K)),
    "all ranks, gathered": (lambda x, w: (linear(gathered(x, group="world"), w),), (T // 2, K), (N, K)),
    "groups beside each other": (lambda x, w: (reduced(linear(x, w), group="dp"),), (T, K), (N, K)),
    "sixteen ranks": (lambda x, w: (scattered(linear(x, w), ranks=16),), (T, K), (N, K)),
    "sixteen ranks, gathered": (lambda x, w: (linear(gathered(x, ranks=16), w),), (T, K), (N, K)),
    "too shallow": (lambda x, w: (scattered(linear(x, w)),), (T, K - 1), (N, K - 1)),
    "too deep": (lambda x, w: (scattered(linear(x, w)),), (T, 65535), (N, 65535)),
    "float32": (lambda x, w: (scattered(linear(x, w)),), ((T, K), F32), ((N, K), F32)),
    "a bias": (lambda x, w, b: (scattered(npu.npu_linear(x, w, b)),), (T, K), (N, K), (N,)),
    "transposed rows": (lambda x, w: (scattered(linear(x.t(), w)),), (K, T), (N, K)),
    "no product": (lambda x: (scattered(x * 2),), (T, K)),
    "nobody multiplies what is gathered": (lambda x: (gathered(x) * 2,), (T // 2, K)),
    "the gathered as weight": (lambda x, w: (linear(x, gathered(w)),), (T, K), (T // 2, K)),
    "a part of the gathered": (lambda x, w: (linear(gathered(x)[: T // 2], w),), (T, K), (N, K)),
    "rows written before they are sent": (written, (T, K), (N, K), (SLOTS, K), ((2, 1), I32)),
    "a weight made later": (lambda x, w: (linear(gathered(x), w * 2),), (T // 2, K), (N, K)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is(name):
    fn, *shapes = LEFT[name]
    made = body(fn, *shapes)
    before = str(made.graph)
    assert fuse(made, FORMS) == 0
    assert str(made.graph) == before


def test_no_form_is_used_until_one_is_documented_for_inference_everywhere():
    made = body(lambda x, w: (scattered(npu.npu_linear(x, w)),), (T, K), (N, K))
    assert frozenset() == module.FORMS
    assert fuse(made) == 0
    assert fuse(made, [ALL_GATHER, ALL_REDUCE]) == 0
    assert fuse(made, [REDUCE_SCATTER]) == 1


# --- the same results ---


def layer(x, gamma, q, kv, o, pool, at):
    """A row- and two column-parallel products with a pool that is written in place; the down product is summed everywhere."""
    h, _ = npu.npu_rms_norm(x, gamma, 1e-6)
    whole = gathered(h)
    a, b = npu.npu_linear(whole[:T], q), npu.npu_linear(whole[:T], kv.view(K, K))
    old = pool[:T] + b
    npu.npu_scatter_nd_update_(pool, at, old)
    y = scattered(npu.npu_linear(a * old, o))
    return x + y, reduced(npu.npu_linear(a, o))


LAYER = {
    "x": ((T // 2, K), BF16), "gamma": ((K,), BF16), "q": ((K, K), BF16), "kv": ((2, K // 2, K), BF16),
    "o": ((K, K), BF16), "pool": ((SLOTS, K), BF16), "at": ((T, 1), I32),
}  # fmt: skip


def operands(ranks):
    """For each rank tensors of its own; the weights too differ between ranks."""
    draw = torch.Generator().manual_seed(0)
    at = torch.randperm(SLOTS, generator=draw)[:T, None].int()
    return [
        [at.clone() if dtype == I32 else (torch.randn(shape, generator=draw) * 0.3).to(dtype) for shape, dtype in LAYER.values()]
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_the_same_bits_with_and_without(mesh):
    plain, fused = (body(layer, *LAYER.values()) for _ in range(2))
    assert fuse(fused, FORMS) == 3
    where = Mesh.parse(mesh)
    given, also = operands(where.size), operands(where.size)
    wanted, found = Lockstep(plain, where)(given), Lockstep(fused, where)(also)
    for mine, theirs in zip(wanted, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(torch.equal(a[5], b[5]) for a, b in zip(given, also, strict=True))
    assert not torch.equal(wanted[0][0], wanted[1][0])
    assert torch.equal(wanted[0][1], wanted[1][1])


# --- as GE operators ---


def stitched(ta):
    """The fused layer under a main graph, as a GE graph."""
    main = gb.Main()
    part = {"x": "inputs", "at": "inputs", "pool": "state"}
    order = ("gamma", "q", "kv", "o", "pool", "x", "at")
    nodes = {name: main.operand(f"{part.get(name, 'params')}.{name}", LAYER[name]) for name in order}
    main.body("layer", layer, list(LAYER.values()))
    assert fuse(main.root.layer, FORMS) == 3
    graph, signature = main.done(*main.call("layer", *(nodes[name] for name in LAYER)))
    return stitch(graph, signature, ta), signature, graph, order


def test_the_weight_is_read_as_it_lies(ta):
    made = body(layer, *LAYER.values())
    fuse(made, FORMS)
    converted = convert_body(made, ta)
    ops = {op.type: op for op in converted.ops}
    assert {"MatmulReduceScatter", "AllGatherMatmul", "MatmulAllReduce"} <= set(ops)
    assert not {"Transpose", "HcomAllGather", "HcomReduceScatter", "HcomAllReduce"} & set(ops)
    for kind, weight in (("AllGatherMatmul", "q_1:0"), ("MatmulReduceScatter", "o_1:0"), ("MatmulAllReduce", "o_1:0")):
        assert ops[kind].input[1] == weight
        assert ops[kind].attr["is_trans_b"].b
        assert ops[kind].attr["group"].s == b"tp"
    assert ops["AllGatherMatmul"].attr["rank_size"].i == ops["MatmulReduceScatter"].attr["rank_size"].i == 2
    assert {(name, key) for name, key, _ in converted.patches} == {(ops[kind].name, "group") for kind in ops if "Matmul" in kind}


def test_a_weight_that_something_else_transposed_stays_so(ta):
    made = body(lambda x, w: (npu.npu_mm_reduce_scatter_base(x, w, "tp", 2),), (T, K), (K, N))
    (op,) = convert_body(made, ta).ops
    assert (op.type, op.attr["is_trans_b"].b) == ("MatmulReduceScatter", False)


def test_a_donated_pool_is_still_proved(ta):
    container, signature, *_ = stitched(ta)
    check(container, signature)
    assert container.bound == (4,)
    assert census(container.graph)["ScatterNdUpdate"] == 1


def test_the_file_gives_the_same_bits(ta, monkeypatch):
    container, _, graph, order = stitched(ta)
    monkeypatch.setattr(ge_interpreter, "TOGETHER", {**ge_interpreter.TOGETHER, **FUSED_TOGETHER})
    where, at = Mesh.parse("dp=2,tp=2"), [list(LAYER).index(name) for name in order]
    given, also = ([[rank[i] for i in at] for rank in operands(4)] for _ in range(2))
    wanted, found = Lockstep(graph, where)(given), ge_interpreter.GeInterpreter(container, where)(also)
    for mine, theirs in zip(wanted, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(torch.equal(a[4], b[4]) for a, b in zip(given, also, strict=True))


# --- a model ---

CONFIG = {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": 256, "hidden_size": 512,
    "num_hidden_layers": 1, "layer_types": ("full_attention",), "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "eos_token_id": 255, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


def test_a_model_communicates_in_the_order_it_had(ta, monkeypatch):
    model, mesh, bucket = registry.from_config("small", CONFIG), Mesh.parse("dp=2,tp=2"), Bucket("prefill", 1, T)
    model = replace(model, config=replace(model.config, variant=Variant.of("none", grouped=True, recurrent=BF16)))
    program = step.program(model, bucket, Limits(128, 17, 9, 4096, 1), BF16, emit_logits=False)
    table = rules(mesh, experts=8, expert_parallel=True, tokens=bucket.tokens)
    partitioned = optimise(partition(program, mesh, table))
    monkeypatch.setattr(module, "FORMS", frozenset(FORMS))
    lowered = lower(partitioned)
    assert called(bodies(lowered.graph)["full_attention"]).count("npu_mm_reduce_scatter_base") == 1
    container = stitch(lowered.graph, lowered.signature, ta)
    check(container, lowered.signature)
    kinds = census_by_body(container.graph)
    assert [(k["AllGatherMatmul"], k["MatmulReduceScatter"]) for name, k in kinds.items() if "attention" in name] == [(1, 1)]
    collectives_check.agree(partitioned.collectives, collectives_check.of_container(container, in_order=True))

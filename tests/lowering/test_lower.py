"""lowering/lower.py: lowered graphs compute what the partitioned graph computes, and write pools without changing any result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from support import oracle

from npucompile.graphs import compile_count, ops
from npucompile.graphs.ir.flatten import bodies, flatten
from npucompile.graphs.ir.trace import TracedProgram, trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.primitive import TABLE, Cost, Primitive
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.text import as_text, target_name
from npucompile.graphs.types import Aval, Bucket, Limits, Mesh, Program, Rules, Tree
from npucompile.lowering.backends.eager import EagerExecutable
from npucompile.lowering.lower import LoweredProgram, lower_bodies, lower_eager, lower_inline
from npucompile.models import qwen3_5, step

# Graphs lowered for inductor call native operators, also when Python runs them.
pytestmark = pytest.mark.usefixtures("kernels")

F32, I32 = torch.float32, torch.int32
Forward = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]

# --- donation, one case at a time ---

# Three pages of four slots, one head of width five; each step writes two slots.
POOL = Aval((3, 4, 1, 5), F32)


def whole(forward: Forward, optimised: bool = True) -> PartitionedProgram:
    """A step over three pools a, b, c, rows and slots, partitioned for one device."""
    state = {name: POOL for name in "abc"}
    inputs = {"rows": Aval((2, 1, 5), F32), "slots": Aval((2,), I32)}
    partitioned = partition(trace(Program("toy", Bucket("decode", 2, 1), forward, {}, state, inputs)), Mesh(), Rules())
    return optimise(partitioned) if optimised else partitioned


def write(s: Tree, i: Tree, a: str = "a", b: str = "b") -> tuple[torch.Tensor, torch.Tensor]:
    return ops.cache_write(s[a], s[b], i["rows"], 2 * i["rows"], i["slots"])


def in_place(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    a, b = write(s, i)
    return {"y": a.sum() + b[0]}, {**s, "a": a, "b": b}


def old_value_is_read_before(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    before = s["a"].sum()
    a, b = write(s, i)
    return {"y": a.sum() - before}, {**s, "a": a, "b": b}


def old_value_is_read_after(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    a, b = write(s, i)
    return {"y": a - s["a"], "z": b.sum()}, {**s, "a": a, "b": b}


def only_one_pool_is_free(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    a, b = write(s, i)
    return {"y": s["b"] * 2}, {**s, "a": a, "b": b}


def plain_arithmetic(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    return {"y": s["a"] + s["b"]}, {"a": s["a"] + s["b"], "b": s["b"] * s["a"], "c": s["c"] + 1}


def unchanged(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    return {"y": s["a"] + i["rows"].sum()}, s


def swapped(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    return {"y": i["rows"] + 1}, {"a": s["b"], "b": s["c"], "c": s["a"]}


def copied_to_another(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """The old value of a is written to b through a view, while a itself is written."""
    a, c = write(s, i, "a", "c")
    return {"y": i["rows"] + 1}, {"a": a, "b": s["a"].view(12, 5).view(3, 4, 1, 5), "c": c}


def written_crosswise(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    a, b = write(s, i)
    return {"y": i["rows"] + 1}, {**s, "a": b, "b": a}


def written_twice(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    a, b = write(s, i)
    a, b = ops.cache_write(a, b, i["rows"] + 1, i["rows"] - 1, i["slots"] - 1)
    return {"y": a.sum()}, {**s, "a": a, "b": b}


def written_twice_and_read_between(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """As in a draft head, each write depends on a read after the previous write."""
    a, b = write(s, i)
    middle = (a * b).sum()
    a, b = ops.cache_write(a, b, i["rows"] + middle, i["rows"] - middle, i["slots"] - 1)
    return {"y": a.sum(), "middle": middle}, {**s, "a": a, "b": b}


def first_value_is_read_after_the_second(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    first, b = write(s, i)
    a, b = ops.cache_write(first, b, i["rows"] + 1, i["rows"] - 1, i["slots"] - 1)
    return {"y": a.sum() - first.sum()}, {**s, "a": a, "b": b}


def first_value_is_looked_at_after_the_second(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    first, b = write(s, i)
    look = first.view(12, 5)
    a, b = ops.cache_write(first, b, i["rows"] + 1, i["rows"] - 1, i["slots"] - 1)
    return {"y": a.sum() - look[2:7].sum()}, {**s, "a": a, "b": b}


def second_writer_takes_a_third_pool(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """c is read after the second writer, which so cannot write in place; neither writer of b can then."""
    a, b = write(s, i)
    b, c = ops.cache_write(b, s["c"], i["rows"] + 1, i["rows"] - 1, i["slots"] - 1)
    return {"y": b.sum() - s["c"].sum()}, {"a": a, "b": b, "c": c}


def one_pool_in_two_places(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    a, b = ops.cache_write(s["a"], s["a"], i["rows"], 2 * i["rows"], i["slots"])
    return {"y": i["rows"] + 1}, {**s, "a": a, "b": b}


def outputs_are_pools(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """Old, new and unchanged values and views of each as outputs; the next step must not change them."""
    a, b = write(s, i)
    outputs = {"new": a, "part": b[1], "row": b.view(12, 5)[3:4], "kept": s["c"], "look": s["c"][0]}
    return outputs, {**s, "a": a, "b": b}


def outputs_are_old_pools(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    a, b = write(s, i)
    return {"old": s["a"], "part": s["b"].split(1)[2]}, {**s, "a": a, "b": b}


def convolution(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """A donating primitive that also returns a result besides the pool."""
    x, pool = i["rows"].view(1, 2, 5), s["a"].view(3, 4, 5)
    slots = i["slots"][:1] * 0 + 1
    y, new = ops.causal_conv(x, s["b"].view(12, 5)[:5], pool, slots, slots[:, None], slots, slots + 1, x.dtype)
    return {"y": y}, {**s, "a": new.view(3, 4, 1, 5)}


def convolution_token_by_token(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """The same with a window after every token; the pool is a view, so no lowering writes it in place."""
    x, pool = i["rows"].view(1, 2, 5), s["a"].view(3, 4, 5)
    slots = i["slots"][:1] * 0 + 2
    both = torch.cat([slots - 1, slots])[None]
    y, new = ops.causal_conv(x, s["b"].view(12, 5)[:5], pool, slots, both, slots, slots, x.dtype)
    return {"y": y}, {**s, "a": new.view(3, 4, 1, 5)}


# Expected in the eager form: the number of in-place variants, of copies at the end, and of values cloned before.
WAYS: list[tuple[Forward, int, int, int]] = [
    (in_place, 1, 0, 0),
    (old_value_is_read_before, 1, 0, 0),
    (old_value_is_read_after, 0, 2, 0),
    (only_one_pool_is_free, 0, 2, 0),
    (plain_arithmetic, 0, 3, 0),
    (unchanged, 0, 0, 0),
    (swapped, 0, 3, 3),
    (copied_to_another, 0, 3, 1),
    (written_crosswise, 0, 2, 0),
    (written_twice, 2, 0, 0),
    (written_twice_and_read_between, 2, 0, 0),
    (first_value_is_read_after_the_second, 0, 2, 0),
    (first_value_is_looked_at_after_the_second, 0, 2, 0),
    (second_writer_takes_a_third_pool, 0, 3, 0),
    (one_pool_in_two_places, 0, 2, 0),
    (outputs_are_pools, 1, 0, 5),
    (outputs_are_old_pools, 0, 2, 2),
    (convolution, 0, 1, 0),
    (convolution_token_by_token, 0, 1, 0),
]


@dataclass
class Steps:
    """Five steps of a graph: the outputs of each when returned and after the last step, and the last state."""

    returned: list[list[torch.Tensor]]
    at_end: list[list[torch.Tensor]]
    state: list[torch.Tensor]


def first_state() -> list[torch.Tensor]:
    return [torch.randn(POOL.shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def inputs(n: int) -> list[torch.Tensor]:
    return [torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(10 + n)), torch.tensor([1 + n, 11 - n], dtype=I32)]


def functional(partitioned: PartitionedProgram) -> Steps:
    state, returned = first_state(), []
    outputs = len(partitioned.signature.outputs)
    for n in range(5):
        results = [t.clone() for t in partitioned.graph(*state, *inputs(n))]
        returned.append(results[:outputs])
        state = results[outputs:]
    return Steps(returned, returned, state)


def donated(lowered: LoweredProgram) -> Steps:
    run, state, returned, at_end = EagerExecutable(lowered.graph), first_state(), [], []
    buffers = [t.data_ptr() for t in state]
    for n in range(5):
        results = run([*state, *inputs(n)])
        returned.append([t.clone() for t in results])
        at_end.append(results)
    assert [t.data_ptr() for t in state] == buffers
    return Steps(returned, at_end, state)


def same(got: Steps, want: Steps) -> None:
    for mine, theirs in ((got.returned, want.returned), (got.at_end, want.at_end)):
        for step_got, step_want in zip(mine, theirs, strict=True):
            torch.testing.assert_close(step_got, step_want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.state, want.state, rtol=1e-6, atol=1e-6)


def calls(lowered: LoweredProgram) -> list[str]:
    return [target_name(n.target) for n in lowered.graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(("forward", "variants", "copies", "apart"), WAYS, ids=[way[0].__name__ for way in WAYS])
def test_pools_are_written_in_place_and_nobody_notices(forward: Forward, variants: int, copies: int, apart: int) -> None:
    partitioned = whole(forward)
    lowered = lower_eager(partitioned)
    names = calls(lowered)
    assert (sum(n.endswith("_") and n.startswith("npuc") for n in names), names.count("aten.copy_"), names.count("aten.clone")) == (
        variants,
        copies,
        apart,
    )
    want = functional(partitioned)
    same(donated(lowered), want)
    same(donated(lower_inline(partitioned, "inductor")), want)


@pytest.mark.parametrize("forward", [way[0] for way in WAYS if way[0] is not one_pool_in_two_places], ids=lambda f: f.__name__)
def test_graphs_that_no_pass_has_seen_lower_too(forward: Forward) -> None:
    partitioned = whole(forward, optimised=False)
    same(donated(lower_eager(partitioned)), functional(partitioned))


def test_results_unpacked_twice_are_all_led_to_the_pool() -> None:
    partitioned = whole(in_place)
    graph = partitioned.graph.graph
    unpacking = next(n for n in graph.nodes if n.name.startswith("getitem"))
    reader = next(n for n in unpacking.users if n.op == "call_function")
    with graph.inserting_after(unpacking):
        twice = graph.call_function(unpacking.target, unpacking.args)
        twice.meta["val"] = unpacking.meta["val"]
    reader.replace_input_with(unpacking, twice)
    partitioned.graph.recompile()
    lowered = lower_eager(partitioned)
    assert "npuc.cache_write_" in calls(lowered)
    same(donated(lowered), functional(partitioned))


def test_a_pool_that_its_writer_also_reads_elsewhere_is_not_written_in_place() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        y, pool = ops.causal_conv(s["pool"], p["w"], s["pool"], i["slots"], i["slots"][:, None], i["slots"], i["slots"], F32)
        return {"y": y}, {"pool": pool}

    params, state = {"w": Aval((5, 3), F32)}, {"pool": Aval((2, 2, 5), F32)}
    program = Program("conv", Bucket("decode", 2, 2), forward, params, state, {"slots": Aval((2,), I32)})
    names = calls(lower_eager(optimise(partition(trace(program), Mesh(), Rules()))))
    assert "npuc.causal_conv" in names
    assert "aten.copy_" in names


def test_every_result_of_an_in_place_variant_goes_to_its_reader(request: pytest.FixtureRequest) -> None:
    """A primitive that returns a value before and after its pool, so that indices shift when the pool's is dropped."""
    request.addfinalizer(lambda: TABLE.pop("test_three", None))

    class Three(NamedTuple):
        x: torch.Tensor
        pool: torch.Tensor

    three = Primitive("test_three", Three, factors="_ _, _ _ -> _ _, _ _, _ _", donates=((1, 1),))
    three.abstract(lambda a: (torch.empty_like(a.x), torch.empty_like(a.pool), torch.empty_like(a.x)))
    three.reference(lambda a: (a.x + a.pool, a.pool + 1, a.x * a.pool))
    three.inplace(lambda a: (a.x + a.pool, a.pool, a.x * a.pool, a.pool.add_(1))[:3])
    three.cost(lambda a: Cost())

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        total, pool, product = three(i["x"], s["pool"])
        return {"product": product * 2, "pool": pool * 3, "total": total * 4}, {"pool": pool}

    pool = Aval((2, 3), F32)
    partitioned = partition(trace(Program("three", Bucket("decode", 2, 1), forward, {}, {"pool": pool}, {"x": pool})), Mesh(), Rules())
    lowered = lower_eager(optimise(partitioned))
    assert calls(lowered) == ["npuc.test_three_", "getitem", "getitem", *["aten.mul.Tensor"] * 3]
    x, state = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    product, new, total = EagerExecutable(lowered.graph)([state, x])
    assert torch.equal(product, 2 * x)
    assert torch.equal(new, torch.full((2, 3), 6.0))
    assert torch.equal(total, 4 * (x + 1))
    assert torch.equal(state, torch.full((2, 3), 2.0))


# --- a whole model: one layer of each kind ---

CONFIG = {
    "vocab_size": 13,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.34},
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 7,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
}
LIMITS = Limits(page_size=4, num_pages=11, num_slots=7, max_model_len=20, slots_per_request=3, drafts=2)


def convolved(old: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> PartitionedProgram:
    """A step with a pool of convolution windows; `old` computes an output of the pool's values: (before, after) -> output."""

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        y, pool = ops.causal_conv(i["x"], p["w"], s["pool"], i["read"], i["write"], *(i["num_computed_tokens"],) * 2, F32)
        return {"y": y, "old": old(s["pool"], pool)}, {"pool": pool}

    rows = {"x": Aval((2, 2, 5), F32), "read": Aval((2,), I32), "write": Aval((2, 2), I32), "num_computed_tokens": Aval((2,), I32)}
    program = Program("conv", Bucket("decode", 2, 2), forward, {"w": Aval((5, 3), F32)}, {"pool": Aval((6, 2, 5), F32)}, rows)
    return optimise(partition(trace(program), Mesh(), Rules()))


@pytest.mark.parametrize("free", [True, False])
def test_a_kernel_writes_a_pool_that_nothing_reads_later(free: bool) -> None:
    """A later reader sees the old pool, and the functional reference computes the new one."""
    partitioned = convolved(lambda before, after: after * 2 if free else before * 2)
    lowered = lower_inline(partitioned, "inductor")
    assert ("npuc_native.npuc_conv" in calls(lowered)) == free
    draw = torch.Generator().manual_seed(0)
    slots = [torch.tensor(s, dtype=I32) for s in ([1, 2], [[3, 4], [5, 1]], [1, 1])]
    operands = [*(torch.randn(shape, generator=draw) for shape in ((5, 3), (6, 2, 5), (2, 2, 5))), *slots]
    *wanted, pool = partitioned.graph(*operands)
    torch.testing.assert_close(EagerExecutable(lowered.graph)(operands), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(operands[1], pool, rtol=1e-6, atol=1e-6)


@dataclass
class Stages:
    traced: TracedProgram
    partitioned: PartitionedProgram
    optimised: PartitionedProgram
    eager: LoweredProgram
    inductor: LoweredProgram
    bodies: LoweredProgram


def stages(bucket: Bucket) -> Stages:
    model = step.Model("tiny", qwen3_5.FAMILY, qwen3_5.read_config(CONFIG))
    traced = trace(step.program(model, bucket, LIMITS, F32))
    partitioned = partition(traced, Mesh(), Rules())
    best = optimise(partitioned)
    return Stages(traced, partitioned, best, lower_eager(best), lower_inline(best, "inductor"), lower_bodies(best, "inductor"))


@pytest.fixture(scope="module")
def decode() -> Stages:
    return stages(Bucket("decode", 2, 3))


@pytest.fixture(scope="module")
def prefill() -> Stages:
    return stages(Bucket("prefill", 1, 8))


def test_every_stage_reads_as_it_did(decode: Stages, golden: Callable[[str, str], None]) -> None:
    golden("tiny_1_traced", as_text(decode.traced.graph, "tiny decode-b2-q1 traced"))
    golden("tiny_2_partitioned", as_text(decode.partitioned.graph, "tiny decode-b2-q1 partitioned"))
    golden("tiny_3_optimised", as_text(decode.optimised.graph, "tiny decode-b2-q1 optimised"))
    golden("tiny_4_eager", decode.eager.as_text())
    golden("tiny_5_inductor", decode.bodies.as_text())


def test_lowering_leaves_the_partitioned_graph_alone(decode: Stages) -> None:
    before = as_text(decode.optimised.graph, "")
    assert lower_eager(decode.optimised).as_text() == decode.eager.as_text()
    assert lower_inline(decode.optimised, "inductor").as_text() == decode.inductor.as_text()
    assert as_text(decode.optimised.graph, "") == before


def test_inlining_is_a_trace_and_counted_as_one() -> None:
    partitioned = whole(unchanged)
    before = compile_count.count()
    lower_eager(partitioned)
    assert compile_count.count() == before
    lower_inline(partitioned, "inductor")
    assert compile_count.count() == before + 1


def test_eager_keeps_primitives_and_donates_every_pool(decode: Stages) -> None:
    names = calls(decode.eager)
    assert {"npuc.cache_write_", "npuc.causal_conv_", "npuc.gated_delta_"} <= set(names)
    assert not {"npuc.cache_write", "npuc.causal_conv", "npuc.gated_delta"} & set(names)
    copied = [n.args[0].meta["leaf"] for n in decode.eager.graph.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert copied == ["state.request_slots"], "a few numbers a request"
    assert (decode.eager.backend, decode.eager.bucket) == ("eager", Bucket("decode", 2, 3))


def test_inlining_leaves_aten_and_native_operators(decode: Stages) -> None:
    names = calls(decode.inductor)
    assert {name.split(".")[0] for name in names} == {"aten", "npuc_native", "getitem"}
    assert {name for name in names if name.startswith("npuc_native")} == {
        f"npuc_native.npuc_{name}" for name in ("attention", "conv", "delta", "embed_f32", "experts", "linear_f32", "sample")
    }
    assert names[-5:] == ["aten.copy_"] * 5, "one copy a pool that aten writes, at the end; kernels write theirs themselves"


def test_lowered_placeholders_know_their_leaves_and_results_are_the_outputs(decode: Stages) -> None:
    for lowered in (decode.eager, decode.inductor, decode.bodies):
        nodes = list(lowered.graph.graph.nodes)
        assert [n.meta["leaf"] for n in nodes if n.op == "placeholder"] == [leaf.name for leaf in lowered.signature.operands]
        shapes = [tuple(n.meta["val"].shape) for n in nodes[-1].args[0]]
        assert shapes == [leaf.aval.shape for leaf in lowered.signature.outputs]


def operands(stages: Stages, step_inputs: dict[str, object]) -> list[torch.Tensor]:
    r = torch.Generator().manual_seed(0)
    leaves = stages.optimised.signature.operands
    values = []
    for leaf in leaves:
        kind, _, name = leaf.name.partition(".")
        if kind == "inputs":
            values.append(torch.tensor(step_inputs[name], dtype=leaf.aval.dtype).reshape(leaf.aval.shape))
        elif leaf.name == "state.request_slots":
            values.append(torch.tensor([[0, 0, 0, 0, 0], [0, 0, 3, 5, 1], [2, 1, 7, 2, 11]], dtype=I32))
        else:
            values.append(torch.randn(leaf.aval.shape, generator=r) * (0.3 if kind == "params" else 1.0))
    return values


SAMPLING = {"temperature": [0.0, 0.9], "top_k": [0, 3], "top_p": [1.0, 0.8], "min_p": [0.0, 0.1], "uniform": [0.5, 0.7]}


def run(stages: Stages, steps: list[dict[str, object]]) -> None:
    """Runs the functional, eager and inlined graphs and the one of bodies over the same steps; outputs and pools agree after each."""
    signature = stages.optimised.signature
    state_at = slice(len(signature.params), len(signature.params) + len(signature.state))
    forms = [EagerExecutable(graph) for graph in (stages.eager.graph, stages.inductor.graph, flatten(stages.bodies.graph))]
    pools = [operands(stages, steps[0])[state_at] for _ in range(4)]
    for step_inputs in steps:
        values = operands(stages, step_inputs)
        values[state_at] = pools[0]
        want = stages.optimised.graph(*values)
        pools[0] = want[len(signature.outputs) :]
        for form, own in zip(forms, pools[1:], strict=True):
            values[state_at] = own
            got = form(values)
            torch.testing.assert_close(got, want[: len(signature.outputs)], rtol=1e-4, atol=1e-5)
            # Padding tokens are written to null pages and slots, whose contents are undefined.
            torch.testing.assert_close([pool[1:] for pool in own], [pool[1:] for pool in pools[0]], rtol=1e-4, atol=1e-5)


def test_decode_steps_agree_in_every_form(decode: Stages) -> None:
    steps = [
        {
            "request_slots": [1, 2],
            "drafts": [2, 2],
            "base": [n, 2 + n],
            "page_table": [[1, 2, 5, 6, 7], [4, 3, 8, 9, 10]],
            "state_slots_out": [[1, 2, 3], [4, 5, 6]],
            **{name: values for name, values in SAMPLING.items() if name != "uniform"},
            "uniform": [[0.5, 0.1, 0.9, 0.3, 0.2], [0.7, 0.2, 0.4, 0.6, 0.8]],
        }
        for n in range(4)
    ]
    run(decode, steps)


def test_prefill_chunks_agree_in_every_form(prefill: Stages) -> None:
    one = {name: values[1] for name, values in SAMPLING.items()}
    base = {"request_slots": 2, "page_table": [5, 1, 3, 2, 4], "state_slots_in": 2, "state_slots_out": 2, **one}
    run(
        prefill,
        [
            {"tokens": [1, 2, 3, 4, 5, 6, 7, 8], "num_computed_tokens": 0, "query_lens": 8, "next_tokens": 9, **base},
            {"tokens": [9, 10, 11, 0, 0, 0, 0, 0], "num_computed_tokens": 8, "query_lens": 3, "next_tokens": -1, **base},
        ],
    )


# --- bodies ---


def lowered_twice(name: str, bucket: Bucket) -> tuple[LoweredProgram, LoweredProgram]:
    """A family's step, which drafts, as calls of bodies and as one graph."""
    model = replace(oracle.drafting(name).model, drafting=True)
    optimised = optimise(partition(trace(step.program(model, bucket, oracle.limits(2), F32)), Mesh(), Rules()))
    return lower_bodies(optimised, "inductor"), lower_inline(optimised, "inductor")


@pytest.mark.parametrize("bucket", [Bucket("decode", 2, 3), Bucket("prefill", 1, 16)], ids=lambda bucket: bucket.name)
@pytest.mark.parametrize("name", ["dense", "moe", "latent"])
def test_bodies_compute_bit_for_bit_what_one_graph_does(name: str, bucket: Bucket) -> None:
    called, flat = lowered_twice(name, bucket)
    r = torch.Generator().manual_seed(1)
    values = [
        torch.randn(leaf.aval.shape, generator=r) * 0.3
        if leaf.aval.dtype == F32
        else torch.randint(0, 2, leaf.aval.shape, generator=r).to(leaf.aval.dtype)
        for leaf in flat.signature.operands
    ]
    ours, theirs = [value.clone() for value in values], [value.clone() for value in values]
    for _ in range(2):
        got, want = EagerExecutable(flatten(called.graph))(ours), EagerExecutable(flat.graph)(theirs)
        for pair in zip([*got, *ours], [*want, *theirs], strict=True):
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
    assert any(not torch.equal(value, before) for value, before in zip(ours, values, strict=True)), "pools were written"


def test_every_body_takes_and_gives_contiguous_values_alone() -> None:
    called, _ = lowered_twice("moe", Bucket("decode", 2, 3))
    for body in bodies(called.graph).values():
        results = body.graph.output_node().args[0]
        assert all(node.meta["val"].is_contiguous() for node in [*body.graph.find_nodes(op="placeholder"), *results])


def test_a_pool_that_bodies_cannot_write_in_place_makes_one_graph() -> None:
    lowered = lower_bodies(whole(swapped), "inductor")
    assert not bodies(lowered.graph)
    assert lowered.as_text() == lower_inline(whole(swapped), "inductor").as_text()

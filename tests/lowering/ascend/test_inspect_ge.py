"""lowering/ascend/inspect_ge.py: the text and census of a GE graph are complete, and each broken invariant is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import parse
from npucompile.lowering.ascend.inspect_ge import census_by_body, check, text
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.shipped import GE


@pytest.fixture(scope="module")
def ta(tmp_path_factory):
    return gb.loaded(tmp_path_factory.mktemp("stubs"))


X, POOL = ((8, 4), gb.BF16), ((16, 4), gb.F32)
ROWS, NEW = ((2, 1), gb.I32), ((2, 4), gb.F32)
npu = torch.ops.npu


@pytest.fixture(scope="module")
def layers(ta):
    graph, signature = gb.two_kinds(2)
    return link(graph, signature, ta), signature


def of_body(ta, fn, *, results=None):
    """GeFile and signature of one body (x, pool, rows, new)."""
    main = gb.Main()
    x, pool = main.operand("params.x", X), main.operand("state.pool", POOL)
    rows, new = main.operand("inputs.rows", ROWS), main.operand("inputs.new", NEW)
    main.body("body", fn, [X, POOL, ROWS, NEW])
    graph, signature = main.done(*main.call("body", x, pool, rows, new))
    return link(graph, signature, ta), signature


def edited(ge_file, edit):
    """The GE file after `edit(operators by name, graph)`."""
    model = parse(ge_file.graph)
    edit({op.name: op for op in model.graph[0].op}, model.graph[0])
    return replace(ge_file, graph=model.SerializeToString(deterministic=True))


def test_census(layers):
    ge_file, signature = layers
    check(ge_file, signature)
    with pytest.raises(LoweringError, match="GE model"):
        census_by_body(b"")
    counts = GE.census(ge_file)
    assert counts["Data"] == len(signature.operands)
    assert counts["ScatterPaKvCache"] == counts["RecurrentGatedDeltaRule"] == counts["NetOutput"] == 1
    assert list(counts) == sorted(counts)
    bodies = census_by_body(ge_file.graph)
    assert list(bodies) == ["", "layer00_attention", "layer01_deltanet"]
    assert sum(sum(counts_.values()) for counts_ in bodies.values()) == sum(counts.values())
    assert bodies["layer00_attention"]["HcomAllReduce"] == 1


def test_what_differs_from_a_proved_graph_in_one_thing_is_proved_itself(layers):
    ge_file, signature = layers
    files = {"outputs": ge_file.outputs + 1, "donations": ((1, 0),), "bound": (0,), "feeds": (*reversed(ge_file.data),)}
    signatures = {"params": signature.params[1:], "state": signature.state[:-1]}
    changed = [(replace(ge_file, **{name: value}), signature) for name, value in files.items()]
    for other in [*changed, *((ge_file, replace(signature, **{name: value})) for name, value in signatures.items())]:
        check(ge_file, signature)
        with pytest.raises(LoweringError, match="breaches"):
            check(*other)


def test_text_has_a_line_for_each_operator(layers):
    ge_file, _ = layers
    lines = text(ge_file.graph).splitlines()
    assert len(lines) == sum(GE.census(ge_file).values())
    assert "state.layers.0.k_pool = Data() 5 : bf16[8,128,2,64]" in lines
    texts = {line.split(" = ")[0]: line.split(" = ", 1)[1] for line in lines}
    assert texts["layer00_attention/RmsNorm"] == "RmsNorm(inputs.x:0, params.layers.0.gamma:0) epsilon=1e-06 : bf16[8,256], f32[8,1]"
    assert texts["layer00_attention/Const"] == "Const() [8, 4, 64] : i64[3]"
    reduce = "HcomAllReduce(layer00_attention/MatMul_2:0) fusion=0 fusion_id=-1 group='tp' reduction='sum' : bf16[8,256]"
    assert texts["layer00_attention/HcomAllReduce"] == reduce
    assert texts["layer00_attention/Reshape"].endswith(" : bf16[?]")
    assert texts["NetOutput"] == (
        "NetOutput(layer01_deltanet/Add:0, layer01_deltanet/RecurrentGatedDeltaRule:1, layer01_deltanet/ScatterNdUpdate:-1)"
    )


FIA = "layer00_attention/FusedInferAttentionScore"


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda ops, graph: setattr(ops["layer00_attention/Add"], "name", "layer00_attention/MatMul"), "two operators are called layer00"),
        (lambda ops, graph: ops[FIA].input.__setitem__(0, "nobody:0"), f"{FIA} reads nobody:0, which no operator before it gives"),
        (lambda ops, graph: ops[FIA].input.__setitem__(0, "inputs.x:1"), f"{FIA} reads inputs.x:1, which no operator before it gives"),
        (lambda ops, graph: ops[FIA].input.__setitem__(0, f"{FIA}:0"), f"{FIA} reads {FIA}:0, which no operator before it gives"),
        (
            lambda ops, graph: ops[FIA].input.__setitem__(5, "layer00_attention/Const:0"),
            f"{FIA} has the constant layer00_attention/Const:0",
        ),
        (lambda ops, graph: ops[FIA].input.__setitem__(6, "layer00_attention/Const:0"), "as lengths; legal is a tensor of the step"),
        (lambda ops, graph: setattr(ops["inputs.x"].attr["index"], "i", 4), "data are numbered"),
        (
            lambda ops, graph: ops["NetOutput"].input.append("inputs.x:0"),
            r"NetOutput has \[3\] inputs for 1 results and donations \(\(1, 7\),\)",
        ),
        (
            lambda ops, graph: ops["layer00_attention/ScatterPaKvCache"].input.__setitem__(1, "state.layers.0.v_pool:0"),
            "state.layers.0.k_pool is not written in place, and no output is bound to its memory",
        ),
        (
            lambda ops, graph: ops["NetOutput"].input.__setitem__(0, "layer00_attention/ScatterPaKvCache:0"),
            "state.layers.0.k_pool is a result of the program and its own next state",
        ),
        (
            lambda ops, graph: ops["layer00_attention/Reshape_2"].input.__setitem__(0, "state.layers.0.k_pool:0"),
            f"{FIA} reads state.layers.0.k_pool, and layer00_attention/ScatterPaKvCache overwrites it without waiting",
        ),
        (
            lambda ops, graph: ops["layer01_deltanet/Muls"].input.__setitem__(0, "state.layers.1.delta:0"),
            "Muls reads state.layers.1.delta, and layer01_deltanet/RecurrentGatedDeltaRule overwrites it without waiting",
        ),
        (
            lambda ops, graph: ops["layer01_deltanet/ScatterNdUpdate"].input.__setitem__(2, "inputs.x:0"),
            "GatherV2 reads state.layers.1.conv, and layer01_deltanet/ScatterNdUpdate overwrites it without waiting",
        ),
        (
            lambda ops, graph: ops["NetOutput"].input.pop(),
            "ScatterNdUpdate writes state.layers.1.conv, but no result waits for it: GE drops it",
        ),
        (lambda ops, graph: graph.op.add(name="late", type="Const"), "the last operator is not NetOutput"),
        (
            lambda ops, graph: (
                ops["layer01_deltanet/Reshape"].input.__setitem__(0, "state.layers.1.conv:0"),
                ops["layer01_deltanet/ScatterNdUpdate"].input.__setitem__(0, "layer01_deltanet/Reshape:0"),
            ),
            "ScatterNdUpdate writes operand 8 through the view layer01_deltanet/Reshape:0, which may be a copy",
        ),
        (
            lambda ops, graph: (
                ops["layer01_deltanet/Muls"].input.__setitem__(0, "state.layers.1.conv:0"),
                setattr(ops["layer01_deltanet/Muls"], "type", "Identity"),
            ),
            r"layer01_deltanet/Muls copies all 4896 elements of state.layers.1.conv",
        ),
        (
            lambda ops, graph: ops["layer01_deltanet/ScatterNdUpdate"].input.__setitem__(0, "inputs.gate:0"),
            "operands .* are said to be written in place, and no operator does",
        ),
    ],
)
def test_each_breach_is_named(layers, edit, message):
    ge_file, signature = layers
    with pytest.raises(LoweringError, match=message):
        check(edited(ge_file, edit), signature)


def test_all_breaches_are_listed(layers):
    ge_file, signature = layers

    def edit(ops, graph):
        ops["layer01_deltanet/ScatterNdUpdate"].input[2] = "inputs.x:0"
        ops["layer00_attention/Reshape_2"].input[0] = "state.layers.0.k_pool:0"

    with pytest.raises(LoweringError, match=r"has 2 breaches: .*k_pool.*; .*conv"):
        check(edited(ge_file, edit), signature)


def test_two_writers_of_one_version_are_a_breach(layers):
    ge_file, signature = layers

    def edit(ops, graph):
        second, last = graph.op.add(), graph.op.add()
        second.CopyFrom(ops["layer01_deltanet/ScatterNdUpdate"])
        last.CopyFrom(ops["NetOutput"])
        second.name = "again"
        del graph.op[-3]

    with pytest.raises(LoweringError, match=r"again overwrites state.layers.1.conv:0, which .* has overwritten before"):
        check(edited(ge_file, edit), signature)


def test_writing_what_is_no_state_is_a_breach(layers):
    ge_file, signature = layers
    moved = replace(signature, params=(*signature.params, *signature.state[:1]), state=signature.state[1:])
    with pytest.raises(LoweringError, match=r"operand 5 \(state.layers.0.k_pool\) is written and is no state"):
        check(ge_file, moved)


def test_a_copy_that_torchair_leaves_is_found(ta):
    def twice_read(x, pool, rows, new):
        old = pool.index_select(0, rows.view(2))
        pool.copy_(npu.npu_scatter_nd_update(pool, rows, new))
        return (x + 1, old)

    with pytest.raises(LoweringError, match=r"body/TensorMove copies all 64 elements of state.pool"):
        check(*of_body(ta, twice_read))


def test_a_race_with_an_output_bound_to_the_memory_is_found(ta):
    def racing(x, pool, rows, new):
        pool.copy_(pool * 2 + 1)
        return (x + 1,)

    ge_file, signature = of_body(ta, racing)
    check(ge_file, signature)

    def edit(ops, graph):
        late = next(op for op in graph.op if op.name.startswith("body/Add") and op.input[0].startswith("params.x"))
        late.input[0] = "state.pool:0"

    with pytest.raises(LoweringError, match=r"body/Add_1 reads state.pool, and body/Add overwrites it without waiting"):
        check(edited(ge_file, edit), signature)


def test_a_state_that_the_graph_does_not_take_stays_as_it_is(ta):
    ge_file, signature = of_body(ta, lambda x, pool, rows, new: (x + 1,))
    assert ge_file.feeds == (0,)
    check(ge_file, signature)


def test_graphs_of_prompts_leave_rows_of_pictures_as_they_are(ta):
    ge_file, signature = of_body(ta, lambda x, pool, rows, new: (pool.index_select(0, rows.view(2)) + new,))
    message = "state.pool is not written in place, and no output is bound to its memory"
    with pytest.raises(LoweringError, match=message):
        check(ge_file, signature)
    (pool,) = signature.state
    pictures = replace(pool, aval=replace(pool.aval, axes=("picture_rows", None)))
    with pytest.raises(LoweringError, match=message):
        check(ge_file, replace(signature, state=(pictures,)))
    # The graph does not take its first operand, here another pool.
    check(ge_file, replace(signature, params=(), state=(replace(pool, name="state.other"), pictures)))

"""lowering/ascend/link.py: bodies are linked into one GE graph with in-place pools, and inconsistent bodies are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend import link as link_module
from npucompile.lowering.ascend.convert import convert_body
from npucompile.lowering.ascend.ge_file import GROUP, decode, encode, operators, parse, patched
from npucompile.lowering.ascend.inspect_ge import census_by_body, check
from npucompile.lowering.ascend.link import link

X, POOL = ((8, 4), gb.BF16), ((16, 4), gb.F32)
ROWS, NEW = ((2, 1), gb.I32), ((2, 4), gb.F32)


def ops_of(ge_file):
    return {op.name: op for op in operators(parse(ge_file.graph))}


def scatter(x, pool, rows, new):
    old = pool.index_select(0, rows.view(2))
    torch.ops.npu.npu_scatter_nd_update_(pool, rows, new + old)
    return (x + 1, old)


def dense(x, pool):
    pool.copy_(pool * 2 + 1)
    return (x + 1,)


def test_layers_are_converted_once_a_kind_and_copied_for_each(ta, monkeypatch):
    names = []
    monkeypatch.setattr(link_module, "convert_body", lambda gm, ta, name: names.append(name) or convert_body(gm, ta, name))
    graph, signature = gb.two_kinds(6)
    ge_file = link(graph, signature, ta)
    assert names == ["attention", "deltanet"]
    counts = census_by_body(ge_file.graph)
    assert list(counts) == ["", *(f"layer{i:02d}_{('attention', 'deltanet')[i % 2]}" for i in range(6))]
    assert counts["layer00_attention"] == counts["layer02_attention"] == counts["layer04_attention"]
    assert counts[""] == {"Data": len(signature.operands), "NetOutput": 1}
    check(ge_file, signature)


def test_a_linked_graph_is_the_graph_that_torchair_makes_of_the_whole(ta):
    graph, signature = gb.two_kinds(4)
    ge_file = link(graph, signature, ta)
    whole = convert_body(gb.inlined(graph), ta)
    ops = [op for op in operators(parse(ge_file.graph)) if op.type not in ("Data", "NetOutput")]
    data = {f"{op.name}:0": ge_file.data[op.attr["index"].i] for op in operators(parse(ge_file.graph)) if op.type == "Data"}
    assert gb.meanings(ops, data) == gb.meanings(whole.ops, whole.feeds)
    donated = {operand for _, operand in ge_file.donations}
    assert donated == whole.donated
    assert set(ge_file.bound) == set(whole.written) - donated
    assert len(whole.control) == 2
    assert {key: value for key, value in ge_file.options.items() if key in whole.options} == whole.options
    assert ge_file.engine == whole.engine


def test_data_and_outputs_are_as_torchair_writes_them(ta):
    main = gb.Main()
    a, pool = main.operand("params.a", X), main.operand("state.pool", POOL)
    main.body("dense", dense, [X, POOL])
    graph, signature = main.done(*main.call("dense", a, pool))
    ge_file = link(graph, signature, ta)
    flat = gb.inlined(graph)
    with a.meta["val"].fake_mode:
        runner = ta.get_compiler(ta.CompilerConfig())(flat, [a.meta["val"], pool.meta["val"]]).runner
    theirs = {op.type: op for op in runner.graph.op if op.type in ("Data", "NetOutput")}
    ours = {op.type: op for op in ops_of(ge_file).values() if op.type in ("Data", "NetOutput")}
    assert set(theirs) == set(ours)
    for kind, op in ours.items():
        assert {k: v.SerializeToString(deterministic=True) for k, v in op.attr.items()} == {
            k: v.SerializeToString(deterministic=True) for k, v in theirs[kind].attr.items()
        }
        for desc, other in zip([*op.input_desc, *op.output_desc], [*theirs[kind].input_desc, *theirs[kind].output_desc], strict=True):
            assert (desc.name, desc.dtype, desc.layout, list(desc.shape.dim)) == (
                other.name, other.dtype, other.layout, list(other.shape.dim)
            )  # fmt: skip
            assert desc.device_type == other.device_type
    attrs = parse(ge_file.graph).graph[0].attr
    assert {k: v.SerializeToString() for k, v in attrs.items()} == {k: v.SerializeToString() for k, v in runner.graph.attr.items()}
    local, engine = runner._normalize_ge_option()
    # torchair freezes what the compiler of a whole module knows to be a parameter.
    assert ge_file.options == local | {"pattern_fusion_pass": "0", "frozenInput": "1,1"}
    assert ge_file.engine == engine
    assert ge_file.donations == ((1, 1),)


def test_a_parameter_without_values_is_refused_and_an_input_without_is_not(ta):
    main = gb.Main()
    weight, empty, rows = (
        main.operand("params.a", X),
        main.operand("params.b", ((0, 4), gb.BF16)),
        main.operand("inputs.c", ((0, 4), gb.BF16)),
    )
    shapes = [X, ((0, 4), gb.BF16)]
    main.body("joined", lambda a, b: (torch.cat([a, b]),), shapes)
    graph, signature = main.done(*main.call("joined", weight, rows))
    link(graph, signature, ta)
    graph, signature = main.done(*main.call("joined", weight, empty))
    with pytest.raises(LoweringError, match=r"params\.b have no values: GE loads no graph with a frozen input of size 0"):
        link(graph, signature, ta)


@pytest.mark.long
def test_bytes_do_not_depend_on_the_process(ta, tmp_path):
    graph, signature = gb.two_kinds(3)
    mine = encode(link(graph, signature, ta))
    assert encode(link(graph, signature, ta)) == mine
    code = (
        f"import pathlib, sys; sys.path.insert(0, {str(Path(gb.__file__).parent)!r})\n"
        "import ge_bodies as gb\n"
        f"ta = gb.loaded(pathlib.Path({str(tmp_path)!r}))\n"
        "from npucompile.lowering.ascend.link import link\n"
        "from npucompile.lowering.ascend.ge_file import encode\n"
        f"pathlib.Path({str(tmp_path / 'theirs')!r}).write_bytes(encode(link(*gb.two_kinds(3), ta)))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True)
    assert (tmp_path / "theirs").read_bytes() == mine


def test_operands_that_nobody_reads_have_no_data(ta):
    main = gb.Main()
    main.operand("params.unused", X)
    x, pool = main.operand("params.x", X), main.operand("state.pool", POOL)
    dead = main.operand("inputs.dead", X)
    rows, new = main.operand("inputs.rows", ROWS), main.operand("inputs.new", NEW)
    main.body("step", lambda dead, *rest: scatter(*rest), [X, X, POOL, ROWS, NEW])
    graph, signature = main.done(*main.call("step", dead, x, pool, rows, new))
    ge_file = link(graph, signature, ta)
    assert ge_file.feeds == (1, 2, 4, 5)
    assert ge_file.inputs == 6
    assert ge_file.bound == (2,)
    assert ge_file.options["ge.inputHintShape"] == "0:[8, 4];1:[16, 4];2:[2, 1];3:[2, 4]"
    assert ge_file.options["frozenInput"] == "1,1,0,0", "parameters and pools lie where they are"
    check(ge_file, signature)


def chained(*bodies):
    main = gb.Main()
    x, pool = main.operand("params.x", X), main.operand("state.pool", POOL)
    rows, new = main.operand("inputs.rows", ROWS), main.operand("inputs.new", NEW)
    main.body("scatter", scatter, [X, POOL, ROWS, NEW])
    main.body("dense", dense, [X, POOL])
    for body in bodies:
        x, *_ = main.call(body, x, pool, *([rows, new] if body == "scatter" else []))
    return main.done(x)


def test_calls_that_write_one_state_follow_each_other(ta):
    graph, signature = chained("scatter", "scatter", "scatter")
    ge_file = link(graph, signature, ta)
    ops = ops_of(ge_file)
    assert ops["scatter/ScatterNdUpdate"].input[0] == "state.pool:0"
    assert ops["scatter_1/ScatterNdUpdate"].input[0] == ops["scatter_1/GatherV2"].input[0] == "scatter/ScatterNdUpdate:0"
    assert ops["scatter_2/ScatterNdUpdate"].input[0] == "scatter_1/ScatterNdUpdate:0"
    assert ge_file.bound == (1,)
    assert ge_file.donations == ()
    assert [t for t in ops["NetOutput"].input if t.endswith(":-1")] == [f"scatter{s}/ScatterNdUpdate:-1" for s in ("", "_1", "_2")]
    check(ge_file, signature)


def looked_at_before(feeds_the_write):
    """A call that reads a state before another call writes it; the written value depends on the first call's result, or not."""
    main = gb.Main()
    x, pool = main.operand("params.x", X), main.operand("state.pool", POOL)
    rows, new = main.operand("inputs.rows", ROWS), main.operand("inputs.new", NEW)
    main.body("look", lambda pool, rows, new: (pool.index_select(0, rows.view(2)) + new,), [POOL, ROWS, NEW])
    main.body("scatter", scatter, [X, POOL, ROWS, NEW])
    (look,) = main.call("look", pool, rows, new)
    return main.done(*main.call("scatter", x, pool, rows, look if feeds_the_write else new), look)


def test_a_call_that_reads_a_state_before_it_is_written_comes_first_by_data(ta):
    graph, signature = looked_at_before(feeds_the_write=True)
    ge_file = link(graph, signature, ta)
    ops = ops_of(ge_file)
    assert ops["look/GatherV2"].input[0] == ops["scatter/ScatterNdUpdate"].input[0] == "state.pool:0"
    check(ge_file, signature)
    graph, signature = looked_at_before(feeds_the_write=False)
    with pytest.raises(LoweringError, match=r"look/GatherV2 reads state.pool, and scatter/ScatterNdUpdate overwrites it without waiting"):
        check(link(graph, signature, ta), signature)


@pytest.mark.parametrize("bodies, last", [(("dense", "scatter"), "scatter/ScatterNdUpdate:0"), (("scatter", "dense"), "dense/Add:0")])
def test_a_state_with_new_memory_on_the_way_is_carried_home(ta, bodies, last):
    graph, signature = chained(*bodies)
    ge_file = link(graph, signature, ta)
    assert ge_file.donations == ((1, 1),)
    assert ge_file.bound == ()
    assert list(ops_of(ge_file)["NetOutput"].input)[1] == last
    assert ge_file.options["ge.exec.outputReuseInputMemIndexes"] == "1,1"
    assert ge_file.options["ge.exec.outputReuseMemIndexes"] == "0"
    check(ge_file, signature)


def test_reuse_is_by_number_of_data_where_operands_are_missing(ta):
    main = gb.Main()
    main.operand("params.unused", X)
    x = main.operand("params.x", X)
    pools = [main.operand(f"state.{i}", POOL) for i in range(2)]
    main.body("dense", dense, [X, POOL])
    for pool in pools:
        (x,) = main.call("dense", x, pool)
    graph, signature = main.done(x)
    ge_file = link(graph, signature, ta)
    assert ge_file.donations == ((1, 2), (2, 3))
    assert ge_file.options["ge.exec.outputReuseInputMemIndexes"] == "1,1|2,2"
    check(ge_file, signature)


def test_results_that_are_operands_or_repeat_have_memory_of_their_own(ta):
    main = gb.Main()
    x, y = main.operand("inputs.x", X), main.operand("inputs.y", X)
    main.body("pair", lambda a, b: (a + b, b), [X, X])
    total, same = main.call("pair", x, y)
    graph, signature = main.done(total, same, total, x)
    ge_file = link(graph, signature, ta)
    ops = ops_of(ge_file)
    assert list(ops["NetOutput"].input) == ["pair/Add:0", "result1:0", "result2:0", "result3:0"]
    assert [list(ops[f"result{i}"].input) for i in (1, 2, 3)] == [["inputs.y:0"], ["pair/Add:0"], ["inputs.x:0"]]
    assert ge_file.outputs == 4
    check(ge_file, signature)


def test_names_say_the_layer_and_never_repeat(ta):
    main = gb.Main()
    leaves = ("layers.3.w", "layers.3.v", "mtp.layers.0.w", "layers.12.w", "embed")
    params = [main.operand(f"params.{leaf}", X) for leaf in leaves]
    main.body("mix", lambda a, b: (a + b,), [X, X])
    pairs = [(0, 0), (0, 1), (2, 2), (0, 3), (4, 4)]
    results = [result for i, j in pairs for result in main.call("mix", params[i], params[j])]
    graph, signature = main.done(*results)
    names = [op.name for op in operators(parse(link(graph, signature, ta).graph)) if op.type == "Add"]
    assert names == ["layer03_mix/Add", "layer03_mix.2/Add", "mtp_layer00_mix/Add", "mix_3/Add", "mix_4/Add"]


def test_patches_name_every_copy_and_make_a_rank_of_it(ta):
    graph, signature = gb.two_kinds(3)
    ge_file = decode(encode(link(graph, signature, ta)))
    assert set(ge_file.patches) == {(f"layer{i:02d}_attention/HcomAllReduce", "group", GROUP) for i in (0, 2)}
    own = ops_of(patched(ge_file, rank=3, groups={"tp": "hccl_tp_1"}))
    assert {op.attr["group"].s for op in own.values() if op.type == "HcomAllReduce"} == {b"hccl_tp_1"}


def test_state_may_stand_behind_the_outputs(ta):
    graph, signature = chained("scatter")
    plain = link(graph, signature, ta)
    output = graph.graph.output_node()
    pool = next(node for node in graph.graph.nodes if node.meta.get("leaf") == "state.pool")
    output.args = ((*output.args[0], pool),)
    assert link(graph, signature, ta) == plain


def with_options(monkeypatch, options):
    """Adds options to converted bodies, as a function of the body's name."""

    def convert(gm, ta, name):
        body = convert_body(gm, ta, name)
        return replace(body, options={**body.options, **options(name)})

    monkeypatch.setattr(link_module, "convert_body", convert)


@pytest.mark.parametrize("bodies", [("scatter", "dense"), ("dense", "scatter")])
def test_an_empty_tensor_in_one_body_is_said_of_the_graph(ta, monkeypatch, bodies):
    key = "ge.exec.allTensorNotEmpty"
    assert link(*chained(*bodies), ta).options[key] == "1"
    with_options(monkeypatch, lambda name: {key: "0" if name == "dense" else "1"})
    assert link(*chained(*bodies), ta).options[key] == "0"


def test_writing_an_operand_that_is_no_state_is_refused(ta):
    main = gb.Main()
    x, pool = main.operand("inputs.x", X), main.operand("inputs.pool", POOL)
    main.body("dense", dense, [X, POOL])
    graph, signature = main.done(*main.call("dense", x, pool))
    with pytest.raises(LoweringError, match=r"dense \(dense\) writes inputs_pool; legal are the state operands"):
        link(graph, signature, ta)


def test_loose_nodes_are_refused(ta):
    graph, signature = chained("scatter")
    with graph.graph.inserting_before(graph.graph.output_node()):
        graph.graph.call_function(torch.ops.aten.neg.default, (next(iter(graph.graph.nodes)),))
    with pytest.raises(LoweringError, match=r"main graph has call_function neg_default .*; legal are calls of bodies and getitem"):
        link(graph, signature, ta)


def test_wrong_arguments_and_signatures_are_refused(ta):
    graph, signature = chained("scatter")
    call = next(node for node in graph.graph.nodes if node.op == "call_module")
    args = call.args
    call.args = args[:3]
    with pytest.raises(LoweringError, match=r"scatter is called with .*; legal are 4 nodes"):
        link(graph, signature, ta)
    call.args = (*args[:3], 1.0)
    with pytest.raises(LoweringError, match=r"scatter is called with .*1.0.*; legal are 4 nodes"):
        link(graph, signature, ta)
    call.args = args
    short = type(signature)(signature.params, signature.state, signature.inputs[:1], signature.outputs)
    with pytest.raises(LoweringError, match="the graph has 4 operands, its signature 3"):
        link(graph, short, ta)
    more = type(signature)(signature.params, signature.state, signature.inputs, signature.outputs * 2)
    with pytest.raises(LoweringError, match="the graph returns 1 values, its signature has 2 outputs beside the state"):
        link(graph, more, ta)


def test_two_operands_of_one_name_are_refused(ta):
    graph, signature = chained("scatter")
    for node in graph.graph.nodes:
        node.meta["leaf"] = "state.same"
    with pytest.raises(LoweringError, match=r"two operands are called state.same"):
        link(graph, signature, ta)


def test_bodies_that_disagree_on_an_option_are_refused(ta, monkeypatch):
    with_options(monkeypatch, lambda name: {"ge.x": name})
    with pytest.raises(LoweringError, match=r"option ge.x is 'dense' for body dense and 'scatter' for an earlier one"):
        link(*chained("scatter", "dense"), ta)

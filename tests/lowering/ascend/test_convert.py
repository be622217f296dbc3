"""lowering/ascend/convert.py: torchair converts bodies with pools in place and lengths as inputs; other bodies are refused."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import ge_bodies as gb
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.convert import POSITIONAL, GeBody, convert_body, shape_of
from npucompile.lowering.ascend.ge_file import GE_DTYPES, GROUP, RANK
from npucompile.lowering.ascend.inspect_ge import IN_PLACE

X, POOL = ((8, 4), gb.BF16), ((16, 4), gb.F32)
ROWS = (((2, 1), gb.I32), ((2, 4), gb.F32))


def converted(ta, fn, *shapes) -> GeBody:
    return convert_body(gb.trace(FakeTensorMode(), fn, shapes), ta, "the_body")


def types(body):
    return [op.type for op in body.ops]


def tensors(body):
    return [port.tensor for port in body.results]


def test_attention_keeps_its_caches_in_place_and_its_lengths_as_inputs(ta):
    body = converted(ta, gb.attention, *gb.ATTENTION.values())
    assert {i: port.tensor for i, port in body.written.items()} == {5: "ScatterPaKvCache:0", 6: "ScatterPaKvCache:1"}
    assert body.donated == frozenset()
    assert body.feeds == {f"{name}_1:0": i for i, name in enumerate(gb.ATTENTION)}
    assert not {"TensorMove", "Assign", "Data", "NetOutput"} & set(types(body))
    fia = next(op for op in body.ops if op.type == "FusedInferAttentionScore")
    assert list(fia.input)[5:7] == ["q_ends_1:0", "kv_lens_1:0"]
    assert body.patches == (("HcomAllReduce", "group", GROUP),)
    assert tensors(body) == ["Add:0"]


def test_raw_updates_are_kept_alive_by_a_control_edge(ta):
    body = converted(ta, gb.deltanet, *gb.DELTANET.values())
    assert {i: port.tensor for i, port in body.written.items()} == {4: "ScatterNdUpdate:0", 3: "RecurrentGatedDeltaRule:1"}
    assert body.control == ("ScatterNdUpdate:-1",)
    assert tensors(body) == ["Add:0", "GatherV2:0"]


def test_a_state_of_any_expression_is_carried_by_an_output(ta):
    def dense(a, pool):
        pool.copy_(pool * 2 + 1)
        return (a + 1,)

    body = converted(ta, dense, X, POOL)
    assert body.donated == {1}
    assert body.written[1].tensor.startswith("Add")
    assert body.written[1].val.shape == (16, 4)
    assert tensors(body) != [body.written[1].tensor]


def test_an_update_that_nobody_reads_is_kept_by_an_output(ta):
    def fn(a, pool, rows, new):
        pool.copy_(torch.ops.npu.npu_scatter_nd_update(pool, rows, new))
        return (a + 1,)

    body = converted(ta, fn, X, POOL, *ROWS)
    assert body.donated == {1}
    assert body.written[1].tensor == "ScatterNdUpdate:0"
    assert next(op for op in body.ops if op.type == "ScatterNdUpdate").input[0] == "pool_1:0"


def test_results_may_repeat_be_operands_and_be_views_of_operands(ta):
    def fn(a, b, c):
        y = a + b
        return y, a, y, a.view(32), b

    body = converted(ta, fn, X, X, X)
    add = next(op for op in body.ops if op.type == "Add")
    reshape = next(op for op in body.ops if op.type == "Reshape")
    assert tensors(body) == [f"{add.name}:0", "a_1:0", f"{add.name}:0", f"{reshape.name}:0", "b_1:0"]
    assert reshape.input[0] == "a_1:0"
    assert body.feeds == {"a_1:0": 0, "b_1:0": 1}
    assert set(types(body)) == {"Add", "Const", "Reshape"}


def test_outputs_say_their_own_shape_not_that_of_a_view(ta):
    body = converted(ta, gb.attention, *gb.ATTENTION.values())
    scatter = next(op for op in body.ops if op.type == "ScatterPaKvCache")
    assert [desc.attr["_meta"].s.decode() for desc in scatter.output_desc] == ["bf16[8,128,2,64]"] * 2
    for op in body.ops:
        assert not [desc for desc in op.input_desc if "_meta" in desc.attr or "_fx_tensor_name" in desc.attr]
        assert not [desc for desc in op.output_desc if "_fx_tensor_name" in desc.attr]


def test_rank_and_group_of_experts_are_patches(ta):
    def experts(x, ids, scales):
        sent = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, "world", 8, 0, 64, expert_scales=scales, global_bs=64)
        return (torch.ops.npu.npu_moe_distribute_combine_v2(sent[0], ids, sent[2], sent[4], scales, "world", 8, 0, 64, global_bs=64),)

    body = converted(ta, experts, ((8, 256), gb.BF16), ((8, 4), gb.I32), ((8, 4), gb.F32))
    names = ("MoeDistributeDispatchV2", "MoeDistributeCombineV2")
    assert sorted(body.patches) == sorted((n, *p) for n in names for p in (("ep_rank_id", RANK), ("group_ep", GROUP)))


def test_a_group_that_is_no_symbol_is_refused(ta):
    def experts(x, ids):
        return (torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, "hccl_7", 8, 0, 64)[0],)

    with pytest.raises(LoweringError, match="the_body: MoeDistributeDispatchV2 has group_ep 'hccl_7'; legal are tp, dp, world"):
        converted(ta, experts, ((8, 256), gb.BF16), ((8, 4), gb.I32))


def test_options_are_torchairs_less_those_of_single_operands(ta):
    body = converted(ta, lambda a: (a + 1,), X)
    assert body.options["ge.exec.allTensorNotEmpty"] == "1"
    assert body.options["ge.exec.atomicCleanPolicy"] == "1"
    assert body.options["pattern_fusion_pass"] == "0"
    assert body.engine["ge.opSelectImplmode"] == "high_precision"
    assert not set(POSITIONAL) & set(body.options)


def test_refusals_name_the_body_and_the_node_and_spare_the_reader_tracebacks(ta):
    with pytest.raises(LoweringError, match=r"torchair cannot convert the_body: NotImplementedError: .*linalg_inv_ex") as caught:
        converted(ta, lambda a: (torch.linalg.inv(a),), ((4, 4), gb.F32))
    assert "%linalg_inv_ex" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_state_written_through_a_view_is_refused(ta):
    def fn(a, pool, rows, new):
        torch.ops.npu.npu_scatter_nd_update_(pool.view(64, 1), rows, new)
        return (a + 1,)

    with pytest.raises(LoweringError, match="through the view Reshape:0"):
        converted(ta, fn, X, POOL, ((2, 1), gb.I32), ((2, 1), gb.F32))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda gm: gm.graph.output_node().update_arg(0, next(iter(gm.graph.nodes))), "returns a_1; legal is a tuple"),
        (lambda gm: next(iter(gm.graph.nodes)).meta.pop("val"), "operand a_1 is None; legal are contiguous fake tensors"),
        (lambda gm: _set(gm, lambda: torch.empty(4, 8, dtype=gb.BF16, device="meta").t()), "legal are contiguous fake tensors"),
        (lambda gm: _set(gm, lambda: torch.empty(8, 4, dtype=gb.BF16)), "legal are contiguous fake tensors"),
        (lambda gm: _set(gm, lambda: torch.empty(8, 4, dtype=torch.complex64, device="meta")), "has dtype torch.complex64; legal are"),
    ],
)
def test_forms_outside_the_contract_are_refused(ta, change, message):
    gm = gb.trace(FakeTensorMode(), lambda a: (a + 1,), [X])
    change(gm)
    with pytest.raises(LoweringError, match=message):
        convert_body(gm, ta, "the_body")


def _set(gm, make):
    node = next(iter(gm.graph.nodes))
    with node.meta["val"].fake_mode:
        node.meta["val"] = make()


def test_dtypes_are_torchairs(ta):
    graph: ModuleType = importlib.import_module("torchair.ge._ge_graph")
    for dtype, (name, number) in GE_DTYPES.items():
        assert graph.torch_type_to_ge_type(dtype) == number
        assert graph.torch_type_to_ge_proto_type(dtype) == ta.ge_pb2.DataType.Value(name)


def test_the_table_of_operators_in_place_is_torchairs(ta):
    passes = importlib.import_module("torchair._ge_concrete_graph.graph_pass")
    op = ta.ge_pb2.OpDef()
    for op.type, written in IN_PLACE.items():
        assert passes._get_output_to_input_ref_idx(op) == written
    source = Path(passes.__file__).read_text()
    rest = {"FfnWorkerScheduler", "AttentionWorkerScheduler", "ScatterList"}
    body = source[source.index("op_set = {") : source.index("return ref_idx_mapping")]
    named = {word for word in body.replace("\n", " ").split('"')[1::2]}
    assert named - rest == set(IN_PLACE)


def test_conversion_leaves_the_body_as_it_was(ta):
    gm = gb.trace(FakeTensorMode(), lambda a, b: (a, a + b), [X, X])
    before = str(gm.graph)
    first, second = convert_body(gm, ta), convert_body(gm, ta)
    assert str(gm.graph) == before
    assert [op.SerializeToString(deterministic=True) for op in first.ops] == [op.SerializeToString(deterministic=True) for op in second.ops]


def test_shape_of():
    assert shape_of(torch.empty(2, 3, dtype=gb.BF16, device="meta")) == "bf16[2,3]"
    assert shape_of(torch.empty((), dtype=torch.bool, device="meta")) == "bool[]"


def test_a_result_in_the_memory_of_an_operand_has_its_own_shape(tmp_path_factory):
    """torchair does not count it as a result, so the body is converted again with a new tensor in its place."""
    body = convert_body(
        gb.trace(gb.FakeTensorMode(), lambda x: (x[1:3], x * 2), [((4, 8), gb.F32)]), gb.loaded(tmp_path_factory.mktemp("stubs"))
    )
    (part,) = (op for op in body.ops if op.type == "StridedSliceV2")
    assert part.output_desc[0].attr["_meta"].s == b"f32[2,8]"
    assert body.results[0].tensor == f"{part.name}:0"

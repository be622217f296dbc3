"""lowering/ascend/nz_weights.py: operands that only products read as weights, and whose tiles are full, are stored in NZ."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.lowering.ascend.ge_file import GeFile, messages, parse
from npucompile.lowering.ascend.nz_weights import weight_operands


def weights_model(*, dim=(64, 32), dtype=27, second_reader="") -> GeFile:
    """x @ w with w also read where `second_reader` says, and a GroupedMatmul without bias."""
    model = messages().ModelDef()
    graph = model.graph.add(name="main")
    for index, name in enumerate(("x", "w", "experts")):
        op = graph.op.add(name=name, type="Data")
        op.attr["index"].i = index
        desc = op.output_desc.add(name="y", dtype=dtype)
        desc.shape.dim.extend((4, 64) if name == "x" else dim)
    for op_type, inputs in (
        ("MatMul", {"x1": "x:0", "x2": "w:0", "bias": ""}),
        ("GroupedMatmul", {"x0": "x:0", "bias0": "", "weight0": "experts:0"}),
        *([(second_reader, {"x": "w:0"})] if second_reader else []),
    ):
        op = graph.op.add(name=op_type, type=op_type)
        op.input.extend(inputs.values())
        for name in inputs:
            op.input_desc.add(name=name)
        op.input.append("w:-1")
    return GeFile(model.SerializeToString(), {}, (), (), 4, 1, (), feeds=(0, 3, 1))


def test_weights_of_matrix_products_are_found_by_operand():
    assert weight_operands(weights_model()) == (1, 3)


def test_those_that_a_product_takes_in_nz_alone_are_needed():
    model = parse(weights_model(dtype=3).graph)
    assert model.graph[0].op[4].type == "GroupedMatmul"
    model.graph[0].op[4].type = "GroupedMatmulSwigluQuantV2"
    changed = GeFile(model.SerializeToString(), {}, (), (), 4, 1, (), feeds=(0, 3, 1))
    assert weight_operands(changed) == (1, 3)
    assert weight_operands(changed, needed=True) == (1,)
    assert weight_operands(weights_model(dtype=3), needed=True) == ()


def test_a_weight_with_another_reader_stays():
    assert weight_operands(weights_model(second_reader="Transpose")) == (1,)


@pytest.mark.parametrize(("dim", "dtype"), [((64, 40), 27), ((60, 32), 27), ((64,), 27), ((64, 16), 3), ((64, 32), 1)])
def test_a_weight_that_would_be_padded_or_is_no_matrix_stays(dim, dtype):
    assert weight_operands(weights_model(dim=dim, dtype=dtype)) == ()


def int4_model(*, words=8, second_reader="", of="int4", result=0) -> GeFile:
    """A GroupedMatmul with int4 weights, of 16 rows of int32 words; `result` is the attribute that names its dtype."""
    model = messages().ModelDef()
    graph = model.graph.add(name="main")
    data = graph.op.add(name="packed", type="Data")
    data.output_desc.add(name="y", dtype=messages().DataType.Value("DT_INT32")).shape.dim.extend((4, 16, words))
    reader = [(second_reader, "x", f"{of}:0")] if second_reader else []
    for kind, slot, tensor in (("Bitcast", "x", "packed:0"), ("GroupedMatmul", "weight0", "int4:0"), *reader):
        op = graph.op.add(name="int4" if kind == "Bitcast" else kind, type=kind)
        op.input.append(tensor)
        op.input_desc.add(name=slot)
        if kind == "Bitcast":
            op.attr["type"].dt = 29
        elif kind == "GroupedMatmul":
            op.attr["dtype"].i = result
    return GeFile(model.SerializeToString(), {}, (), (), 1, 1, ())


def test_packed_int4_is_a_weight_through_its_bitcast():
    assert weight_operands(int4_model()) == (0,)
    assert weight_operands(int4_model(words=12)) == ()
    assert weight_operands(int4_model(second_reader="Transpose")) == ()
    assert weight_operands(int4_model(second_reader="Transpose", of="packed")) == ()
    assert weight_operands(int4_model(result=-1)) == (), "beside floats the kernel takes it in ND alone"


def test_int8_tiles_are_twice_as_wide():
    assert weight_operands(weights_model(dim=(64, 32), dtype=3)) == (1, 3)


def test_real_converters_name_their_weights_so(ta):
    def products(x, w, experts, groups):
        split = torch.ops.npu.npu_grouped_matmul(
            [x], [experts], group_list=groups, split_item=2, group_type=0, group_list_type=1, output_dtype=torch.bfloat16
        )
        return torch.ops.npu.npu_linear(x, w), split[0]

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operands = [torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((16, 64), (32, 64), (4, 64, 32))]
        operands.append(torch.empty(4, dtype=torch.int64, device="meta"))
        converted = ta.get_compiler(ta.CompilerConfig())(make_fx(products)(*operands), operands).runner
    operators = GeFile(converted.graph.SerializeToString(), {}, (), (), 4, 2, ())
    assert weight_operands(operators) == (1, 2)

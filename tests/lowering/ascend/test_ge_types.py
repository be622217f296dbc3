"""lowering/ascend/ge_types.py and ge_type_rules.py: what rules infer is what tracing declared, and what cannot be told is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import parse
from npucompile.lowering.ascend.ge_operators import operators
from npucompile.lowering.ascend.ge_types import graph_types, tensor_types
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.operators.table import BY_TYPE
from npucompile.lowering.ascend.operators.tensor_type import TensorType


def many_operators(x, pool, rows, new):
    """Slices, reductions, products, comparisons and copies of many shapes, each of which reaches a result."""
    wide = x.to(gb.F32)
    values, order = torch.sort(wide, -1, descending=True)
    best, where = wide.max(-1, keepdim=True)
    grid = torch.arange(8, device=x.device)[:, None] - torch.arange(4, device=x.device)[None]
    masked = torch.where(grid > 0, wide, torch.zeros_like(wide)) * torch.full((8, 1), 2.0, device=x.device)
    parts = torch.stack([masked, values]).transpose(0, 2).reshape(4, -1).squeeze(0)
    product = torch.matmul(parts, parts.t()) @ new.t()
    batched = torch.bmm(wide.view(2, 4, 4), wide.view(2, 4, 4).transpose(1, 2))
    folded = torch.cat([product, product.abs().neg().exp().sum(0, keepdim=True)], 0).clamp(0, 1)
    picked = wide.index_select(0, rows[:, 0]) + wide.gather(1, order)[:2].cumsum(-1)
    flags = (picked.unsqueeze(0) == new) & (new >= 0).expand(3, 2, 4)
    bits = torch.softmax(masked, -1).contiguous().view(gb.I32)
    return folded, picked, flags, bits, best, where.to(gb.I32), batched.mean((0, 1)), order.to(gb.I32) % 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    main = gb.Main()
    shapes = [((8, 4), gb.BF16), ((16, 4), gb.F32), ((2, 1), gb.I32), ((2, 4), gb.F32)]
    names = ("params.x", "state.pool", "inputs.rows", "inputs.new")
    operands = [main.operand(name, shape) for name, shape in zip(names, shapes, strict=True)]
    main.body("body", many_operators, shapes)
    return {name: link(graph, signature, ta) for name, (graph, signature) in {
        "layers": gb.two_kinds(2), "many": main.done(*main.call("body", *operands)),
    }.items()}  # fmt: skip


@pytest.mark.parametrize("name", ["layers", "many"])
def test_rules_infer_what_tracing_declares(files, name):
    """Types stay the same when the declarations of every operator that has a rule are deleted."""
    graph = parse(files[name].graph).graph[0]
    declared = graph_types(operators(graph.op))
    erased = set()
    for op in graph.op:
        for desc in op.output_desc if op.type in BY_TYPE and BY_TYPE[op.type].types is not None else ():
            if "_meta" in desc.attr:
                del desc.attr["_meta"]
                erased.add(op.type)
    assert graph_types(operators(graph.op)) == declared
    assert len(erased) >= (5 if name == "layers" else 20), erased


def test_every_tensor_that_is_read_has_a_type(files):
    for ge_file in files.values():
        types = tensor_types(ge_file)
        assert {tensor for op in parse(ge_file.graph).graph[0].op for tensor in op.input if tensor and tensor[-3:] != ":-1"} <= set(types)


def test_types_are_those_of_the_operands(files):
    types = tensor_types(files["layers"])
    assert types["inputs.mask:0"] == TensorType("bool", (2048, 2048))
    assert str(types["params.layers.0.q:0"]) == "bf16[256,256] NZ", "the weight of a product, which the host stores in tiles"
    assert types["layer00_attention/Const:0"] == TensorType("i64", (3,))
    assert types["state.layers.0.k_pool:0"].nbytes == gb.PAGES * gb.P * gb.G * gb.D * 2


def test_packed_int4_has_eight_elements_a_word(files):
    model = parse(files["layers"].graph)
    op = model.graph[0].op.add(name="unpacked", type="Bitcast", input=["inputs.slots:0"])
    op.attr["type"].dt, op.attr["keep_dim"].b = 29, True
    op.output_desc.add(name="y")
    int4 = graph_types(operators(model.graph[0].op))["unpacked:0"]
    assert (str(int4), int4.nbytes) == (f"i4[{gb.T * 8}]", gb.T * 4)


def test_what_cannot_be_told_is_named(files):
    model = parse(files["layers"].graph)
    attention = next(op for op in model.graph[0].op if op.type == "FusedInferAttentionScore")
    del attention.output_desc[0].attr["_meta"]
    with pytest.raises(LoweringError, match=r"output 0 of layer00_attention/FusedInferAttentionScore .* cannot be told"):
        tensor_types(replace(files["layers"], graph=model.SerializeToString()))


def test_a_contradiction_is_named(files):
    model = parse(files["many"].graph)
    total = next(op for op in model.graph[0].op if op.type == "Add")
    total.output_desc[0].attr.clear()
    total.input[0] = "inputs.rows:0"
    with pytest.raises(LoweringError, match=r"Add.*i32\[2, 1\].*legal is one dtype"):
        graph_types(operators(model.graph[0].op))

"""lowering/ascend/ge_operators.py: operators are of one kind where only names differ, and what is asked of a kind is asked once."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import canonical, messages, parse
from npucompile.lowering.ascend.ge_operators import by_kind, closed, graphs, last, opened, read


@pytest.fixture
def model():
    model = messages().ModelDef()
    main, called = model.graph.add(name="main"), model.graph.add(name="called")
    for layer in (0, 1):
        op = main.op.add(name=f"layer{layer}/MatMul", type="MatMul")
        op.input.extend([f"x{layer}:0", "", f"gate{layer}:-1"])
        op.attr["transpose_x1"].b = True
        op.output_desc.add(name="y").shape.dim.extend([4, 8])
    called.op.add(name="Add", type="Add")
    return model


def kinds(model):
    first, second = read(model.SerializeToString())
    return first.kind, second.kind


def test_names_alone_make_no_kind(model):
    first, second = kinds(model)
    assert first == second


def other_type(op):
    op.type = "BatchMatMul"


def other_attribute(op):
    op.attr["transpose_x1"].b = False


def one_more_attribute(op):
    op.attr["_user_stream_label"].s = b"1"


def other_result(op):
    op.output_desc[0].shape.dim[0] = 5


def described_input(op):
    op.input_desc.add(name="x1")


@pytest.mark.parametrize("change", [other_type, other_attribute, one_more_attribute, other_result, described_input])
def test_anything_else_does(model, change):
    change(model.graph[0].op[1])
    first, second = kinds(model)
    assert first != second


def test_operators_have_what_their_messages_have(model):
    op, message = read(model.SerializeToString())[1], model.graph[0].op[1]
    assert (op.name, op.type, op.input, op.producers) == (message.name, message.type, tuple(message.input), ("x1", "gate1"))
    assert op.attr["transpose_x1"].b
    assert list(op.output_desc) == list(message.output_desc)
    assert list(op.input_desc) == list(message.input_desc)


def test_a_kind_is_described_once(model):
    asked = []

    def describe(op):
        asked.append(op.name)
        return op.type

    described = by_kind(describe)
    assert [described(op) for op in read(model.SerializeToString())] == ["MatMul", "MatMul"]
    assert asked == ["layer0/MatMul"]


def test_called_graphs_follow_the_main_one(model):
    assert [(name, len(ops)) for name, ops in graphs(model.SerializeToString())] == [("main", 2), ("called", 1)]


def test_bytes_that_are_no_model_are_refused():
    with pytest.raises(LoweringError, match="not a serialised GE model"):
        read(b"no model")


def test_a_model_is_written_as_it_was_read_and_its_operators_need_no_reading(model):
    model.graph[0].op[1].output_desc[0].shape.dim[0] = 5
    written = closed(*opened(model.SerializeToString()))
    assert parse(written) == model
    assert canonical(written) is written == canonical(bytes(written))
    kept = [[(op.vertex, op.kind, op.message) for op in ops] for _, ops in graphs(written)]
    last.clear()
    assert kept == [[(op.vertex, op.kind, op.message) for op in ops] for _, ops in graphs(written)]

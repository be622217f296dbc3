"""lowering/ascend/inspect_weights.py: work on parameters alone is found in a GE graph, and refused where loading could have done it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import parse
from npucompile.lowering.ascend.hoist import hoist
from npucompile.lowering.ascend.inspect_weights import LARGE_BYTES, check_folded, work_on_weights
from npucompile.lowering.ascend.link import link

X, G = ((4, 8), gb.F32), ((8,), gb.F32)
SIDE = 2 * int((LARGE_BYTES / 4) ** 0.5)
LARGE, COLUMN = ((SIDE, SIDE), gb.F32), ((SIDE, 1), gb.F32)


@pytest.fixture(scope="module")
def ta(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return gb.loaded(tmp_path_factory.mktemp("stubs"))


def graph(body: Any, param: Any = G, x: Any = X) -> Any:
    main = gb.Main()
    w, value = main.operand("params.w", param), main.operand("inputs.x", x)
    main.body("body", body, [x, param])
    return main.done(*main.call("body", value, w))


def norm(x: Any, g: Any) -> tuple[Any, ...]:
    return (x * (1 + g.exp()) + torch.arange(8, device="meta"),)


def test_work_that_loading_could_do_is_refused(ta: Any) -> None:
    ge_file = link(*graph(norm), ta)
    assert work_on_weights(ge_file, 1) == {"body/Exp": {0}, "body/Add": {0}}
    assert work_on_weights(ge_file, 0) == {}, "constants alone are GE's"
    with pytest.raises(LoweringError, match=r"2 operators depend on parameters alone and run in every step: body/Exp, body/Add; legal"):
        check_folded(ge_file, 1)


def test_hoisting_leaves_none(ta: Any) -> None:
    main, signature = graph(norm)
    ge_file = link(hoist(main, signature), signature, ta)
    assert work_on_weights(ge_file, 1) == {}
    assert (ge_file.data, ge_file.inputs, ge_file.operands) == ((1, 2), 2, 3)
    check_folded(ge_file, 1)


def test_work_on_a_derived_value_is_work_on_weights(ta: Any) -> None:
    main, signature = graph(lambda x, g: (x * (1 + g),))
    hoisted = hoist(main, signature)
    body = hoisted.get_submodule("body")
    multiply = next(node for node in body.graph.nodes if node.op == "call_function")
    with body.graph.inserting_before(multiply):
        again = body.graph.call_function(torch.ops.aten.exp.default, (multiply.args[1],))
    again.meta["val"] = multiply.args[1].meta["val"]
    multiply.args = (multiply.args[0], again)
    body.recompile()
    assert work_on_weights(link(hoisted, signature, ta), 1) == {"body/Exp": {2}}


@pytest.mark.parametrize("view", [False, True])
def test_a_large_value_beside_its_weight_is_legal(ta: Any, view: bool) -> None:
    def body(x: Any, w: Any) -> tuple[Any, ...]:
        return ((w.view(-1, 2 * SIDE) @ torch.cat([x, x])).sum() + w @ x if view else (w + 1) @ x + w @ x,)

    main, signature = graph(body, LARGE, COLUMN)
    assert hoist(main, signature) is main
    ge_file = link(main, signature, ta)
    assert work_on_weights(ge_file, 1)
    check_folded(ge_file, 1)


def test_a_large_value_in_place_of_its_weight_is_refused(ta: Any) -> None:
    with pytest.raises(LoweringError, match="1 operators depend on parameters alone"):
        check_folded(link(*graph(lambda x, w: ((w + 1) @ x,), LARGE, COLUMN), ta), 1)


def test_a_cast_to_a_dtype_that_no_operand_has_is_legal(ta: Any) -> None:
    """Packed int4 weights are int32 to torch; the converter of a product tells GE what they are."""
    ge_file = link(*graph(norm), ta)
    for number, refused in ((29, 1), (1, 2)):
        model = parse(ge_file.graph)
        cast = next(op for op in model.graph[0].op if op.type == "Exp")
        cast.type, cast.attr["dst_type"].i = "Cast", number
        with pytest.raises(LoweringError, match=f"{refused} operators depend on parameters alone"):
            check_folded(replace(ge_file, graph=model.SerializeToString()), 1)

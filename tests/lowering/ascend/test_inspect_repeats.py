"""lowering/ascend/inspect_repeats.py: a value that a graph computes twice is found, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.inspect_repeats import check_unrepeated, repeated
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.share import share

X, STARTS = ((4, 8), gb.F32), ((4,), torch.int32)


@pytest.fixture(scope="module")
def ta(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return gb.loaded(tmp_path_factory.mktemp("stubs"))


def two_layers(layer: Any) -> Any:
    main = gb.Main()
    x, starts = main.operand("inputs.x", X), main.operand("inputs.starts", STARTS)
    main.body("layer", layer, [X, STARTS])
    for _ in range(2):
        (x,) = main.call("layer", x, starts)
    return main.done(x)


def angles(x: Any, starts: Any) -> tuple[Any, ...]:
    return (x * starts.float().cos()[:, None] + torch.arange(8, device="meta").float().exp(),)


def test_what_two_layers_compute_alike_is_refused_and_shared(ta: Any) -> None:
    graph, signature = two_layers(angles)
    ge_file = link(graph, signature, ta)
    assert repeated(ge_file) == {"layer_1/Cast": "layer/Cast", "layer_1/Cos": "layer/Cos"}, "constants alone are GE's"
    with pytest.raises(LoweringError, match=r"2 operators compute what others have computed: layer_1/Cast as layer/Cast, .*; legal"):
        check_unrepeated(ge_file)
    check_unrepeated(link(share(graph, signature, ()), signature, ta))


def test_operators_of_other_attributes_or_dtypes_differ(ta: Any) -> None:
    main = gb.Main()
    x = main.operand("inputs.x", X)
    main.body("body", lambda x: (x.sum(0), x.sum(1), x.to(torch.int32), x.to(torch.bfloat16)), [X])
    assert repeated(link(*main.done(*main.call("body", x)), ta)) == {}

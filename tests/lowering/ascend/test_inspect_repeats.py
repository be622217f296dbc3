"""lowering/ascend/inspect_repeats.py: a value that a graph computes twice is found, and refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import fleets
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Bucket, Mesh
from npucompile.lowering.ascend.ge_file import parse
from npucompile.lowering.ascend.inspect_repeats import check_unrepeated, repeated
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.lowered import lower
from npucompile.lowering.ascend.share import share
from npucompile.models.variant import Variant

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


def test_a_decode_step_computes_nothing_twice_until_an_operator_is_copied(ta: Any) -> None:
    """Layers, drafts and what lies between them, on a mesh of two axes."""
    fleet = fleets.Fleet(fleets.model(Variant(grouped=True)), Mesh.parse("dp=2,tp=2"), drafts=3)
    lowered = lower(fleet.partitioned(Bucket("decode", 2, 4)))
    ge_file = link(lowered.graph, lowered.signature, ta)
    check_unrepeated(ge_file)
    model = parse(ge_file.graph)
    attention = next(op for op in model.graph[0].op if op.type == "FusedInferAttentionScore")
    model.graph[0].op.add().CopyFrom(attention)
    model.graph[0].op[-1].name = "again"
    with pytest.raises(LoweringError, match=rf"1 operators compute what others have computed: again as {attention.name}; legal"):
        check_unrepeated(replace(ge_file, graph=model.SerializeToString(deterministic=True)))

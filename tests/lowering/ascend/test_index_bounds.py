"""lowering/ascend/index_bounds.py: an index that follows from floats is refused unless it is bounded whatever they are."""

from __future__ import annotations

import pytest
import torch
from support import ge_bodies as gb
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.record import record
from npucompile.lowering.ascend.index_bounds import check

TABLE, FLOATS, PAGES = torch.zeros(8, 4), torch.zeros(3, 8), torch.zeros(3, dtype=torch.int32)


def graph_of(function):
    like = [x.to("meta") for x in (TABLE, FLOATS, PAGES)]
    return record(lambda *operands: [function(*operands)], like, FakeTensorMode(), "cpu")


BOUNDED = {
    "argmax": lambda table, x, pages: table.index_select(0, x.argmax(-1)),
    "topk": lambda table, x, pages: table[x.topk(2, -1).indices.view(-1)],
    "sorted": lambda table, x, pages: x.gather(1, x.sort(-1).indices),
    "clamped sum of comparisons": lambda table, x, pages: table.index_select(0, (x > 0).sum(-1).clamp(max=7)),
    "sum of fewer comparisons": lambda table, x, pages: table.index_select(0, (x[:, 1:] > 0).sum(-1)),
    "remainder": lambda table, x, pages: table.index_select(0, x.to(torch.int32).remainder(8)),
    "clamped cast": lambda table, x, pages: table.index_select(0, x[:, 0].to(torch.int32).clamp(0, 7)),
    "chosen of bounded": lambda table, x, pages: table.index_select(0, torch.where(x[:, 0] > 0, 7, 0)),
    "what the host gives": lambda table, x, pages: table.index_select(0, pages),
    "the host's numbers and a bounded step": lambda table, x, pages: table.index_select(0, pages + x.argmax(-1)),
    "the host's numbers where floats choose": lambda table, x, pages: table.index_select(0, pages * (x[:, 0] > 0)),
    "a looked up page": lambda table, x, pages: table.index_select(0, pages.gather(0, x.argmax(-1).clamp(max=2))),
    "its own part of packed floats": lambda table, x, pages: table.index_select(
        0, torch.cat([x, x.argmax(-1, keepdim=True).float()], -1).split([8, 1], -1)[1].view(-1).to(torch.int32)
    ),
}
UNBOUNDED = {
    "sum of comparisons": lambda table, x, pages: table.index_select(0, (x > 0).sum(-1)),
    "cast": lambda table, x, pages: table.index_select(0, x[:, 0].to(torch.int32)),
    "cast of clamped floats": lambda table, x, pages: table.index_select(0, x[:, 0].clamp(0, 7).to(torch.int32)),
    "clamped on one side": lambda table, x, pages: table.index_select(0, x[:, 0].to(torch.int32).clamp(min=0)),
    "argmax of a longer dimension": lambda table, x, pages: table[:4].index_select(0, x.argmax(-1)),
    "below zero": lambda table, x, pages: table.index_select(0, x.argmax(-1) - 1),
    "the host's numbers and a cast": lambda table, x, pages: table.index_select(0, pages + x[:, 0].to(torch.int32)),
    "gather": lambda table, x, pages: x.gather(1, (x > 0).cumsum(-1)),
    "scatter": lambda table, x, pages: x.scatter(1, (x > 0).cumsum(-1), 1.0),
    "index": lambda table, x, pages: table[(x > 0).sum(-1)],
    "index_put": lambda table, x, pages: table.index_put(((x > 0).sum(-1),), x[:, :4]),
    "index_add": lambda table, x, pages: table.index_add(0, (x > 0).sum(-1), x[:, :4]),
    "embedding": lambda table, x, pages: torch.nn.functional.embedding((x > 0).sum(-1), table),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_an_index_that_is_bounded_by_construction_is_legal(name):
    check(graph_of(BOUNDED[name]), "here")


@pytest.mark.parametrize("name", UNBOUNDED)
def test_an_index_that_floats_can_drive_out_of_its_table_is_refused(name):
    with pytest.raises(LoweringError, match=r"in here, \w+ \(aten\.\w+\..*depends on floats and is in .*; legal is 0 to [37] "):
        check(graph_of(UNBOUNDED[name]), "here")


def test_bodies_are_followed_with_what_each_call_gives_them():
    """A body looks up what it is given; the second call gives it a sum of comparisons."""
    shapes = [((8, 4), torch.float32), ((3, 8), torch.float32), ((3,), torch.int64)]
    main = gb.Main()
    table, x = main.operand("params.table", shapes[0]), main.operand("inputs.x", shapes[1])
    main.body("best", lambda x: (x.argmax(-1),), shapes[1:2])
    main.body("count", lambda x: ((x > 0).sum(-1),), shapes[1:2])
    main.body("look", lambda table, index: (table.index_select(0, index),), [shapes[0], shapes[2]])
    results = [main.call("look", table, *main.call(index, x))[0] for index in ("best", "count")]
    with pytest.raises(LoweringError, match=r"^in step, look/index_select \S+ index, index_1, .* is in 0 to 8; legal is 0 to 7"):
        check(main.done(*results)[0], "step")

"""lowering/ascend/acl_graph/formats.py: weights are stored in NZ where every reader takes them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import acl_graphs as ag

from npucompile.lowering.ascend.acl_graph.file import graph_of
from npucompile.lowering.ascend.acl_graph.formats import in_nz, weight_operands

WEIGHT = ((32, 16), ag.BF16)


def body(plain: Any, viewed: Any, summed: Any, narrow: Any, x: Any) -> tuple[Any, ...]:
    y = torch.ops.npu.npu_linear(x, plain) + torch.ops.npu.npu_linear(x, summed) + torch.ops.npu.npu_linear(x, viewed.view(32, 16) * 2)
    return (y + summed.sum(), torch.ops.npu.npu_linear(x, narrow))


def test_only_weights_with_full_tiles_that_nothing_else_reads(tmp_path: Path) -> None:
    made, _ = ag.of_body(
        lambda x, *weights: body(*weights, x),
        inputs_x=((4, 16), ag.BF16),
        inputs_plain=WEIGHT,
        inputs_viewed=((2, 16, 16), ag.BF16),
        inputs_summed=WEIGHT,
        inputs_narrow=((24, 16), ag.BF16),
    )
    assert weight_operands(made) == (1,)
    assert weight_operands(made, needed=True) == ()
    assert [node.name for node in graph_of(made).graph.nodes if node in in_nz(made)] == ["operand_1", "t"]


@pytest.mark.parametrize("dtype", [torch.int8, ag.BF16], ids=["int8 rows", "rows as they are"])
def test_int4_is_in_nz_beside_rounded_rows_alone(dtype: torch.dtype) -> None:
    """Beside floats, whose scales are `antiquant_scale`, the kernel takes it in ND alone."""

    def product(x: Any, packed: Any, scale: Any, counts: Any) -> tuple[Any, ...]:
        scales = {"scale": [scale]} if dtype == torch.int8 else {"antiquant_scale": [scale], "antiquant_offset": [scale]}
        groups = {"group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 1}
        return tuple(torch.ops.npu.npu_grouped_matmul([x], [packed], **scales, **groups, output_dtype=ag.BF16))

    made, _ = ag.of_body(
        product,
        inputs_x=((4, 16), dtype),
        inputs_packed=((2, 16, 8), torch.int32),
        inputs_scale=((2, 64), torch.uint64 if dtype == torch.int8 else ag.BF16),
        inputs_counts=((2,), torch.int64),
    )
    assert weight_operands(made) == ((1,) if dtype == torch.int8 else ())

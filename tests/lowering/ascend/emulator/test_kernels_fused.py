"""Products fused with collectives are the product and the collective, bit for bit."""

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator import kernels_dense as dense
from npucompile.lowering.ascend.emulator import kernels_fused as fused
from npucompile.lowering.ascend.emulator import kernels_group as group

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(members: int, *shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=made).to(dtype) for _ in range(members)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("members", [2, 3])
def test_sums(members: int, dtype: torch.dtype) -> None:
    xs, ws = draw(members, 6, 40, dtype=dtype), draw(members, 40, 5, dtype=dtype)
    products = [dense.npu_linear(x, w.t()) for x, w in zip(xs, ws, strict=True)]
    scattered = fused.npu_mm_reduce_scatter_base([((x, w, "tp", members), {"reduce_op": "sum"}) for x, w in zip(xs, ws, strict=True)])
    same(scattered, group.reduce_scatter_tensor([((y, "sum", members, "tp"), {}) for y in products]))
    everywhere = fused.npu_mm_all_reduce_base([((x, w, "tp"), {}) for x, w in zip(xs, ws, strict=True)])
    same(everywhere, group.all_reduce([((y, "sum", "tp"), {}) for y in products]))
    assert len({y.data_ptr() for y in everywhere}) == members


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(dtype: torch.dtype) -> None:
    xs, ws = draw(2, 3, 40, dtype=dtype), draw(2, 40, 5, dtype=dtype)
    found = fused.npu_all_gather_base_mm([((x, w, "tp", 2), {"gather_output": True}) for x, w in zip(xs, ws, strict=True)])
    whole = torch.cat(xs)
    same([y for y, _ in found], [dense.npu_linear(whole, w.t()) for w in ws])
    same([g for _, g in found], [whole, whole])
    assert found[0][1].data_ptr() != found[1][1].data_ptr()
    without = fused.npu_all_gather_base_mm([((x, w, "tp", 2), {"gather_output": False}) for x, w in zip(xs, ws, strict=True)])
    assert [g.shape for _, g in without] == [(0,), (0,)]
    same([y for y, _ in without], [y for y, _ in found])


X, W = torch.ones(4, 6), torch.ones(6, 3)


@pytest.mark.parametrize(
    ("kernel", "args", "options", "said"),
    [
        (fused.npu_mm_reduce_scatter_base, (X, W, "tp", 2), {"reduce_op": "max"}, "reduce_op is 'max'; legal is 'sum'"),
        (fused.npu_mm_all_reduce_base, (X, W, "tp"), {"reduce_op": "avg"}, "npu_mm_all_reduce_base: reduce_op is 'avg'"),
        (fused.npu_mm_reduce_scatter_base, (X, W, "tp", 2), {"bias": torch.ones(3)}, r"bias=tensor \(3,\) has no CPU kernel"),
        (fused.npu_mm_reduce_scatter_base, (X, W, "tp", 2), {"comm_mode": "aiv"}, "comm_mode='aiv' has no CPU kernel"),
        (fused.npu_all_gather_base_mm, (X, W, "tp", 2), {"gather_index": 1}, "gather_index=1 has no CPU kernel"),
        (fused.npu_mm_reduce_scatter_base, (X, W, "tp", 4), {}, "the node says 4 members, the group of this mesh has 2"),
        (fused.npu_all_gather_base_mm, (X, W, "tp", 4), {}, "the node says 4 members"),
        (fused.npu_mm_reduce_scatter_base, (X[:3], W, "tp", 2), {}, "does not divide by the 2 members"),
        (fused.npu_mm_all_reduce_base, (X, W.t(), "tp"), {}, r"input is \(4, 6\) and x2 \(3, 6\); legal is \[M, K\] and \[K, N\]"),
        (fused.npu_mm_all_reduce_base, (X, W.half(), "tp"), {}, "x2 is .* torch.float16; legal is"),
        (fused.npu_mm_all_reduce_base, (X.char(), W.char(), "tp"), {}, "input is .* torch.int8; legal is"),
    ],
)
def test_refused(kernel, args, options, said) -> None:
    with pytest.raises(LoweringError, match=said):
        kernel([(args, options)] * 2)

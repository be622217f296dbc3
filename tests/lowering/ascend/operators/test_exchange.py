"""lowering/ascend/operators/exchange.py: collectives equal their definitions, dispatch and combine equal loops over tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import collectives
from npucompile.lowering.ascend.operators import exchange as group
from npucompile.lowering.ascend.operators.node import Node

FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), wanted.double(), rtol=step, atol=step * 0.2)


def calls(xs: list[torch.Tensor], *rest: object) -> list[group.Arguments]:
    return [((x, *rest), {}) for x in xs]


def test_all_reduce() -> None:
    xs = [torch.tensor([1.0, 5.0]), torch.tensor([2.0, -1.0]), torch.tensor([3.0, 3.0])]
    got = collectives.all_reduce(calls(xs, "sum", "tp"))
    assert [x.tolist() for x in got] == [[6.0, 7.0]] * 3
    assert len({x.data_ptr() for x in got}) == 3
    assert collectives.all_reduce(calls(xs, "max", "tp"))[0].tolist() == [3.0, 5.0]
    assert collectives.all_reduce(calls(xs, "min", "tp"))[0].tolist() == [1.0, -1.0]
    with pytest.raises(LoweringError, match="reduction 'avg'; legal is 'sum'"):
        collectives.all_reduce(calls(xs, "avg", "tp"))


def test_sums_of_bfloat16_are_rounded_once() -> None:
    xs = [torch.full((1,), v, dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    (got, *_) = collectives.all_reduce(calls(xs, "sum", "tp"))
    assert (got.item(), got.dtype) == (258.0, torch.bfloat16)
    ints = [torch.tensor([2**30], dtype=torch.int32)] * 2
    assert collectives.all_reduce(calls(ints, "max", "tp"))[0].dtype == torch.int32


def test_a_product_is_rounded_before_its_parts_are_added() -> None:
    x, weights = torch.ones(2, 2, dtype=torch.bfloat16), [torch.tensor([[a], [1.0]], dtype=torch.bfloat16) for a in (256.0, 0.0)]
    pairs = [((x, w, "tp", 2), {"comm_mode": "aiv", "reduce_op": "sum"}) for w in weights]
    # 257 is no bfloat16.
    assert [y.tolist() for y in collectives.npu_mm_reduce_scatter_base(pairs)] == [[[256.0]]] * 2
    with pytest.raises(LoweringError, match="comm_mode is None; legal for inference is 'aiv'"):
        collectives.npu_mm_reduce_scatter_base([(args, {}) for args, _ in pairs])
    with pytest.raises(LoweringError, match=r"input \(2, 2\) has strides \(1, 2\), and the group 2 members; legal are rows"):
        collectives.npu_mm_reduce_scatter_base([((torch.randn(2, 2).t(), w.float(), "tp", 2), kwargs) for (_, w, *_), kwargs in pairs])


def test_gather_and_scatter_are_by_rank() -> None:
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    assert [x.flatten().tolist() for x in collectives.all_gather_into_tensor(calls(xs, 2, "tp"))] == [[1, 2, 3, 4]] * 2
    assert [x.tolist() for x in collectives.reduce_scatter_tensor(calls(xs, "sum", 2, "tp"))] == [[[4.0]], [[6.0]]]
    assert [x.tolist() for x in collectives.reduce_scatter_tensor(calls(xs, "max", 2, "tp"))] == [[[3.0]], [[4.0]]]
    assert [x.flatten().tolist() for x in collectives.broadcast(calls(xs, 1, "tp"))] == [[3, 4]] * 2
    with pytest.raises(LoweringError, match="the node says 4 members, the group of this mesh has 2"):
        collectives.all_gather_into_tensor(calls(xs, 4, "tp"))
    with pytest.raises(LoweringError, match="the node says 1 members"):
        collectives.reduce_scatter_tensor(calls(xs, "sum", 1, "tp"))
    with pytest.raises(LoweringError, match="does not divide by the 2 members"):
        collectives.reduce_scatter_tensor(calls([x[:1] for x in xs], "sum", 2, "tp"))
    with pytest.raises(LoweringError, match="source 2; legal is 0 to 1"):
        collectives.broadcast(calls(xs, 2, "tp"))


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=3, max_size=3))
def test_all_to_all_transposes_the_parts(sizes: list[list[int]]) -> None:
    xs = [torch.tensor([100 * i + 10 * j for j, n in enumerate(row) for _ in range(n)]) for i, row in enumerate(sizes)]
    given_ = [((x, [row[i] for row in sizes], sizes[i], "tp"), {}) for i, x in enumerate(xs)]
    for i, got in enumerate(collectives.all_to_all_single(given_)):
        assert got.tolist() == [100 * j + 10 * i for j in range(3) for _ in range(sizes[j][i])]


def test_all_to_all_refuses_splits_that_disagree() -> None:
    x = torch.zeros(4)
    with pytest.raises(LoweringError, match=r"member 1 takes \[1, 3\] rows, the members send it \[2, 2\]"):
        collectives.all_to_all_single([((x, [2, 2], [2, 2], "tp"), {}), ((x, [1, 3], [2, 2], "tp"), {})])
    with pytest.raises(LoweringError, match=r"member 0 of 2 sends \[2, 1\]"):
        collectives.all_to_all_single(calls([x, x], [2, 2], [2, 1], "tp"))


class Exchange:
    """T tokens with X of E experts on each of R members."""

    def __init__(self, R: int = 4, E: int = 8, T: int = 3, X: int = 3, dtype: torch.dtype = torch.float32) -> None:
        self.R, self.E, self.T, self.X = R, E, T, X
        self.x = [torch.randn(T, 6).to(dtype) for _ in range(R)]
        self.ids = [torch.stack([torch.randperm(E)[:X] for _ in range(T)]).int() for _ in range(R)]
        self.weights = [torch.rand(T, X) for _ in range(R)]
        self.local = E // R

    def dispatch(self, **options: object) -> list[tuple[torch.Tensor, ...]]:
        per_rank = {k: v for k, v in options.items() if isinstance(v, list)}
        shared = {k: v for k, v in options.items() if k not in per_rank}
        return group.npu_moe_distribute_dispatch_v2(
            [((self.x[r], self.ids[r], "world", self.R, 0, self.E), shared | {k: v[r] for k, v in per_rank.items()}) for r in range(self.R)]
        )

    def combine(self, rows: list[torch.Tensor], sent: list[tuple[torch.Tensor, ...]], **options: list[torch.Tensor]) -> list[torch.Tensor]:
        return group.npu_moe_distribute_combine_v2(
            [
                (
                    (rows[r], self.ids[r], sent[r][2], sent[r][4], self.weights[r], "world", self.R, 0, self.E),
                    {k: v[r] for k, v in options.items()},
                )
                for r in range(self.R)
            ]
        )

    def expected(self, expert: int, mask: list[torch.Tensor] | None = None) -> list[tuple[int, int]]:
        """(rank, token) of the rows of one expert, in order."""
        return [
            (r, t) for r in range(self.R) for t in range(self.T) if expert in self.ids[r][t].tolist() and (mask is None or bool(mask[r][t]))
        ]

    def groups(self, sent: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
        ends = sent[3].cumsum(0).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("R", "E", "X"), [(4, 8, 3), (1, 4, 2), (2, 16, 4)])
def test_dispatch_brings_every_token_to_its_experts(dtype: torch.dtype, R: int, E: int, X: int) -> None:
    exchange = Exchange(R, E, 3, X, dtype)
    for rank, sent in enumerate(exchange.dispatch()):
        capacity = 3 * R * min(E // R, X)
        assert [tuple(t.shape) for t in sent] == [(capacity, 6), (capacity,), (capacity * 128,), (E // R,), (E,), (0,), (0,)]
        assert [t.dtype for t in sent] == [dtype, torch.float32, torch.int32, torch.int64, torch.int32, torch.int32, torch.float32]
        for e, (low, high) in enumerate(exchange.groups(sent)):
            wanted = exchange.expected(rank * (E // R) + e)
            assert torch.equal(sent[0][low:high], torch.stack([exchange.x[r][t] for r, t in wanted]) if wanted else sent[0][:0])
        assert sent[4][-1] == sent[3].sum()
        assert sent[0][int(sent[3].sum()) :].isnan().all()
        assert sent[1].isnan().all()


def test_one_members_results_are_those_it_has_among_all() -> None:
    exchange = Exchange()
    rows = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    parts = [([1, 1], [1, 1], ""), ([1, 1], [1, 1], "")]
    dispatches: list[list[group.Arguments]] = []
    combines: list[list[group.Arguments]] = []
    with pytest.MonkeyPatch.context() as patch:
        dispatch, combine = group.npu_moe_distribute_dispatch_v2, group.npu_moe_distribute_combine_v2
        patch.setattr(group, "npu_moe_distribute_dispatch_v2", lambda calls: dispatches.append(calls) or dispatch(calls))
        patch.setattr(group, "npu_moe_distribute_combine_v2", lambda calls: combines.append(calls) or combine(calls))
        sent = exchange.dispatch()
        exchange.combine([received[0] for received in sent], sent)
    for function, made in (
        (collectives.all_reduce, calls(rows, "max", "tp")),
        (collectives.all_gather_into_tensor, calls(rows, 2, "tp")),
        (collectives.reduce_scatter_tensor, calls(rows, "sum", 2, "tp")),
        (collectives.all_to_all_single, [((x, *part), {}) for x, part in zip(rows, parts, strict=True)]),
        (collectives.broadcast, calls(rows, 1, "tp")),
        (dispatch, dispatches[0]),
        (combine, combines[0]),
    ):
        whole = function(made)
        for member, mine in enumerate(whole):
            (alone,) = function(made, [member])
            for a, b in zip(alone, mine, strict=True):
                assert torch.equal(a.nan_to_num(-7), b.nan_to_num(-7))


@pytest.mark.parametrize("dtype", FLOATS)
def test_combine_returns_the_weighted_sum(dtype: torch.dtype) -> None:
    exchange = Exchange(dtype=dtype)
    sent = exchange.dispatch()
    rows = []
    for rank, received in enumerate(sent):
        out = received[0].clone()
        for e, (low, high) in enumerate(exchange.groups(received)):
            out[low:high] *= rank * exchange.local + e + 1
        rows.append(out)
    shared = [torch.randn(3, 6).to(dtype) for _ in range(4)]
    for r, (out, plus) in enumerate(zip(exchange.combine(rows, sent), exchange.combine(rows, sent, shared_expert_x=shared), strict=True)):
        scaled = [exchange.x[r] * (ids[:, None] + 1) for ids in exchange.ids[r].unbind(1)]
        wanted = sum(w[:, None].double() * row.double() for w, row in zip(exchange.weights[r].unbind(1), scaled, strict=True))
        assert out.dtype == dtype
        near(out, wanted)
        near(plus, wanted + shared[r].double())


def test_dispatch_quantises_by_the_reciprocal() -> None:
    exchange, smooth = Exchange(dtype=torch.bfloat16), torch.rand(8, 6) + 0.5
    exchange.x[0][1] = 0
    for scales in (None, [smooth] * 4):
        for rank, sent in enumerate(exchange.dispatch(quant_mode=2, **({} if scales is None else {"scales": scales}))):
            assert sent[0].dtype == torch.int8
            for e, (low, high) in enumerate(exchange.groups(sent)):
                for row, (r, t) in zip(range(low, high), exchange.expected(rank * 2 + e), strict=True):
                    wide = exchange.x[r][t].double() * (1.0 if scales is None else smooth[rank * 2 + e].double())
                    assert sent[1][row].item() == pytest.approx(wide.abs().max().item() / 127, rel=1e-6)
                    assert (sent[0][row] * sent[1][row].double() - wide).abs().max() <= sent[1][row] * 0.501
            assert (sent[0][int(sent[3].sum()) :] == -128).all()


def test_only_active_tokens_take_part() -> None:
    exchange = Exchange()
    mask = [torch.arange(3) < n for n in (2, 0, 3, 1)]
    sent = exchange.dispatch(x_active_mask=mask)
    for rank, received in enumerate(sent):
        for e, (low, high) in enumerate(exchange.groups(received)):
            assert high - low == len(exchange.expected(rank * 2 + e, mask))
    out = exchange.combine([s[0] for s in sent], sent, x_active_mask=mask)
    for r in range(4):
        active = mask[r]
        near(out[r][active], exchange.x[r][active] * exchange.weights[r][active].sum(1, keepdim=True))
        assert out[r][~active].isnan().all()
    with pytest.raises(LoweringError, match="rows back at member 0"):
        exchange.combine([s[0] for s in sent], sent)


def test_dispatch_options() -> None:
    exchange = Exchange(8, 8)
    sums = exchange.dispatch(expert_token_nums_type=0, global_bs=40, tp_world_size=1)
    counts = exchange.dispatch(expert_token_nums_type=1)
    assert [s[3].tolist() for s in sums] == [c[3].cumsum(0).tolist() for c in counts]
    assert (sums[0][0].shape, sums[0][5].shape) == ((40, 6), (1,))
    weighed = exchange.dispatch(expert_scales=exchange.weights)
    assert weighed[0][4].shape == (8 + 24 * 2 * 3,)
    assert weighed[0][6].shape == (24,)
    wanted = [exchange.weights[r][t, exchange.ids[r][t].tolist().index(0)] for r, t in exchange.expected(0)]
    assert weighed[0][6][: len(wanted)].tolist() == wanted
    near(exchange.combine([w[0] for w in weighed], weighed)[2], exchange.x[2] * exchange.weights[2].sum(1, keepdim=True))


def test_dispatch_refuses() -> None:
    exchange = Exchange()
    with pytest.raises(LoweringError, match=r"x_active_mask is \[True, False, True\]; legal is true for the first tokens"):
        exchange.dispatch(x_active_mask=[torch.tensor([True, False, True])] * 4)
    with pytest.raises(LoweringError, match="quant_mode 3"):
        exchange.dispatch(quant_mode=3)
    with pytest.raises(LoweringError, match="shared_expert_rank_num=1"):
        exchange.dispatch(shared_expert_rank_num=1)
    with pytest.raises(LoweringError, match="4 tokens make room for 8"):
        exchange.dispatch(global_bs=4)
    exchange.E = 6
    with pytest.raises(LoweringError, match="6 experts do not divide by 4 members"):
        exchange.dispatch()
    exchange = Exchange()
    exchange.ids[2][1] = torch.tensor([1, 2, 1])
    with pytest.raises(LoweringError, match="member 2 has expert_ids"):
        exchange.dispatch()
    exchange.R = 3
    with pytest.raises(LoweringError, match="8 experts do not divide by 3 members"):
        exchange.dispatch()


def test_combine_refuses_rows_of_another_dispatch() -> None:
    exchange, other = Exchange(), Exchange()
    sent, strange = exchange.dispatch(), other.dispatch()
    with pytest.raises(LoweringError, match="legal is one for each active choice"):
        exchange.combine([s[0] for s in sent], [sent[0], strange[0], sent[2], sent[3]])
    exchange.weights[0] = exchange.weights[0].bfloat16()
    with pytest.raises(LoweringError, match="expert_scales is"):
        exchange.combine([s[0] for s in sent], sent)


@pytest.mark.parametrize(
    ("ranks", "shared", "most", "message"),
    [
        (16, 0, 2048, "None"),
        (17, 1, 2048, "None"),
        (15, 0, 2048, "divides 512 experts among 15 ranks"),
        (16, 0, 256, "512 in all; legal are up to 256"),
    ],
)
def test_experts_of_a_rank(ranks: int, shared: int, most: int, message: str) -> None:
    attributes = {"ep_world_size": ranks, "moe_expert_num": 512, "shared_expert_rank_num": shared}
    assert message in str(group.experts_of_a_rank(Node("n", "MoeDistributeDispatchV2", attributes=attributes), {}, most=most))

"""lowering/collectives_check.py: ranks with equal collectives finish; any difference is refused and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.ge_file import GROUPS, GeFile, messages, patched
from npucompile.lowering.collectives_check import COLLECTIVES, agree, check_ranks, expand, of_acl_file, of_acl_rank, of_ge_file, of_rank

MESH = Mesh.parse("dp=2,tp=2")
LAYER = [
    ("all_gather_into_tensor", "tp", "bf16[8,64]"),
    ("reduce_scatter_tensor", "tp", "bf16[4,64]"),
    ("moe_dispatch", "world", "i8[32,64]"),
    ("moe_combine", "world", "bf16[4,64]"),
]
GE = {"all_gather_into_tensor": "HcomAllGather", "reduce_scatter_tensor": "HcomReduceScatter", "all_to_all_single": "HcomAllToAll"} | {
    "moe_dispatch": "MoeDistributeDispatchV2", "moe_combine": "MoeDistributeCombineV2", "all_reduce": "HcomAllReduce",
}  # fmt: skip


def shipped(collectives, *, mesh=MESH, chained=True, kinds=None):
    """A GE file with a chain of collectives, each after a cast, as torchair converts them."""
    model = messages().ModelDef()
    graph = model.graph.add(name="main")
    last, patches = "x", []
    graph.op.add(name="x", type="Data").attr["index"].i = 0
    for i, (name, group, kind) in enumerate(collectives):
        kind_of_op = (kinds or {}).get(i) or GE[name]
        graph.op.add(name=f"cast{i}", type="Cast").input.append(f"{last}:0")
        op = graph.op.add(name=f"talk{i}", type=kind_of_op)
        op.input.append(f"cast{i}:0")
        attribute, symbol = ("group_ep", "dispatch") if kind_of_op.startswith("Moe") else ("group", group)
        op.attr[attribute].s = symbol.encode()
        patches.append((op.name, attribute, "group"))
        size = len(mesh.group(group, 0))
        if kind_of_op.startswith("Moe"):
            op.attr["ep_world_size"].i, op.attr["ep_rank_id"].i = size, 0
            patches.append((op.name, "ep_rank_id", "ep_rank"))
        elif kind_of_op not in ("HcomAllReduce", "HcomAllToAll"):
            op.attr["rank_size"].i = size
        op.output_desc.add().attr["_meta"].s = kind.encode()
        last = op.name if chained else "x"
    graph.op.add(name="NetOutput", type="NetOutput")
    return GeFile(model.SerializeToString(), {}, (), (), 1, 0, tuple(patches))


def of_all(ge_file, mesh=MESH):
    """The collectives of each rank, read from the GE file patched with that rank's communicators."""
    per_rank = []
    for rank in range(mesh.size):
        mine = {name: mesh.group(name, rank) for name in GROUPS}
        names = {name: f"hccl_{name}_{ranks[0]}" for name, ranks in mine.items()}
        per_rank.append(of_rank(patched(ge_file, rank, names), rank, {names[name]: ranks for name, ranks in mine.items()}))
    return per_rank


# --- what is read ---


def test_one_graph_is_what_each_rank_of_its_group_runs():
    per_rank = expand([("all_reduce", "tp", "f32[4]"), ("all_reduce", "dp", "f32[2]"), ("moe_dispatch", "world", "i8[4,8]")], MESH)
    assert [[members for _, members, _ in talks] for talks in per_rank] == [
        [(0, 1), (0, 2), (0, 1, 2, 3)], [(0, 1), (1, 3), (0, 1, 2, 3)], [(2, 3), (0, 2), (0, 1, 2, 3)], [(2, 3), (1, 3), (0, 1, 2, 3)],
    ]  # fmt: skip
    assert [(name, kind) for name, _, kind in per_rank[3]] == [
        ("all_reduce", "f32[4]"),
        ("all_reduce", "f32[2]"),
        ("moe_dispatch", "i8[4,8]"),
    ]
    check_ranks(per_rank)


def test_a_group_the_mesh_lacks_is_named():
    with pytest.raises(LoweringError, match="the groups ep; mesh dp=2,tp=2 has dp, tp, world"):
        expand([("all_reduce", "ep", "f32[4]")], MESH)


def test_a_shipped_graph_says_what_the_partitioned_one_does():
    wanted = (*LAYER * 3, ("all_to_all_single", "tp", "bf16[8,32]"), ("all_reduce", "dp", "i32[8]"))
    collectives = of_ge_file(shipped(wanted), in_order=True)
    assert collectives == wanted
    agree(wanted, collectives)


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_every_operator_that_communicates_is_read(kind):
    given_ = [(COLLECTIVES[kind], "world" if kind.startswith("Moe") else "tp", "bf16[4,64]")]
    assert of_ge_file(shipped(given_, kinds={0: kind})) == tuple(given_)


@pytest.mark.parametrize(("name", "wrong"), [("moe_dispatch", "world"), ("moe_combine", "tp"), ("all_reduce", "dispatch")])
def test_expert_dispatch_shares_no_group_with_another_operator(name, wrong):
    ge_file = shipped([*LAYER, (name, "world", "bf16[4,64]")])
    model = messages().ModelDef()
    model.ParseFromString(ge_file.graph)
    (talk,) = [op for op in model.graph[0].op if op.name == "talk4"]
    talk.attr["group_ep" if name.startswith("moe") else "group"].s = wrong.encode()
    message = f"{name} is over group {wrong}; legal is dispatch for moe_dispatch and moe_combine, and for nothing else"
    with pytest.raises(LoweringError, match=message):
        of_ge_file(replace(ge_file, graph=model.SerializeToString()))


@pytest.mark.parametrize("kind", ["HcomSend", "AlltoAllMatmul"])
def test_what_communicates_and_is_no_collective_of_ours_is_refused(kind):
    with pytest.raises(LoweringError, match=f"talk0 is a {kind}, which communicates; legal are HcomAllGather"):
        of_ge_file(shipped([("all_reduce", "tp", "f32[4]")], kinds={0: kind}))


def test_a_collective_in_a_called_graph_has_no_place_in_the_order():
    ge_file = shipped(LAYER)
    model = messages().ModelDef()
    model.ParseFromString(ge_file.graph)
    model.graph.add(name="branch").op.add(name="hidden", type="HcomAllReduce").attr["group"].s = b"tp"
    with pytest.raises(LoweringError, match="hidden communicate in the called graph branch"):
        of_ge_file(GeFile(model.SerializeToString(), {}, (), (), 1, 0, ()))


def test_an_order_that_data_leave_open_is_refused_where_it_matters():
    loose = shipped(LAYER, chained=False)
    assert of_ge_file(loose) == tuple(LAYER)
    with pytest.raises(LoweringError, match="talk1 does not wait for talk0"):
        of_ge_file(loose, in_order=True)


# --- the first difference ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c[:-1],
            r"collective 3 .* is moe_combine over world of bf16\[4,64\], of the shipped graph missing",
        ),
        (lambda c: [*c, c[0]], r"collective 4 of the partitioned graph is missing, .*they have 4 and 5"),
        (lambda c: [c[1], c[0], *c[2:]], "collective 0 .* all_gather_into_tensor .* reduce_scatter_tensor"),
        (lambda c: [c[0], ("reduce_scatter_tensor", "dp", c[1][2]), *c[2:]], "collective 1 .* over tp .* over dp"),
        (lambda c: [c[0], c[1], ("moe_dispatch", "world", "bf16[32,64]"), c[3]], r"collective 2 .* i8\[32,64\], .* bf16\[32,64\]"),
    ],
)
def test_the_first_difference_from_the_partitioned_graph_is_named(change, message):
    with pytest.raises(LoweringError, match=message):
        agree(LAYER, change(list(LAYER)))


# --- ranks ---


def test_containers_patched_for_their_ranks_agree():
    per_rank = of_all(shipped(LAYER * 2))
    assert per_rank == expand(LAYER * 2, MESH)
    check_ranks(per_rank)


def test_a_container_patched_for_another_rank_is_refused():
    names = {"tp": "a", "dispatch": "w"}
    members = {"a": (2, 3), "w": (0, 1, 2, 3)}
    assert of_rank(patched(shipped(LAYER), 3, names), 3, members)
    with pytest.raises(LoweringError, match="rank 3: talk2 has ep_rank_id 1; its place in 'w' is 3"):
        of_rank(patched(shipped(LAYER), 1, names), 3, members)
    with pytest.raises(LoweringError, match="rank 3: talk0 is over communicator 'tp'; this rank has a, w"):
        of_rank(shipped(LAYER), 3, members)
    with pytest.raises(LoweringError, match=r"talk0 is over communicator 'a' of ranks \(0, 1\); legal is one with 3 in it"):
        of_rank(patched(shipped(LAYER), 3, names), 3, {**members, "a": (0, 1)})
    with pytest.raises(LoweringError, match="talk0 has rank_size 2, its communicator 'a' has 3 ranks"):
        of_rank(patched(shipped(LAYER), 3, names), 3, {**members, "a": (1, 2, 3)})
    with pytest.raises(LoweringError, match="talk2 has ep_world_size 4, its communicator 'w' has 2"):
        of_rank(patched(shipped(LAYER), 3, names), 3, {**members, "w": (2, 3)})


def test_both_sides_of_a_disagreement_are_named():
    per_rank = expand(LAYER, MESH)
    per_rank[2][2] = ("moe_dispatch", (0, 1, 2, 3), "i8[64,64]")
    with pytest.raises(LoweringError) as caught:
        check_ranks(per_rank)
    assert str(caught.value) == (
        "collective 0 of group (0, 1, 2, 3): rank 0 has moe_dispatch i8[32,64] (number 2 of all it has), "
        "rank 2 has moe_dispatch i8[64,64] (number 2 of all it has); legal is the same on all"
    )
    per_rank[2][2:] = []
    with pytest.raises(LoweringError, match=r"collective 0 of group \(0, 1, 2, 3\): rank 0 has moe_dispatch .*, rank 2 has nothing"):
        check_ranks(per_rank)


@pytest.mark.parametrize("members", [(1, 2), (0, 0), (0, 4), ()])
def test_a_rank_takes_part_in_groups_of_its_own_only(members):
    with pytest.raises(LoweringError, match=r"rank 0 is to take part in all_reduce f32\[1\] over ranks"):
        check_ranks([[("all_reduce", members, "f32[1]")], [], [], []])


def test_lists_that_agree_can_still_wait_for_each_other():
    a, b, c = (("all_reduce", members, "f32[1]") for members in ((0, 1), (1, 2), (0, 2)))
    check_ranks([[a, c], [a, b], [b, c]])
    with pytest.raises(LoweringError) as caught:
        check_ranks([[c, a], [a, b], [b, c]])
    assert str(caught.value).startswith("ranks wait for each other: rank ")
    for rank, late in ((0, 2), (1, 0), (2, 1)):
        assert f"rank {rank} at its collective 0, all_reduce f32[1] over" in str(caught.value)
        assert f"for rank {late}" in str(caught.value)


NAMES, SYMBOLS, TYPES = ["all_reduce", "all_gather_into_tensor"], ["tp", "dp", "world"], ["f32[4]", "f32[8]"]
SYMBOLIC = st.lists(st.tuples(*map(st.sampled_from, (NAMES, SYMBOLS, TYPES))), min_size=1, max_size=12)
MESHES = st.sampled_from(["tp=4", "dp=2,tp=2", "dp=2,tp=4", "dp=4,tp=2"])


@given(SYMBOLIC, MESHES)
@settings(deadline=None)
def test_one_graph_on_all_ranks_never_hangs(collectives, mesh):
    check_ranks(expand(collectives, Mesh.parse(mesh)))


def finishes(per_rank):
    """Runs the lists as HCCL would: in any order, each collective that all its members have reached with equal name and type."""
    left = [list(talks) for talks in per_rank]
    while any(left):
        for talks in left:
            if talks and all(left[member] and left[member][0] == talks[0] for member in talks[0][1]):
                for member in talks[0][1]:
                    left[member].pop(0)
                break
        else:
            return False
    return True


@given(SYMBOLIC, MESHES, st.data())
@settings(deadline=None, max_examples=200)
def test_any_one_rank_that_differs_is_caught_exactly_when_it_could_hang_or_mix(collectives, mesh, data):
    per_rank = expand(collectives, Mesh.parse(mesh))
    rank = data.draw(st.integers(0, len(per_rank) - 1))
    at = data.draw(st.integers(0, len(collectives) - 1))
    talks = per_rank[rank]
    name, members, kind = talks[at]
    how = data.draw(st.sampled_from(["drop", "repeat", "type", "name", "swap"]))
    if how == "drop":
        del talks[at]
    elif how == "repeat":
        talks.insert(at, talks[at])
    elif how == "type":
        talks[at] = (name, members, kind + "x")
    elif how == "name":
        talks[at] = ("broadcast", members, kind)
    else:
        other = data.draw(st.integers(0, len(talks) - 1))
        talks[at], talks[other] = talks[other], talks[at]
    if finishes(per_rank):
        assert how == "swap" or len(members) == 1
        check_ranks(per_rank)
    else:
        with pytest.raises(LoweringError, match=r"legal is the same on all|wait for each other"):
            check_ranks(per_rank)


@given(st.permutations(range(8)), st.integers(0, 7))
@settings(deadline=None, max_examples=50)
def test_a_permuted_patched_container_is_caught(order, rank):
    ge_file = shipped(LAYER * 2)
    per_rank = of_all(ge_file)
    other = of_all(shipped([(LAYER * 2)[i] for i in order]))
    per_rank[rank % 4] = other[rank % 4]
    if finishes(per_rank):
        check_ranks(per_rank)
    else:
        with pytest.raises(LoweringError):
            check_ranks(per_rank)


def test_captured_graphs_list_their_collectives_as_ge_graphs_do(tmp_path):
    gb.loaded(tmp_path)

    def exchanged(x, ids, group):
        rows, *_ = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, group, 4, 0, 8, quant_mode=0)
        return (rows.sum() + torch.ops._c10d_functional.all_gather_into_tensor(x, 2, "tp").sum(),)

    def made(group):
        return ag.of_body(lambda x, ids: exchanged(x, ids, group), inputs_x=((4, 32), torch.bfloat16), inputs_ids=((4, 2), torch.int32))[0]

    file = made("dispatch")
    assert sorted(of_acl_file(file)) == [("all_gather_into_tensor", "tp", "bf16[8,32]"), ("moe_dispatch", "world", "bf16[32,32]")]
    talks = of_acl_rank(file, {"tp": (2, 3), "dispatch": (0, 1, 2, 3)})
    assert {members for _, members, _ in talks} == {(2, 3), (0, 1, 2, 3)}
    with pytest.raises(LoweringError, match="moe_dispatch is over group world; legal is dispatch"):
        of_acl_file(made("world"))


def test_fused_experts_have_a_group_that_no_other_exchange_has(tmp_path):
    gb.loaded(tmp_path)
    packages.declare()

    def file(group):
        shapes = {
            "x": ((24, 64), torch.bfloat16), "up": ((2, 64, 8), torch.int32), "down": ((2, 32, 8), torch.int32),
            "ids": ((24, 2), torch.int32), "scale": ((2, 64), torch.int64), "assist": ((2, 64), torch.float32),
            "probs": ((24, 2), torch.float32),
        }  # fmt: skip
        fused = torch.ops.npucompile_packages.dispatch_ffn_combine_w4a8
        return ag.of_body(
            lambda x, up, down, ids, scale, assist, probs: (
                fused(x, up, down, ids, scale, scale, assist, assist, probs, group, 2, 96) + 1,
            ),
            **{f"inputs_{name}": shape for name, shape in shapes.items()},
        )[0]

    assert of_acl_file(file("fused_experts")) == (("fused_experts_w4a8", "world", "bf16[24,64]"),)
    for group in ("dispatch", "world"):
        with pytest.raises(
            LoweringError, match=f"is over group {group}; legal is fused_experts for fused_experts_w4a8, and for nothing else"
        ):
            of_acl_file(file(group))

"""lowering/ascend/ge_file.py: a GE file reads back equal, equal files have equal bytes, and each rank gets its own patches."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import FORMAT, Folded, GeFile, canonical, decode, encode, messages, operators, parse, patched


def model(attributes=("group", "rank", "a", "b", "c", "d", "e")) -> bytes:
    """x, state -> all-reduce, dispatch; a called graph has a second operator of the same name."""
    built = messages().ModelDef()
    for name in ("main", "called"):
        graph = built.graph.add(name=name)
        for index in range(3):
            op = graph.op.add(name=f"data{index}", type="Data")
            op.attr["index"].i = index
        op = graph.op.add(name="reduce", type="HcomAllReduce")
        for attribute in attributes:
            op.attr[attribute].s = b"tp"
        op = graph.op.add(name="dispatch", type="MoeDistributeDispatchV2")
        op.attr["group_ep"].s = b"world"
        op.attr["ep_rank_id"].i = 0
    return built.SerializeToString()


@pytest.fixture
def ge_file():
    return GeFile(
        graph=model(),
        options={"mode": "max-autotune", "ge.exec.outputReuseInputMemIndexes": "1,1"},
        donations=((1, 1),),
        bound=(2,),
        inputs=4,
        outputs=1,
        patches=(("dispatch", "ep_rank_id", "ep_rank"), ("dispatch", "group_ep", "group"), ("reduce", "group", "group")),
        feeds=(0, 1, 2),
        engine={"ge.oo.level": "O3"},
    )


def test_bytes_give_the_container_back(ge_file):
    again = decode(encode(ge_file))
    assert replace(again, graph=b"") == replace(ge_file, graph=b"")
    assert parse(again.graph) == parse(ge_file.graph)
    assert decode(encode(replace(ge_file, feeds=None))).data == (0, 1, 2, 3)
    assert again.data == (0, 1, 2)


def test_derived_values_are_operands_behind_those_of_the_program(ge_file):
    folded = replace(ge_file, folded=Folded(b"graph", (3,), 2), feeds=(0, 1, 2, 4, 5))
    assert replace(decode(encode(folded)), graph=b"") == replace(folded, graph=b"")
    assert (folded.operands, ge_file.operands) == (6, 4)
    for feeds, params, message in (
        ((0, 1, 2, 4, 5, 6), (3,), "a GE file of 6 operands feeds"),
        ((0, 1, 2, 4), (3,), r"computes derived values \[5\], which its graph does not take"),
        ((0, 1, 2, 4, 5), (4,), r"folds operands \[4\]; legal are 0 to 3"),
    ):
        with pytest.raises(LoweringError, match=message):
            encode(replace(folded, feeds=feeds, folded=replace(folded.folded, params=params)))


def test_order_of_maps_does_not_show(ge_file):
    turned = replace(
        ge_file,
        graph=model(attributes=("e", "d", "c", "b", "a", "rank", "group")),
        options=dict(reversed(ge_file.options.items())),
        patches=ge_file.patches[::-1],
    )
    assert encode(turned) == encode(ge_file)
    assert encode(decode(encode(ge_file))) == encode(ge_file)


def test_another_process_writes_the_same_and_needs_no_torch_npu_to():
    # Protobuf seeds the order of its maps per process.
    script = (
        "import hashlib, sys; sys.path.insert(0, 'tests/lowering/ascend')\n"
        "from test_ge_file import canonical, model\n"
        "print(hashlib.sha256(canonical(model())).hexdigest(), 'torch_npu' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert ran.stdout.split() == [hashlib.sha256(canonical(model())).hexdigest(), "False"]


def test_each_rank_gets_its_number_and_its_communicators(ge_file):
    for rank, groups in ((0, {"tp": "hccl_a", "world": "hccl_w"}), (5, {"tp": "hccl_b", "world": "hccl_w", "dp": "hccl_d"})):
        mine = patched(ge_file, rank, groups)
        assert mine.patches == ()
        ops = {op.name: op for op in operators(parse(mine.graph))}
        assert ops["dispatch"].attr["ep_rank_id"].i == rank
        assert ops["dispatch"].attr["group_ep"].s == b"hccl_w"
        assert ops["reduce"].attr["group"].s == groups["tp"].encode()
        assert ops["reduce"].attr["a"].s == b"tp"
        assert patched(mine, 9, {}) is mine
    # The unpatched file is unchanged.
    assert parse(ge_file.graph) == parse(model())


def test_graphs_that_are_called_are_patched_too(ge_file):
    mine = patched(ge_file, 3, {"tp": "t", "world": "w"})
    assert [op.attr["ep_rank_id"].i for op in operators(parse(mine.graph)) if op.name == "dispatch"] == [3, 3]


def test_a_group_the_rank_lacks_is_named(ge_file):
    with pytest.raises(LoweringError, match=r"dispatch\.group_ep is for group 'world', and this rank has tp"):
        patched(ge_file, 0, {"tp": "t"})


@pytest.mark.parametrize("patch", [("gone", "group", "group"), ("reduce", "gone", "group")])
def test_a_patch_of_nothing_is_refused(ge_file, patch):
    with pytest.raises(LoweringError, match="no such operator"):
        patched(replace(ge_file, patches=(patch,)), 0, {"tp": "t"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feeds": (0, 1, 4)}, "feeds"),
        ({"feeds": (0, 1, 1, 2)}, "at most once"),
        ({"donations": ((1, 3),)}, r"donates operands \[3\]"),
        ({"bound": (3,)}, r"writes in place operands \[3\]"),
        ({"patches": (("a", "b", "rank"),)}, "legal are 'ep_rank' and 'group'"),
        ({"graph": b"\xff\xff"}, "not a serialised GE model"),
        ({"graph": b""}, "without a graph"),
    ],
)
def test_contradictions_are_refused_before_they_are_written(ge_file, change, message):
    with pytest.raises(LoweringError, match=message):
        encode(replace(ge_file, **change))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"PK\x03\x04" * 9, msgpack.packb([1]), msgpack.packb({"format": "npucompile.ge/0"}), msgpack.packb({"format": FORMAT})],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(LoweringError, match=r"not a file of format .npucompile\.ge"):
        decode(data)


def test_a_container_that_contradicts_itself_is_not_read(ge_file):
    read = msgpack.unpackb(encode(ge_file))
    with pytest.raises(LoweringError, match="donates operands"):
        decode(msgpack.packb({**read, "donations": [[1, 3]]}))

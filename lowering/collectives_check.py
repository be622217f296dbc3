"""Turns a graph's collectives into the ordered list every rank of a group must share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..graphs.errors import LoweringError
from ..graphs.types import Mesh
from .ascend.ge_file import GeFile, parse
from .ascend.inspect_ge import shape

Collective = tuple[str, str, str]
"""(collective, group, type of its first result), the group by its symbol: the same on all ranks."""
Talk = tuple[str, tuple[int, ...], str]
"""(collective, ranks that take part, type): what one rank waits for."""

COLLECTIVES = {
    "HcomAllReduce": "all_reduce",
    "HcomAllGather": "all_gather_into_tensor",
    "HcomReduceScatter": "reduce_scatter_tensor",
    "HcomAllToAll": "all_to_all_single",
    "HcomAllToAllV": "all_to_all_single",
    "HcomBroadcast": "broadcast",
    "MoeDistributeDispatch": "moe_dispatch",
    "MoeDistributeDispatchV2": "moe_dispatch",
    "MoeDistributeCombine": "moe_combine",
    "MoeDistributeCombineV2": "moe_combine",
}
"""GE operator that communicates -> the collective it is in a partitioned graph."""
_GROUPS, _SIZES, _RANK = ("group_ep", "group"), ("rank_size", "ep_world_size"), "ep_rank_id"


def expand(collectives: Sequence[Collective], mesh: Mesh) -> list[list[Talk]]:
    """What each rank of a mesh waits for, by rank, when all run one graph.

    Raises:
        LoweringError: a collective is over a group that the mesh has not.
    """
    known = mesh.groups()
    if strange := sorted({group for _, group, _ in collectives if group not in known}):
        raise LoweringError(f"collectives are over the groups {', '.join(strange)}; mesh {mesh} has {', '.join(known)}")
    return [[(name, mesh.group(group, rank), kind) for name, group, kind in collectives] for rank in range(mesh.size)]


def of_ge_file(ge_file: GeFile, *, in_order: bool = False) -> tuple[Collective, ...]:
    """Every communication of a GE graph in its order, groups as the graph names them.

    Args:
        in_order: refuse a graph whose data leave the order of two collectives open: GE may then run either first.

    Raises:
        LoweringError: an operator communicates that is no collective of the house, or does so in a called graph, whose place in
            the order nothing states.
    """
    main, *called = parse(ge_file.graph).graph
    for graph in called:
        if talking := [op.name for op in _talking(graph.op)]:
            raise LoweringError(f"{', '.join(talking)} communicate in the called graph {graph.name}; legal is the main graph alone")
    collectives = _talking(main.op)
    if in_order:
        _check_order(main.op, [op.name for op in collectives])
    return tuple(_collective(op) for op in collectives)


def of_rank(ge_file: GeFile, rank: int, members: Mapping[str, tuple[int, ...]]) -> list[Talk]:
    """What one rank waits for, as the GE file that was patched for it says.

    Args:
        ge_file: of this rank (`ge_file.patched`).
        members: ranks of each communicator of this rank, in their order, by its name.

    Raises:
        LoweringError: as `of_ge_file`; a communicator is not known, or an operator has another number of ranks, or another
            place in it, than its communicator.
    """
    for op in _talking(parse(ge_file.graph).graph[0].op):
        _check_rank(op, rank, members)
    return [(name, members[group], kind) for name, group, kind in of_ge_file(ge_file)]


def agree(partitioned: Sequence[Collective], shipped: Sequence[Collective]) -> None:
    """Refuses a shipped graph that communicates otherwise than the partitioned graph it was made of.

    Raises:
        LoweringError: naming the first difference.
    """
    for position in range(max(len(partitioned), len(shipped))):
        ours, theirs = _at(partitioned, position), _at(shipped, position)
        if ours != theirs:
            raise LoweringError(
                f"collective {position} of the partitioned graph is {_describe(ours)}, of the shipped graph {_describe(theirs)}; "
                f"they have {len(partitioned)} and {len(shipped)}, and legal is the same list"
            )


def check_ranks(per_rank: Sequence[Sequence[Talk]]) -> None:
    """Proves that ranks which run these lists, each in its order, never wait for ever or take each other's data.

    Args:
        per_rank: what each rank waits for, by rank.

    Raises:
        LoweringError: two members of a group have different lists for it, naming both, the position and both sides; or the lists
            agree and the ranks of several groups still wait for each other in a circle.
    """
    lists_by_group: dict[tuple[int, ...], dict[int, list[tuple[int, str, str]]]] = {}
    for rank, talks in enumerate(per_rank):
        for position, (name, members, kind) in enumerate(talks):
            if rank not in members or len(set(members)) != len(members) or not set(members) <= set(range(len(per_rank))):
                raise LoweringError(
                    f"rank {rank} is to take part in {name} {kind} over ranks {members}; legal are distinct ranks "
                    f"of 0 to {len(per_rank) - 1}, {rank} among them"
                )
            lists_by_group.setdefault(members, {}).setdefault(rank, []).append((position, name, kind))
    for members, lists in lists_by_group.items():
        first = members[0]
        for rank in members[1:]:
            _same(members, (first, lists.get(first, [])), (rank, lists.get(rank, [])))
    _run(per_rank)


def _check_order(ops: Iterable[Any], talking: Sequence[str]) -> None:
    """Refuses the first collective that does not wait for the one before it."""
    # By induction: what waits for the last collective waits for all.
    number = {name: i for i, name in enumerate(talking)}
    waits: dict[str, int] = {}
    for op in ops:
        waits[op.name] = max((waits.get(tensor.rpartition(":")[0], 0) for tensor in op.input), default=0)
        here = number.get(op.name)
        if here is not None:
            if waits[op.name] < here:
                raise LoweringError(
                    f"{op.name} does not wait for {talking[here - 1]}, and nothing else says which comes first; legal is an order by data"
                )
            waits[op.name] = here + 1


def _talking(ops: Iterable[Any]) -> list[Any]:
    """Operators that communicate, in order; whether one does is a matter of its type."""
    known: dict[str, bool] = {}
    talking = []
    for op in ops:
        kind = op.type
        if kind not in known:
            known[kind] = kind in COLLECTIVES or kind.startswith("Hcom") or any(op.attr[n].WhichOneof("value") == "s" for n in _named(op))
        if known[kind]:
            talking.append(op)
    return talking


def _named(op: Any) -> list[str]:
    """Attributes that name the communicator."""
    return [name for name in _GROUPS if name in op.attr]


def _group(op: Any) -> str:
    if not _named(op):
        raise LoweringError(f"{op.name} is a {op.type} without a group; legal is one in {' or '.join(_GROUPS)}")
    return str(op.attr[_named(op)[0]].s.decode())


def _collective(op: Any) -> Collective:
    if op.type not in COLLECTIVES:
        raise LoweringError(f"{op.name} is a {op.type}, which communicates; legal are {', '.join(sorted(COLLECTIVES))}")
    return COLLECTIVES[op.type], _group(op), shape(op.output_desc[0])


def _check_rank(op: Any, rank: int, members: Mapping[str, tuple[int, ...]]) -> None:
    group = _group(op)
    if group not in members:
        raise LoweringError(f"rank {rank}: {op.name} is over communicator {group!r}; this rank has {', '.join(sorted(members)) or 'none'}")
    ranks = members[group]
    for size in _SIZES:
        if size in op.attr and op.attr[size].i != len(ranks):
            raise LoweringError(f"rank {rank}: {op.name} has {size} {op.attr[size].i}, its communicator {group!r} has {len(ranks)} ranks")
    if rank not in ranks:
        raise LoweringError(f"rank {rank}: {op.name} is over communicator {group!r} of ranks {ranks}; legal is one with {rank} in it")
    if _RANK in op.attr and op.attr[_RANK].i != ranks.index(rank):
        raise LoweringError(f"rank {rank}: {op.name} has {_RANK} {op.attr[_RANK].i}; its place in {group!r} is {ranks.index(rank)}")


def _at(talks: Sequence[Collective], position: int) -> Collective | None:
    return talks[position] if position < len(talks) else None


def _describe(collective: Collective | None) -> str:
    return f"{collective[0]} over {collective[1]} of {collective[2]}" if collective else "missing"


def _same(members: tuple[int, ...], one: tuple[int, list[tuple[int, str, str]]], other: tuple[int, list[tuple[int, str, str]]]) -> None:
    """Compares two members' lists for their group: (rank, what it has)."""
    (first, left), (rank, right) = one, other
    for position in range(max(len(left), len(right))):
        here, there = (talks[position] if position < len(talks) else None for talks in (left, right))
        if here is None or there is None or here[1:] != there[1:]:
            ours, theirs = (f"{side[1]} {side[2]} (number {side[0]} of all it has)" if side else "nothing" for side in (here, there))
            raise LoweringError(
                f"collective {position} of group {members}: rank {first} has {ours}, rank {rank} has {theirs}; legal is the same on all"
            )


def _run(per_rank: Sequence[Sequence[Talk]]) -> None:
    """Lets each rank take its next collective when all its members are there."""
    done = [0] * len(per_rank)

    def head(rank: int) -> tuple[int, ...] | None:
        return per_rank[rank][done[rank]][1] if done[rank] < len(per_rank[rank]) else None

    queue = list(range(len(per_rank)))
    while queue:
        members = head(queue.pop())
        if members and all(head(rank) == members for rank in members):
            for rank in members:
                done[rank] += 1
            queue.extend(members)
    if stuck := [rank for rank in range(len(per_rank)) if head(rank)]:
        raise LoweringError("ranks wait for each other: " + "; ".join(_circle(per_rank, done, stuck[0])))


def _circle(per_rank: Sequence[Sequence[Talk]], done: list[int], rank: int) -> list[str]:
    """Who waits for whom, from one rank until a rank comes again."""
    waits: dict[int, str] = {}
    while rank not in waits:
        name, members, kind = per_rank[rank][done[rank]]
        # Lists of a group agree, so each member still has this collective ahead of it.
        late = next(other for other in members if per_rank[other][done[other]][1] != members)
        waits[rank] = f"rank {rank} at its collective {done[rank]}, {name} {kind} over {members}, for rank {late}"
        rank = late
    return [*waits.values()][list(waits).index(rank) :]

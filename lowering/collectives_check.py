"""The collectives of a graph in their order, and the proof that all ranks of a group run the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..graphs.errors import LoweringError
from ..graphs.types import WORLD, Mesh
from .ascend.acl_graph.file import AclFile
from .ascend.acl_graph.inspect_acl import collectives as acl_collectives
from .ascend.convert import shape_of
from .ascend.ge_file import GeFile
from .ascend.ge_operators import Operator, graphs
from .ascend.inspect_ge import shape
from .ascend.operators.table import COMMUNICATING, COMMUNICATING_TARGETS

Collective = tuple[str, str, str]
"""(collective, group, type of its first result), the group by its symbol: the same on all ranks."""
Talk = tuple[str, tuple[int, ...], str]
"""(collective, ranks that take part, type): a collective as one rank runs it."""

COLLECTIVES = {kind: record.collective for kind, record in COMMUNICATING.items()}
"""Type of a GE operator that communicates -> name of the same collective in a partitioned graph."""
_GROUPS, _SIZES, _RANK = ("group_ep", "group"), ("rank_size", "ep_world_size"), "ep_rank_id"
EXPERT_GROUPS = {record.collective: record.own_group for record in COMMUNICATING_TARGETS.values() if record.own_group}
"""Collective of a partitioned graph, over "world" there -> the group that it has for itself on NPUs."""
_OWN = frozenset(EXPERT_GROUPS.values())


def expand(collectives: Sequence[Collective], mesh: Mesh) -> list[list[Talk]]:
    """The collectives that each rank of a mesh runs, by rank, when all ranks run one graph.

    Raises:
        LoweringError: a collective is over a group that the mesh does not have.
    """
    known = mesh.groups()
    if strange := sorted({group for _, group, _ in collectives if group not in known}):
        raise LoweringError(f"collectives are over the groups {', '.join(strange)}; mesh {mesh} has {', '.join(known)}")
    return [[(name, mesh.group(group, rank), kind) for name, group, kind in collectives] for rank in range(mesh.size)]


def of_ge_file(ge_file: GeFile, *, in_order: bool = False) -> tuple[Collective, ...]:
    """The collectives of a GE graph in its order, groups as the partitioned graph names them: "world" where the GE graph has "dispatch".

    Args:
        in_order: refuse a graph in which two collectives do not depend on each other by data: GE may then run either first.

    Raises:
        LoweringError: an operator communicates and is not in `COLLECTIVES`, or is in a called graph, whose position in the order
            is not stated anywhere; or expert dispatch shares a group with another operator.
    """
    return _as_partitioned(_read(ge_file, in_order))


def of_acl_file(acl_file: AclFile) -> tuple[Collective, ...]:
    """The collectives of a graph of torch operators, as `of_ge_file` gives them; one stream runs them in this order.

    Raises:
        LoweringError: expert dispatch shares a group with another operator.
    """
    calls = acl_collectives(acl_file)
    return _as_partitioned([(COMMUNICATING_TARGETS[name].collective, group, shape_of(value)) for name, group, value in calls])


def of_acl_rank(acl_file: AclFile, members: Mapping[str, tuple[int, ...]]) -> list[Talk]:
    """The collectives that one rank runs.

    Args:
        members: ranks of each group of this rank, in their order, by symbol.
    """
    return [(COMMUNICATING_TARGETS[name].collective, members[group], shape_of(value)) for name, group, value in acl_collectives(acl_file)]


def _as_partitioned(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """Collectives with groups as the partitioned graph names them."""
    for name, group, _ in collectives:
        if EXPERT_GROUPS.get(name) != (group if group in _OWN else None):
            own = EXPERT_GROUPS.get(name, group)
            legal = f"{own} for {' and '.join(other for other in EXPERT_GROUPS if EXPERT_GROUPS[other] == own)}, and for nothing else"
            raise LoweringError(f"{name} is over group {group}; legal is {legal}: their kernels want a communicator of their own")
    return tuple((name, WORLD if group in _OWN else group, kind) for name, group, kind in collectives)


def _read(ge_file: GeFile, in_order: bool = False) -> tuple[Collective, ...]:
    """The collectives of a GE graph in its order, groups as the graph names them."""
    (_, main), *called = graphs(ge_file.graph)
    for name, called_ops in called:
        if names := [op.name for op in _communicating(called_ops)]:
            raise LoweringError(f"{', '.join(names)} communicate in the called graph {name}; legal is the main graph alone")
    ops = _communicating(main)
    if in_order:
        _check_order(main, [op.name for op in ops])
    return tuple(_collective(op) for op in ops)


def of_rank(ge_file: GeFile, rank: int, members: Mapping[str, tuple[int, ...]]) -> list[Talk]:
    """The collectives that one rank runs, read from the GE file that was patched for it.

    Args:
        ge_file: of this rank (`ge_file.patched`).
        members: ranks of each communicator of this rank, in their order, by its name.

    Raises:
        LoweringError: as `of_ge_file`; or a communicator is unknown, or an operator's number of ranks or own rank differs from its
            communicator's.
    """
    for op in _communicating(graphs(ge_file.graph)[0][1]):
        _check_rank(op, rank, members)
    return [(name, members[group], kind) for name, group, kind in _read(ge_file)]


def agree(partitioned: Sequence[Collective], shipped: Sequence[Collective]) -> None:
    """Refuses a shipped graph whose collectives differ from those of the partitioned graph it was made from.

    Raises:
        LoweringError: naming the first difference.
    """
    for position in range(max(len(partitioned), len(shipped))):
        left, right = _at(partitioned, position), _at(shipped, position)
        if left != right:
            raise LoweringError(
                f"collective {position} of the partitioned graph is {_describe(left)}, of the shipped graph {_describe(right)}; "
                f"they have {len(partitioned)} and {len(shipped)}, and legal is the same list"
            )


def check_ranks(per_rank: Sequence[Sequence[Talk]]) -> None:
    """Proves that ranks which run these collectives, each in its order, neither deadlock nor receive data of another collective.

    Args:
        per_rank: the collectives of each rank, by rank.

    Raises:
        LoweringError: two members of a group have different lists for it, naming both, the position and both sides; or the lists
            agree and ranks of several groups deadlock because each waits for the next.
    """
    by_group: dict[tuple[int, ...], dict[int, list[tuple[int, str, str]]]] = {}
    for rank, collectives in enumerate(per_rank):
        for position, (name, members, kind) in enumerate(collectives):
            if rank not in members or len(set(members)) != len(members) or not set(members) <= set(range(len(per_rank))):
                raise LoweringError(
                    f"rank {rank} is to take part in {name} {kind} over ranks {members}; legal are distinct ranks "
                    f"of 0 to {len(per_rank) - 1}, {rank} among them"
                )
            by_group.setdefault(members, {}).setdefault(rank, []).append((position, name, kind))
    for members, lists in by_group.items():
        first = members[0]
        for rank in members[1:]:
            _check_same(members, (first, lists.get(first, [])), (rank, lists.get(rank, [])))
    _run(per_rank)


def _check_order(ops: Iterable[Operator], names: Sequence[str]) -> None:
    """Refuses the first collective that does not wait for the one before it."""
    # By induction: an operator that depends on the last collective depends on all before it.
    number = {name: i for i, name in enumerate(names)}
    waits: dict[str, int] = {}
    for op in ops:
        waits[op.name] = max([waits.get(producer, 0) for producer in op.producers], default=0)
        position = number.get(op.name)
        if position is not None:
            if waits[op.name] < position:
                raise LoweringError(
                    f"{op.name} does not wait for {names[position - 1]}, and nothing else says which comes first; legal is an order by data"
                )
            waits[op.name] = position + 1


def _communicating(ops: Iterable[Operator]) -> list[Operator]:
    """Operators that communicate, in order. All operators of a type do or none does, so each type is looked at once."""
    known: dict[str, bool] = {}
    communicating = []
    for op in ops:
        kind = op.type
        if kind not in known:
            known[kind] = kind in COLLECTIVES or kind.startswith("Hcom") or any(op.attr[n].WhichOneof("value") == "s" for n in _named(op))
        if known[kind]:
            communicating.append(op)
    return communicating


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


def _at(collectives: Sequence[Collective], position: int) -> Collective | None:
    return collectives[position] if position < len(collectives) else None


def _describe(collective: Collective | None) -> str:
    return f"{collective[0]} over {collective[1]} of {collective[2]}" if collective else "missing"


def _check_same(
    members: tuple[int, ...], left: tuple[int, list[tuple[int, str, str]]], right: tuple[int, list[tuple[int, str, str]]]
) -> None:
    """Refuses two members of a group, each as (rank, its collectives in the group), whose lists differ."""
    (first, ours), (rank, theirs) = left, right
    for position in range(max(len(ours), len(theirs))):
        a, b = (collectives[position] if position < len(collectives) else None for collectives in (ours, theirs))
        if a is None or b is None or a[1:] != b[1:]:
            has = [f"{side[1]} {side[2]} (number {side[0]} of all it has)" if side else "nothing" for side in (a, b)]
            raise LoweringError(
                f"collective {position} of group {members}: rank {first} has {has[0]}, rank {rank} has {has[1]}; legal is the same on all"
            )


def _run(per_rank: Sequence[Sequence[Talk]]) -> None:
    """Simulates the ranks: a collective completes when it is the next one of all its members. Refuses lists that deadlock."""
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
    """Which rank waits for which, followed from one rank until a rank repeats."""
    waits: dict[int, str] = {}
    while rank not in waits:
        name, members, kind = per_rank[rank][done[rank]]
        # Lists of a group agree, so a member that is not at this collective has yet to reach it.
        late = next(other for other in members if per_rank[other][done[other]][1] != members)
        waits[rank] = f"rank {rank} at its collective {done[rank]}, {name} {kind} over {members}, for rank {late}"
        rank = late
    return [*waits.values()][list(waits).index(rank) :]

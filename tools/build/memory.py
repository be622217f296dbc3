"""Turns the abstract parameters and pools of a build into what one rank has to hold, part by part, against what it has."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import Aval, Leaf, Limits, Mesh, Rules
from .targets import Target

MIB, GIB = 2**20, 2**30

HCCL_BUFFER_BYTES = 200 * MIB
"""A communicator's buffer when HCCL_BUFFSIZE is not set; it holds two, to send from and to receive into (CANN reference, HCCL_BUFFSIZE)."""

WORKSPACE_SHARE = 4
"""One part in so many of the largest graph's live values is added for what the device's kernels ask for themselves (an allowance:
tilings are CANN's, and nothing off the device knows them)."""


@dataclass(frozen=True)
class Communicator:
    """A group that ranks talk in.

    Attributes:
        name: of the group.
        ranks: how many are in it.
        buffer_bytes: its HCCL_BUFFSIZE; it takes twice as much.
    """

    name: str
    ranks: int
    buffer_bytes: int = HCCL_BUFFER_BYTES

    @property
    def nbytes(self) -> int:
        return 2 * self.buffer_bytes


@dataclass(frozen=True)
class Part:
    """A part of a rank's memory: its size, and one line on where that comes from."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class Fitting:
    """The largest settings that fit on one rank, all else unchanged; 0 where even the smallest does not.

    Attributes:
        requests: per dp group, at the asked context.
        context_len: tokens of a request, at the asked requests.
        pool_tokens: cached tokens of all requests of a dp group together, at the asked requests.
    """

    requests: int
    context_len: int
    pool_tokens: int


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank holds. Activations and communication buffers are for the largest graph, whatever the pools hold.

    Attributes:
        target, mesh: what it is for.
        parts: everything on the device, the runtime's own part included.
        limit_bytes: memory of one rank.
        page_bytes, slot_bytes, request_slot_bytes: what one more page, slot and request slot take in all pools together.
        limits: sizes that were asked for.
    """

    target: str
    mesh: str
    parts: tuple[Part, ...]
    limit_bytes: int
    page_bytes: int
    slot_bytes: int
    request_slot_bytes: int
    limits: Limits

    @property
    def total_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes

    def as_table(self) -> str:
        """A line per part that is not empty, then total and limit."""
        shown = [part for part in self.parts if part.nbytes]
        width = max((len(part.name) for part in shown), default=0)
        lines = [f"{part.name:<{width}} {part.nbytes / GIB:>8.2f} GiB  {part.why}" for part in shown]
        room = self.limit_bytes - self.total_bytes
        verdict = f"{room / GIB:.2f} GiB free" if self.fits else f"{-room / GIB:.2f} GiB too much"
        lines.append(f"{'total':<{width}} {self.total_bytes / GIB:>8.2f} GiB  of {self.limit_bytes / GIB:.2f} GiB a rank: {verdict}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` reads them."""
        return asdict(self) | {"parts": [asdict(part) for part in self.parts], "total_bytes": self.total_bytes, "fits": self.fits}

    @staticmethod
    def from_dict(told: Mapping[str, Any]) -> MemoryPlan:
        """The plan that `as_dict` wrote."""
        sizes = {name: told[name] for name in ("target", "mesh", "limit_bytes", "page_bytes", "slot_bytes", "request_slot_bytes")}
        return MemoryPlan(parts=tuple(Part(**part) for part in told["parts"]), limits=Limits(**told["limits"]), **sizes)

    def check(self) -> None:
        """Refuses a plan that does not fit.

        Raises:
            SpecError: every part, the overrun, and the largest settings that fit.
        """
        if self.fits:
            return
        parts = ", ".join(f"{part.name} {part.nbytes / GIB:.2f}" for part in self.parts if part.nbytes)
        over = (self.total_bytes - self.limit_bytes) / GIB
        raise SpecError(
            f"a rank of {self.target} with mesh {self.mesh} has {self.limit_bytes / GIB:.2f} GiB and this needs "
            f"{self.total_bytes / GIB:.2f}, {over:.2f} too much: {parts} (GiB). {self._advice()}"
        )

    def _advice(self) -> str:
        fit, limits, requests = largest_fitting(self), self.limits, _requests(self.limits)
        told = []
        if fit.requests:
            told.append(f"{fit.requests} requests a dp group (asked: {requests}) at a context of {limits.max_model_len} tokens")
        if fit.context_len:
            told.append(f"a context of {fit.context_len} tokens (asked: {limits.max_model_len}) at {requests} requests")
        if limits.num_pages - 1 != requests * limits.pages_per_request and fit.pool_tokens >= limits.max_model_len:
            asked = (limits.num_pages - 1) * limits.page_size
            told.append(f"{fit.pool_tokens} cached tokens in all (asked: {asked}) at {requests} requests of {limits.max_model_len}")
        if told:
            return "What fits: " + ", or ".join(told)
        return "No number of requests and no context fits: legal are a mesh of more ranks, narrower weights, or smaller graphs"


def largest_fitting(plan: MemoryPlan) -> Fitting:
    """The largest settings that fit, solved for pages and slots; they exceed what was asked where there is room.

    Pools may hold less than every request at full length: then a request keeps its share of them, pages and context in proportion, but
    one request can always reach its end. Communication buffers and activations stay as they are, though fewer requests could do with
    smaller graphs.
    """
    limits, whole, page = plan.limits, plan.limits.pages_per_request, plan.page_bytes
    requests, own = _requests(limits), limits.slots_per_request * plan.slot_bytes + plan.request_slot_bytes
    share = min(Fraction(limits.num_pages - 1, requests * whole), Fraction(1))
    pools = (limits.num_pages - 1) * page + requests * own
    free = plan.limit_bytes - plan.total_bytes + pools
    each = whole * share * page + own
    most = math.floor(free / each) if each else requests
    if own or free < whole * page:
        most = min(most, (free - whole * page) // max(own, 1))
    pages = max(free - requests * own, 0) // page if page else limits.num_pages - 1
    context = min(math.floor(pages / (requests * share)), pages) if share else 0
    return Fitting(max(most, 0), context * limits.page_size, pages * limits.page_size)


def plan_memory(
    params: Iterable[Leaf],
    state: Iterable[Leaf],
    mesh: Mesh,
    rules: Rules,
    target: Target,
    limits: Limits,
    *,
    peak_bytes: int,
    inputs_bytes: int = 0,
    communicators: Sequence[Communicator] = (),
    draft: str = "",
) -> MemoryPlan:
    """What one rank holds.

    Args:
        params: parameters with global shapes and logical axes; those with an axis "experts" are told apart.
        state: pools with global shapes; an axis "pages", "slots" or "request slots" says what they hold.
        mesh: legal on the target.
        rules: which mesh axes a logical axis is split over.
        limits: sizes of the pools.
        peak_bytes: largest sum of live intermediate values of any graph, on one rank.
        inputs_bytes: inputs and results of one step.
        communicators: groups that the graphs talk in, as `communicators` lists them.
        draft: what the names of the draft head's parameters begin with; "" where there is none.
    """
    heads, weights = list[Leaf](), list[Leaf]()
    for leaf in params:
        (heads if draft and leaf.name.startswith(draft) else weights).append(leaf)
    expert, other = _split(weights, "experts", mesh, rules)
    pools = list(state)
    kv, _ = _split(pools, "pages", mesh, rules)
    slots, _ = _split(pools, "slots", mesh, rules)
    request_slots, _ = _split(pools, "request_slots", mesh, rules)
    loose = sum(local_bytes(leaf.aval, mesh, rules) for leaf in pools) - kv - slots - request_slots
    held = f"{limits.num_slots} slots, {limits.slots_per_request} a request"
    workspace = peak_bytes // WORKSPACE_SHARE
    reserved = target.reserved_bytes(mesh)
    parts = [
        Part("expert weights", expert, _why_experts(weights, mesh, rules)),
        Part("other weights", other, f"{sum('experts' not in leaf.aval.axes for leaf in weights)} parameters, as the mesh splits them"),
        Part("draft head", sum(_split(heads, "experts", mesh, rules)), "unquantised; its pages are among the KV pages"),
        Part("KV pages", kv, f"{limits.num_pages} pages of {limits.page_size} tokens, {_each(kv, limits.num_pages)} a page"),
        Part("state slots", slots, f"{held}, {_each(slots, limits.num_slots)} a slot"),
        Part(
            "request_slots",
            request_slots,
            f"{limits.num_request_slots} slots, {request_slots // limits.num_request_slots} B a slot: what each request goes on with",
        ),
        Part("other state", loose, "pools of neither pages nor slots nor request slots"),
        Part("activations", peak_bytes, "live values of the largest graph; graphs run one at a time and share them"),
        Part("workspace", workspace, f"an allowance for kernels: 1/{WORKSPACE_SHARE} of the activations"),
        Part("inputs", inputs_bytes, "inputs and results of a step"),
        Part("communication", sum(c.nbytes for c in communicators), _why_communication(communicators)),
        Part("runtime", reserved, "what torch_npu never offers" if reserved else "nothing is kept from a rank"),
    ]
    each = kv // limits.num_pages, slots // limits.num_slots, request_slots // limits.num_request_slots
    return MemoryPlan(target.name, str(mesh), tuple(parts), target.memory_bytes(mesh), *each, limits)


def local_bytes(aval: Aval, mesh: Mesh, rules: Rules) -> int:
    """Bytes of one rank's part of a value of global shape; a size that does not divide is rounded up to the largest part."""
    sizes = zip(aval.shape, aval.axes, strict=True)
    return math.prod(-(-size // rules.num_shards(axis, mesh)) for size, axis in sizes) * aval.dtype.itemsize


def communicators(mesh: Mesh, used: Collection[str] = ("dp", "tp", "world"), dispatch_bytes: int = 0) -> tuple[Communicator, ...]:
    """The communicators of one rank.

    Groups of one rank need none, and groups of the same ranks (tp is the world when dp is 1) share one. Expert dispatch has one of its
    own, because no other operation may run in it (aclnnMoeDistributeDispatchV2, constraints).

    Args:
        used: groups that the graphs name.
        dispatch_bytes: window of the expert dispatch, as `dispatch_window_bytes` says; 0 where no graph dispatches.

    Raises:
        SpecError: a group is not known.
    """
    sizes = {name: len(mesh.group(name, 0)) for name in mesh.groups()}
    if unknown := set(used) - set(sizes):
        raise SpecError(f"groups {', '.join(sorted(unknown))} are not known; legal are {', '.join(sizes)}")
    made = [Communicator(name, size) for name, size in sizes.items() if name in used and 1 < size < mesh.size]
    if mesh.size > 1 and any(sizes[name] == mesh.size for name in used):
        made.append(Communicator("world", mesh.size))
    if dispatch_bytes:
        made.append(Communicator("dispatch", mesh.size, max(HCCL_BUFFER_BYTES, _round_up(dispatch_bytes, MIB))))
    return tuple(made)


def dispatch_window_bytes(target: Target, tokens: int, hidden_size: int, experts: int, experts_per_token: int, ranks: int) -> int:
    """The HCCL_BUFFSIZE that expert dispatch and combine need, in bytes.

    Every rank keeps room for all tokens of every other rank at each of its experts. Formulas: the constraints on HCCL_BUFFSIZE of
    aclnnMoeDistributeDispatchV2 and V3 (cann/ops-transformer, mc2/moe_distribute_dispatch_v2/docs), without shared experts:
    on A3 its "fullmesh_v1", on A2 its "fullmesh" within a node and its "hierarchy" between nodes.

    Args:
        tokens: most tokens of one rank in a step.
        hidden_size: M.
        experts: E, of all ranks together.
        experts_per_token: X.
        ranks: that experts are spread over.
    """
    local, row = -(-experts // ranks), 2 * hidden_size
    if target.tp_across_nodes:
        sent = local * tokens * ranks * _round_up(_round_up(row, 32) + 64, 512)
        return 2 * (sent + experts_per_token * tokens * _round_up(row, 512))
    if ranks <= target.npus_per_node:
        return 2 * (tokens * ranks * min(local, experts_per_token) * row + 2 * MIB)
    return (experts + ranks // 4) * _round_up(tokens * (row + 16 * _round_up(experts_per_token, 8)), 512) + 8 * MIB


def _split(leaves: Iterable[Leaf], axis: str, mesh: Mesh, rules: Rules) -> tuple[int, int]:
    """Bytes of one rank: leaves with that logical axis, and all others."""
    sums = {True: 0, False: 0}
    for leaf in leaves:
        sums[axis in leaf.aval.axes] += local_bytes(leaf.aval, mesh, rules)
    return sums[True], sums[False]


def _why_experts(weights: Iterable[Leaf], mesh: Mesh, rules: Rules) -> str:
    counts = {size for leaf in weights for size, axis in zip(leaf.aval.shape, leaf.aval.axes, strict=True) if axis == "experts"}
    if not counts:
        return "no experts"
    shards = rules.num_shards("experts", mesh)
    return f"{-(-max(counts) // shards)} of {max(counts)} experts a layer" if shards > 1 else f"all {max(counts)} experts of every layer"


def _why_communication(groups: Sequence[Communicator]) -> str:
    told = (f"{c.name} ({c.ranks} ranks) 2 x {c.buffer_bytes / MIB:.0f} MiB" for c in groups)
    return ", ".join(told) or "one rank talks to nobody"


def _each(total: int, count: int) -> str:
    return f"{total / count / 1024:.0f} KiB"


def _requests(limits: Limits) -> int:
    return max(limits.num_request_slots - 1, 1)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

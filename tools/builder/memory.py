"""Plans the memory of one rank: weights, pools, activations and buffers, compared with what the device has."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import FUSED_EXPERTS, PICTURE_ROWS, Aval, Leaf, Limits, Mesh, Rules
from .targets import Target

MIB, GIB = 2**20, 2**30

HCCL_BUFFER_BYTES = 200 * MIB
"""HCCL_BUFFSIZE by default; a communicator has two such buffers, to send and to receive (CANN reference, HCCL_BUFFSIZE)."""

WORKSPACE_SHARE = 4
"""1/4 of the largest graph's live values is added as workspace of its kernels: an allowance, because CANN computes their tilings on
the device only."""


@dataclass(frozen=True)
class Communicator:
    """A group of ranks and its buffers.

    Attributes:
        name: of the group.
        ranks: size of the group.
        buffer_bytes: its HCCL_BUFFSIZE; it has two buffers of that size.
    """

    name: str
    ranks: int
    buffer_bytes: int = HCCL_BUFFER_BYTES

    @property
    def nbytes(self) -> int:
        return 2 * self.buffer_bytes


@dataclass(frozen=True)
class MemoryShare:
    """A part of a rank's memory: its size, and a line that explains it."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class Fitting:
    """The largest settings that fit on one rank, each with all others unchanged; 0 if even the smallest does not fit.

    Attributes:
        requests: of a dp group, at the requested context.
        context_len: tokens of a request, at the requested number of requests.
        pool_tokens: cached tokens of all requests of a dp group, at the requested number of requests.
    """

    requests: int
    context_len: int
    pool_tokens: int


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank holds; activations and communication buffers are those of the largest graph.

    Attributes:
        target, mesh: names of both.
        parts: everything on the device, including what the runtime reserves.
        limit_bytes: memory of one rank.
        page_bytes, slot_bytes, request_slot_bytes: what one more page, slot and request slot take in all pools together.
        limits: the requested sizes.
    """

    target: str
    mesh: str
    parts: tuple[MemoryShare, ...]
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
        """A line per non-empty part, then total and limit."""
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
    def from_dict(plain: Mapping[str, Any]) -> MemoryPlan:
        """The plan that `as_dict` wrote."""
        sizes = {name: plain[name] for name in ("target", "mesh", "limit_bytes", "page_bytes", "slot_bytes", "request_slot_bytes")}
        return MemoryPlan(parts=tuple(MemoryShare(**part) for part in plain["parts"]), limits=Limits(**plain["limits"]), **sizes)

    def check(self) -> None:
        """Refuses a plan that does not fit.

        Raises:
            SpecError: naming every part, the overrun, and the largest settings that fit.
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
        options = []
        if fit.requests:
            options.append(f"{fit.requests} requests a dp group (asked: {requests}) at a context of {limits.max_model_len} tokens")
        if fit.context_len:
            options.append(f"a context of {fit.context_len} tokens (asked: {limits.max_model_len}) at {requests} requests")
        if limits.num_pages - 1 != requests * limits.pages_per_request and fit.pool_tokens >= limits.max_model_len:
            asked = (limits.num_pages - 1) * limits.page_size
            options.append(f"{fit.pool_tokens} cached tokens in all (asked: {asked}) at {requests} requests of {limits.max_model_len}")
        if options:
            return "What fits: " + ", or ".join(options)
        return "No number of requests and no context fits: legal are a mesh of more ranks, narrower weights, or smaller graphs"


def largest_fitting(plan: MemoryPlan) -> Fitting:
    """The largest settings that fit, solved for pages and slots; they exceed the requested ones where there is room.

    Pools may be too small for all requests at full length. The share of that length which they hold is kept, and one request can always
    reach its full length. Communication buffers and activations stay unchanged, though fewer requests might allow smaller graphs.
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
    fused_bytes: int = 0,
    draft: str = "",
    tower: str = "",
) -> MemoryPlan:
    """The memory plan of one rank.

    Args:
        params: parameters with global shapes and logical axes; an axis "experts" makes them expert weights.
        state: pools with global shapes; an axis "pages", "slots", "request_slots" or "picture_rows" says what they hold.
        mesh: one that is legal on the target.
        rules: which mesh axes a logical axis is split over.
        limits: sizes of the pools.
        peak_bytes: peak of the live intermediate values over all graphs, on one rank.
        inputs_bytes: inputs and results of one step.
        communicators: of the graphs, as `communicators` lists them.
        fused_bytes: workspace of a fused expert kernel, which holds what else would be values between kernels.
        draft, tower: prefixes of the names of parameters of the draft head and of the vision tower; "" for a model without one.
    """
    heads, towers, weights = list[Leaf](), list[Leaf](), list[Leaf]()
    for leaf in params:
        named = ((draft, heads), (tower, towers))
        next((part for prefix, part in named if prefix and leaf.name.startswith(prefix)), weights).append(leaf)
    expert, other = _split(weights, "experts", mesh, rules)
    pools = list(state)
    kv, _ = _split(pools, "pages", mesh, rules)
    slots, _ = _split(pools, "slots", mesh, rules)
    request_slots, _ = _split(pools, "request_slots", mesh, rules)
    pictures, _ = _split(pools, PICTURE_ROWS, mesh, rules)
    other_state = sum(local_bytes(leaf.aval, mesh, rules) for leaf in pools) - kv - slots - request_slots - pictures
    kept = f", {limits.checkpoint_slots} for prefixes" if limits.checkpoint_slots else ""
    slots_text = f"{limits.num_slots} slots, {limits.slots_per_request} a request{kept}"
    allowance = peak_bytes // WORKSPACE_SHARE
    why_workspace = (
        "of the fused experts" if fused_bytes > allowance else f"an allowance for kernels: 1/{WORKSPACE_SHARE} of the activations"
    )
    reserved = target.reserved_bytes(mesh)
    parts = [
        MemoryShare("expert weights", expert, _why_experts(weights, mesh, rules)),
        MemoryShare(
            "other weights", other, f"{sum('experts' not in leaf.aval.axes for leaf in weights)} parameters, as the mesh splits them"
        ),
        MemoryShare("draft head", sum(_split(heads, "experts", mesh, rules)), "unquantised; its pages are among the KV pages"),
        *_pictures(sum(_split(towers, "experts", mesh, rules)), pictures, limits),
        MemoryShare("KV pages", kv, f"{limits.num_pages} pages of {limits.page_size} tokens, {_each(kv, limits.num_pages)} a page"),
        MemoryShare("state slots", slots, f"{slots_text}, {_each(slots, limits.num_slots)} a slot"),
        MemoryShare(
            "request slots",
            request_slots,
            f"{limits.num_request_slots} slots, {request_slots // limits.num_request_slots} B each: what a request's next step starts from",
        ),
        MemoryShare("other state", other_state, "pools of neither pages nor slots nor request slots"),
        MemoryShare("activations", peak_bytes, "live values of the largest graph; graphs run one at a time and share them"),
        MemoryShare("workspace", max(allowance, fused_bytes), why_workspace),
        MemoryShare("inputs", inputs_bytes, "inputs and results of a step"),
        MemoryShare("communication", sum(c.nbytes for c in communicators), _why_communication(communicators)),
        MemoryShare("runtime", reserved, _why_runtime(target) if reserved else "nothing is kept from a rank"),
    ]
    unit_bytes = kv // limits.num_pages, slots // limits.num_slots, request_slots // limits.num_request_slots
    return MemoryPlan(target.name, str(mesh), tuple(parts), target.memory_bytes(mesh), *unit_bytes, limits)


def _pictures(tower: int, pool: int, limits: Limits) -> list[MemoryShare]:
    """Parts of a build that takes pictures, none of another one."""
    if not limits.picture_rows:
        return []
    return [
        MemoryShare("vision tower", tower, "whole on every rank"),
        MemoryShare("picture rows", pool, f"{limits.picture_rows} rows of pictures, {_each(pool, limits.picture_rows)} each"),
    ]


def local_bytes(aval: Aval, mesh: Mesh, rules: Rules) -> int:
    """Bytes of one rank's shard of a value of global shape; a size that does not divide is rounded up."""
    sizes = zip(aval.shape, aval.axes, strict=True)
    return math.prod(-(-size // rules.num_shards(axis, mesh)) for size, axis in sizes) * aval.dtype.itemsize


def communicators(
    mesh: Mesh, used: Collection[str] = ("dp", "tp", "world"), dispatch_bytes: int = 0, fused_bytes: int = 0
) -> tuple[Communicator, ...]:
    """The communicators of one rank.

    A group of one rank needs none, and groups of the same ranks (tp is the world when dp is 1) share one. Expert dispatch has its own,
    because no other operation may use it (aclnnMoeDistributeDispatchV2, constraints), and so have fused experts.

    Args:
        used: groups that the graphs name.
        dispatch_bytes: `dispatch_window_bytes` of the expert dispatch; 0 if no graph dispatches.
        fused_bytes: window of fused experts (`ops.fused_experts.window_bytes`), whose kernel reads the size of its own communicator.

    Raises:
        SpecError: a group is unknown.
    """
    sizes = {name: len(mesh.group(name, 0)) for name in mesh.groups()}
    if unknown := set(used) - set(sizes):
        raise SpecError(f"groups {', '.join(sorted(unknown))} are not known; legal are {', '.join(sizes)}")
    listed = [Communicator(name, size) for name, size in sizes.items() if name in used and 1 < size < mesh.size]
    if mesh.size > 1 and any(sizes[name] == mesh.size for name in used):
        listed.append(Communicator("world", mesh.size))
    if dispatch_bytes:
        listed.append(Communicator("dispatch", mesh.size, max(HCCL_BUFFER_BYTES, _round_up(dispatch_bytes, MIB))))
    if fused_bytes:
        listed.append(Communicator(FUSED_EXPERTS, mesh.size, _round_up(fused_bytes, MIB)))
    return tuple(listed)


def dispatch_window_bytes(target: Target, tokens: int, hidden_size: int, experts: int, experts_per_token: int, ranks: int) -> int:
    """The HCCL_BUFFSIZE that expert dispatch and combine need, in bytes.

    Each rank reserves room for all tokens of every other rank at each of its experts. The formulas are the constraints on HCCL_BUFFSIZE
    of aclnnMoeDistributeDispatchV2 and V3 (hicann/ops-transformer, mc2/moe_distribute_dispatch_v2/docs, 8.5.0.alpha001) and of
    npu_moe_distribute_dispatch_v2 (Ascend/op-plugin, 517f2e7). On A3 it is that of "fullmesh_v2", where 512 bytes carry 480: it is the
    larger one, and the sources disagree about which of the two algorithms it belongs to (hccl_utils.py of hicann/cann-recipes-infer,
    fbc225d). On A2 it is "fullmesh" within a node and "hierarchy" between nodes.

    Args:
        tokens: most tokens of one rank in a step.
        hidden_size: M.
        experts: E, of all ranks together.
        experts_per_token: X.
        ranks: that the experts are split over.
    """
    local, row = -(-experts // ranks), 2 * hidden_size
    if target.tp_across_nodes:
        sent = local * tokens * ranks * 512 * -(-(_round_up(row, 32) + 64) // 480)
        # One more than the choices: the operators count one shared expert unless told otherwise.
        return 2 * (sent + (experts_per_token + 1) * tokens * _round_up(row, 512))
    if ranks <= target.npus_per_node:
        return 2 * (tokens * ranks * min(local, experts_per_token) * row + 2 * MIB)
    return (experts + ranks // 4) * _round_up(tokens * (row + 16 * _round_up(experts_per_token, 8)), 512) + 8 * MIB


def _split(leaves: Iterable[Leaf], axis: str, mesh: Mesh, rules: Rules) -> tuple[int, int]:
    """Bytes on one rank of the leaves with that logical axis, and of all others."""
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
    buffers = (f"{c.name} ({c.ranks} ranks) 2 x {c.buffer_bytes / MIB:.0f} MiB" for c in groups)
    return ", ".join(buffers) or "one rank talks to nobody"


def _why_runtime(target: Target) -> str:
    return "what torch_npu never offers" if target.cann else "an allowance for the driver, libraries and loaded modules"


def _each(total: int, count: int) -> str:
    return f"{total / count / 1024:.0f} KiB"


def _requests(limits: Limits) -> int:
    return max(limits.num_request_slots - 1, 1)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

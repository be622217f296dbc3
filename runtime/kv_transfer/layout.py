"""What of a rank's pools travels with a request, by address: derived from the pools that its model declares, so a family adds nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...graphs.errors import NpucompileError
from ...graphs.types import PICTURE_ROWS, Leaf, Limits, Mesh, Rules
from ...lowering.artifact.manifest import Manifest
from ...lowering.artifact.shards import local_leaves

PAGES, SLOTS, FIRST_SLOTS, REQUEST_SLOTS = "pages", "slots", "first_slots", "request_slots"


class LayoutError(NpucompileError):
    """Raised when two servers cannot hand over to each other."""


@dataclass(frozen=True)
class Region:
    """A pool of one rank in memory that the transfer engine knows: items of equal size, a page or a state slot each.

    Attributes:
        name: path of the pool in the state of the model.
        axis: what numbers its items: "pages" or "slots".
        dtype: of its elements, as it is written in manifests.
        shape: of what travels of an item.
        item_bytes: of what travels of an item, from its beginning on.
        stride_bytes: from one item to the next.
        count: of items, including the null one.
        address: of item 0.
        split: whether each rank of a tp group holds another part of every item; else all of them hold the whole.
    """

    name: str
    axis: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    stride_bytes: int
    count: int
    address: int
    split: bool

    def at(self, address: int) -> Region:
        """The same pool on another rank."""
        return replace(self, address=address)

    @property
    def nbytes(self) -> int:
        """Of the whole pool."""
        return self.stride_bytes * self.count

    @property
    def kind(self) -> tuple[str, str, tuple[int, ...]]:
        """What has to be the same on both sides."""
        return self.axis, self.dtype, self.shape


def regions(state: Sequence[Leaf], limits: Limits, addresses: Mapping[str, int], rules: Rules) -> tuple[Region, ...]:
    """The pools of one rank that travel, in the order of the state.

    A request slot does not: the host of a decode server writes it; nor do rows of pictures, which prefill alone reads. Where all windows
    of a convolution are in a request's first slot (graphs/ops/causal_conv.py), the first of them travels.

    Args:
        state: with the shapes of the rank's shards (`lowering.artifact.shards.local_leaves`).
        limits: of the build.
        addresses: of the pools, by path.
        rules: which axes are split.

    Raises:
        LayoutError: a pool is numbered by something that no handover knows.
    """
    found = []
    for leaf in state:
        axis, shape = leaf.aval.axes[0], leaf.aval.shape
        if axis in (REQUEST_SLOTS, PICTURE_ROWS):
            continue
        if axis not in (PAGES, SLOTS, FIRST_SLOTS):
            raise LayoutError(f"{leaf.path} is a pool of {axis}; what can travel are {PAGES}, {SLOTS} and {FIRST_SLOTS}")
        item, stride = shape[1:], leaf.aval.nbytes // shape[0]
        if axis == FIRST_SLOTS:
            item, axis = (item[0] - limits.slots_per_request + 1, *item[1:]), SLOTS
        dtype = str(leaf.aval.dtype).removeprefix("torch.")
        item_bytes = stride * item[0] // shape[1]
        split = any("tp" in rules.mesh_axes(name) for name in leaf.aval.axes)
        found.append(Region(leaf.path, axis, dtype, item, item_bytes, stride, shape[0], addresses[leaf.path], split))
    return tuple(found)


@dataclass(frozen=True)
class Instance:
    """What one server tells the other before anything travels.

    Attributes:
        model: digest of what decides the values in the pools: checkpoint, configuration, formats of weights.
        page_size: P.
        drafts: drafts a step; 0 without a draft head.
        tp: ranks that share the heads of a request.
        max_model_len: most tokens of a request.
        pools: regions of rank 0; those of other ranks differ in their addresses alone.
        addresses: of the pools on each rank, dp groups one after the other.

    Raises:
        LayoutError: ranks have other pools, or make no whole groups.
    """

    model: str
    page_size: int
    drafts: int
    tp: int
    max_model_len: int
    pools: tuple[Region, ...]
    addresses: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.tp < 1 or not self.addresses or len(self.addresses) % self.tp:
            raise LayoutError(f"{len(self.addresses)} ranks in groups of {self.tp}")
        if other := next((number for number, rank in enumerate(self.addresses) if len(rank) != len(self.pools)), None):
            raise LayoutError(f"rank {other} has other pools than rank 0; legal are the same ones on all ranks")

    def rank(self, number: int) -> list[Region]:
        """The regions of a rank."""
        return [region.at(address) for region, address in zip(self.pools, self.addresses[number], strict=True)]

    def group(self, number: int) -> Sequence[int]:
        """Numbers of the ranks of a dp group.

        Raises:
            LayoutError: there is no such group.
        """
        groups = len(self.addresses) // self.tp
        if not 0 <= number < groups:
            raise LayoutError(f"dp group {number}; legal are 0 to {groups - 1}")
        return range(number * self.tp, (number + 1) * self.tp)

    def item_bytes(self, axis: str) -> int:
        """Bytes of one page, or of the state of one request, in all pools: the shares of a group's ranks together, a whole pool once."""
        return sum(region.item_bytes * (self.tp if region.split else 1) for region in self.pools if region.axis == axis)

    def request_bytes(self, tokens: int) -> int:
        """Bytes that travel for a prompt of so many tokens: the pages of all but its last token, and a state."""
        return -(-(tokens - 1) // self.page_size) * self.item_bytes(PAGES) + self.item_bytes(SLOTS) if tokens > 1 else 0

    def to_json(self) -> dict[str, Any]:
        """As it is sent: the pools once, and their addresses on each rank."""
        return dict(msgspec.to_builtins(self))

    @staticmethod
    def from_json(data: bytes | msgspec.Raw | Mapping[str, Any]) -> Instance:
        """As it was sent.

        Raises:
            LayoutError: a field is missing or of another type.
        """
        try:
            return msgspec.convert(data, Instance) if isinstance(data, Mapping) else msgspec.json.decode(data, type=Instance)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise LayoutError(f"the other server describes itself in another way: {error}") from None


def located(instance: Instance, ranks: Sequence[Sequence[Region]]) -> Instance:
    """A server as it describes itself once its pools are in memory.

    Args:
        ranks: the regions of each rank (`Pools.ranks`).

    Raises:
        LayoutError: ranks have other pools.
    """
    for number, rank in enumerate(ranks):
        if [region.at(0) for region in rank] != [region.at(0) for region in ranks[0]]:
            raise LayoutError(f"rank {number} has other pools than rank 0; legal are the same ones on all ranks")
    return replace(instance, pools=tuple(ranks[0]), addresses=tuple(tuple(region.address for region in rank) for rank in ranks))


def instance_of(manifest: Manifest, source: str = "") -> Instance:
    """An artifact as a server of it describes itself, before anything is in memory: all addresses are 0.

    Args:
        source: digest of the checkpoint that is served, where the artifact was built without one.

    Raises:
        LayoutError: a pool is numbered by something that no handover knows.
    """
    mesh, rules, limits = Mesh.parse(manifest.mesh), Rules.of(manifest.rules), manifest.limits
    leaves = local_leaves(manifest.state, mesh, rules)
    pools = regions(leaves, limits, {leaf.path: 0 for leaf in leaves}, rules)
    model = _model_of(manifest, source)
    return Instance(model, limits.page_size, limits.drafts, mesh.axis("tp"), limits.max_model_len, pools, ((0,) * len(pools),) * mesh.size)


def _model_of(manifest: Manifest, source: str) -> str:
    """What decides the values in the pools, in words and as a digest; not where its checkpoint is, nor on how many ranks it runs.

    A checkpoint that has both static and dynamic scales of activations (ModelSlim's W8A8_MIX) is read by the former for decoding and by
    the latter for prefilling: its integers are the same, and the digest of the checkpoint stands for the scales.
    """
    formats, model = manifest.formats, manifest.model
    rules = [list(rule) for rule in formats.get("rules", ())]
    weights = sorted({form.removesuffix("_dynamic") for _, form in rules}) or ["float"]
    draft = {name: value for name, value in model.get("draft_model", {}).items() if name in ("config", "parts")}
    decides = {
        "config": model["config"], "family": [model["family"], model.get("family_file", {}).get("sha256")], "draft": draft,
        "checkpoint": source or manifest.source_digest, "weights": weights if formats.get("stored") else rules, "dtype": manifest.dtype,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return f"{model['family']} in {manifest.dtype}, weights {', '.join(weights)}, digest {digest[:32]}"


def check(prefill: Instance, decode: Instance) -> None:
    """Refuses a pair that cannot hand over, before the first request.

    A prefill server without a draft head has no pools of one; the other way round they travel for nothing and are refused as well, since
    nobody would notice the loss of acceptance. The numbers of dp groups may differ, those of tp ranks where each holds all of every pool.

    Raises:
        LayoutError: with both sides of every difference.
    """
    differences = [
        f"{name}: {theirs} and {ours}"
        for name, theirs, ours in (
            ("model", prefill.model, decode.model),
            ("page size", prefill.page_size, decode.page_size),
            ("draft head", bool(prefill.drafts), bool(decode.drafts)),
        )
        if theirs != ours
    ]
    split = sorted({region.name for side in (prefill, decode) if side.tp > 1 for region in side.pools if region.split})
    if split and prefill.tp != decode.tp:
        some = ", ".join(split[:3])
        differences.append(f"tensor parallel ranks: {prefill.tp} and {decode.tp}, and each holds a part of {some}")
    # What is the same on all ranks of each.
    sent, wanted = ({region.name: region.kind for region in side.pools} for side in (prefill, decode))
    for name in sorted(sent.keys() | wanted.keys()):
        if sent.get(name) != wanted.get(name):
            differences.append(f"pool {name} of a rank: {_named(sent.get(name))} and {_named(wanted.get(name))}")
    if differences:
        raise LayoutError("the prefill and the decode server differ: " + "; ".join(differences[:8]))


def _named(kind: tuple[str, str, tuple[int, ...]] | None) -> str:
    return "none" if kind is None else f"{kind[1]}{list(kind[2])} by {kind[0]}"

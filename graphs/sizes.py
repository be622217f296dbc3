"""The sizes that all stages share: Mesh, Bucket, Limits. Torch is not loaded: what lists and reads sizes starts at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .errors import SpecError

if TYPE_CHECKING:
    import torch


MESH_AXES = ("dp", "tp")
"""Legal axes of a mesh: groups that serve requests of their own, and the devices of a group."""

MANUAL_AXIS = "dp"
"""A program is written and traced for one group; only explicit regions communicate across groups."""

COORDS = "coords"
"""Name of the input by which a graph of several devices knows on which of them it runs: `Mesh.coords`."""

WORLD = "world"
"""Name of the group of all ranks; a group of ranks along an axis has the name of the axis (`axis_group`)."""

AXIS = "axis:"
"""Before the names of axes that only functions have, in names of groups."""

DISPATCH = "dispatch"
"""Name of a second group of all ranks, for backends whose expert dispatch shares its communicator with no other operator."""

FUSED_EXPERTS = "fused_experts"
"""Name of a third group of all ranks, for operators that exchange tokens of experts and compute them: their window is their own too."""


def axis_group(axis: str) -> str:
    """Name of the groups of ranks along an axis."""
    return axis if axis in MESH_AXES else f"{AXIS}{axis}"


@dataclass(frozen=True)
class Mesh:
    """Named device axes, e.g. `Mesh((("dp", 8), ("tp", 2)))`; () is one device.

    Ranks are numbered row-major over `MESH_AXES`, in whatever order a mesh lists its axes: rank = dp index * tp + tp index. So shards
    of a logical axis that is split over all ranks lie in the order of the group "world". Axes of other names, which meshes of functions
    may have, follow in their order. `Mesh.parse(str(mesh))` is the mesh.
    """

    axes: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def parse(text: str) -> Mesh:
        """Reads `dp=8,tp=2`; "1" and the empty string are one device.

        Raises:
            SpecError: on anything else.
        """
        axes: list[tuple[str, int]] = []
        for part in (piece.strip() for piece in text.split(",") if text.strip() not in ("", "1")):
            name, _, size = part.partition("=")
            if not name.isidentifier() or not (size.isascii() and size.isdecimal()) or int(size) < 1:
                raise SpecError(f"mesh {text!r}: {part!r} is not NAME=SIZE with SIZE at least 1, as in dp=8,tp=2")
            if name in dict(axes):
                raise SpecError(f"mesh {text!r}: axis {name!r} is given twice")
            axes.append((name, int(size)))
        return Mesh(tuple(axes))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def axis(self, name: str) -> int:
        """Size of one axis; an absent axis has size 1."""
        return dict(self.axes).get(name, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's index on every axis of the mesh and on every legal axis; 0 on an absent one.

        Raises:
            SpecError: when the mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise SpecError(f"rank {rank} of mesh {self}; legal is 0 to {self.size - 1}")
        return {name: rank // stride % size for name, (stride, size) in self._strides().items()}

    @property
    def complete(self) -> Mesh:
        """The same devices on all axes that their numbers are made of: `MESH_AXES`, also those of size 1, then axes of other names."""
        return Mesh(tuple((name, size) for name, (_, size) in self._strides().items()))

    def coords(self, rank: int) -> torch.Tensor:
        """A rank's coordinates on the axes of `complete`, [number of axes] i32: the value of the input `coords` of a graph."""
        import torch

        return torch.tensor(list(self.coordinates(rank).values()), dtype=torch.int32)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of a name that a rank belongs to, in the order of their index on the axis.

        Args:
            name: of `axis_group`, "world", "dispatch" or "fused_experts"; a group along an absent axis is the rank alone.
            rank: 0 to size - 1.
        """
        if name in (WORLD, DISPATCH, FUSED_EXPERTS):
            return tuple(range(self.size))
        stride, size = self._strides().get(name.removeprefix(AXIS), (1, 1))
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, names: Iterable[str] = ()) -> dict[str, tuple[tuple[int, ...], ...]]:
        """All groups of these names; without names, of one name per axis and "world"."""
        names = tuple(names) or (*map(axis_group, self._strides()), WORLD)
        return {name: tuple(dict.fromkeys(self.group(name, rank) for rank in range(self.size))) for name in names}

    def _strides(self) -> dict[str, tuple[int, int]]:
        """Of every axis the distance between neighbouring ranks and the size; absent legal axes have size 1."""
        strides, stride = {}, self.size
        for name in dict.fromkeys((*MESH_AXES, *(name for name, _ in self.axes))):
            stride //= self.axis(name)
            strides[name] = (stride, self.axis(name))
        return strides

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "1"


PICTURE_ROWS = "picture_rows"
"""Logical axis of pools of rows of pictures, which encode buckets write and others read."""


@dataclass(frozen=True, order=True)
class Bucket:
    """One static graph size: `batch` requests (B) of `q_len` new tokens (Q) each, or of `encode` segments of patches of pictures."""

    kind: str
    batch: int
    q_len: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.q_len < 1:
            raise SpecError(f"bucket {self.kind}/{self.batch}/{self.q_len}: sizes are at least 1")

    @property
    def tokens(self) -> int:
        """T: tokens in the step, padding included."""
        return self.batch * self.q_len

    @property
    def name(self) -> str:
        return f"{self.kind}-b{self.batch}-q{self.q_len}"


WORD_BITS = 32
"""Tokens per word of a bitmask, the lowest bit first, as XGrammar and llguidance fill them."""


@dataclass(frozen=True)
class Limits:
    """Sizes fixed at build time that programs, memory plan and runtime share.

    Page 0 and slot 0 are null: padding rows read and write them, no request ever owns them.

    Attributes:
        page_size: P, tokens per KV page.
        num_pages: pages in each KV pool, the null page included.
        num_slots: recurrent-state slots in each state pool, the null slot included.
        max_model_len: most tokens (prompt and output) of one request; a multiple of page_size.
        slots_per_request: one slot per candidate token of a decode step, k+1; 1 where requests are only prefilled.
        drafts: k, tokens drafted for each request in a step; 0 drafts none.
        bitmasks: C, rows of a step whose output a bitmask may restrict; 0 restricts none.
        bitmask_words: words that cover the vocabulary, where there are bitmasks.
        logit_adjustments: A, adjustments of logits that a step takes; 0 takes none. A row has up to two.
        adjusted_tokens: V, where there are adjustments.
        checkpoint_slots: slots of num_slots that no request in flight needs, for the states after prefixes that are kept.
        picture_rows: R, rows of pictures that are kept for prompts, the null row included; 0 takes no pictures.
    """

    page_size: int
    num_pages: int
    num_slots: int
    max_model_len: int
    slots_per_request: int = 1
    drafts: int = 0
    bitmasks: int = 0
    bitmask_words: int = 0
    logit_adjustments: int = 0
    adjusted_tokens: int = 0
    checkpoint_slots: int = 0
    picture_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "num_slots", "max_model_len", "slots_per_request"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}; it is at least 1")
        if self.drafts < 0 or self.slots_per_request not in (1, self.drafts + 1):
            raise SpecError(
                f"{self.slots_per_request} slots per request and {self.drafts} drafts; legal are at least 0 drafts, and one slot more than "
                "drafts or, where requests are only prefilled, 1"
            )
        if self.bitmasks < 0 or (self.bitmasks > 0) != (self.bitmask_words > 0):
            sizes = f"{self.bitmasks} bitmasks of {self.bitmask_words} words"
            raise SpecError(f"{sizes}; legal is at least 1 of both, or 0 of both")
        if self.logit_adjustments < 0 or (self.logit_adjustments > 0) != (self.adjusted_tokens > 0):
            sizes = f"{self.logit_adjustments} adjustments of {self.adjusted_tokens} logits"
            raise SpecError(f"{sizes}; legal is at least 1 of both, or 0 of both")
        if self.picture_rows < 0 or self.picture_rows == 1:
            raise SpecError(f"{self.picture_rows} rows of pictures; legal is at least 2, of which one is the null row, or 0")
        if not 0 <= self.checkpoint_slots < self.num_slots:
            raise SpecError(
                f"{self.checkpoint_slots} of {self.num_slots} state slots are for checkpoints; legal is 0 to {self.num_slots - 1}"
            )
        if self.max_model_len % self.page_size:
            raise SpecError(f"max_model_len {self.max_model_len} is not a multiple of page_size {self.page_size}")

    def with_bitmasks(self, rows: int, vocab_size: int) -> Limits:
        """The same with bitmasks over a vocabulary for so many rows of a step; 0 is none."""
        return replace(self, bitmasks=rows, bitmask_words=-(-vocab_size // WORD_BITS) if rows else 0)

    def with_adjustments(self, rows: int, vocab_size: int) -> Limits:
        """The same with so many adjustments of the logits of a vocabulary in a step; 0 is none."""
        return replace(self, logit_adjustments=rows, adjusted_tokens=vocab_size if rows else 0)

    @property
    def pages_per_request(self) -> int:
        """N: length of a request's page table row."""
        return self.max_model_len // self.page_size

    @property
    def num_request_slots(self) -> int:
        """Requests in flight, plus the null request slot 0."""
        return (self.num_slots - 1 - self.checkpoint_slots) // self.slots_per_request + 1

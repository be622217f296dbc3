"""Legal steps of an artifact's buckets, planned ahead: a graph finds tokens and positions of decode rows in its request slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ....graphs.steps import request_slot
from ....graphs.steps.table import kind_of
from ....graphs.types import Bucket, Leaf, Limits, Mesh
from ....lowering.artifact.artifact import Artifact
from ....runtime.request import Sampling
from ....runtime.steps.pack import pack
from ....runtime.steps.rows import DecodeRow, PrefillRow, Row
from ...agreement.pools import FreePlaces, PoolPlaces, is_request_slots

Arrays = Mapping[str, npt.NDArray[Any]]
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.95)


@dataclass(frozen=True)
class PlannedStep:
    """One step of all dp groups.

    Attributes:
        inputs: of each group, by name; without the rank's coordinates.
        rows: requests of the live rows, in order; the same for all groups.
    """

    bucket: Bucket
    inputs: tuple[Arrays, ...]
    rows: tuple[PoolPlaces, ...]

    @property
    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """The inputs as tensors over the same memory."""
        return [{name: torch.from_numpy(array) for name, array in arrays.items()} for arrays in self.inputs]


@dataclass
class StepPlanner:
    """Plans steps; every request has pages for the longest context, so that nothing depends on what the device computes.

    Args:
        vocab: V.
        groups: dp groups; each has prompts of its own.
        max_logprobs: as of the graphs.
    """

    limits: Limits
    vocab: int
    groups: int = 1
    max_logprobs: int = 0
    seed: int = 0
    generator: np.random.Generator = field(init=False)

    @classmethod
    def of(cls, artifact: Artifact) -> StepPlanner:
        """That of an artifact."""
        manifest = artifact.manifest
        most = max((entry.max_logprobs for entry in manifest.graphs), default=0)
        return cls(manifest.limits, int(manifest.model["vocab_size"]), Mesh.parse(manifest.mesh).axis("dp"), most)

    def __post_init__(self) -> None:
        self.generator = np.random.default_rng(self.seed)

    @property
    def requests(self) -> list[PoolPlaces]:
        """As many requests as pages and slots suffice for, at shuffled places."""
        free, each, width = FreePlaces(self.limits, self._seeded), self.limits.pages_per_request, self.limits.slots_per_request
        most = min(len(free.pages) // each, len(free.slots) // width, len(free.request_slots))
        places = [(free.pages[i * each : (i + 1) * each], free.slots[i * width : (i + 1) * width]) for i in range(most)]
        return [PoolPlaces(pages, slots, free.request_slots[i]) for i, (pages, slots) in enumerate(places)]

    @property
    def _seeded(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def rows_of(self, bucket: Bucket) -> list[PoolPlaces]:
        """The requests that a bucket's steps run: one less than it holds, so that there is a row of padding."""
        return self.requests[: max(1, bucket.batch - 1)]

    def prefill(self, bucket: Bucket, rows: Sequence[PoolPlaces], start: int, count: int) -> PlannedStep:
        """A chunk of `count` tokens of each row, from position `start` on."""

        def chunk(i: int, row: PoolPlaces, _: int) -> Row:
            own = row.pages, row.slots[0], row.request_slot
            return PrefillRow(self._tokens(count), start, *own, -1, _sampling(i), float(self.generator.random()))

        return self._planned(bucket, rows, chunk)

    def decode(self, bucket: Bucket, rows: Sequence[PoolPlaces], base: int) -> PlannedStep:
        """A step of each row, which starts at position `base` or behind it; rows verify different numbers of drafts."""
        Q = bucket.q_len

        def candidates(i: int, row: PoolPlaces, group: int) -> Row:
            drafts = Q - 1 if (i + group) % 3 else max(0, Q - 2)
            uniforms = [float(u) for u in self.generator.random(self.limits.drafts + Q, dtype=np.float32)]
            return DecodeRow(row.request_slot, base, row.pages, row.slots, drafts, _sampling(i), uniforms)

        return self._planned(bucket, rows, candidates)

    def _planned(self, bucket: Bucket, rows: Sequence[PoolPlaces], row_of: Callable[[int, PoolPlaces, int], Row]) -> PlannedStep:
        packed = [[row_of(i, row, group) for i, row in enumerate(rows)] for group in range(self.groups)]
        inputs = (pack(bucket, own, self.limits, max_logprobs=self.max_logprobs) for own in packed)
        return PlannedStep(bucket, tuple(inputs), tuple(rows))

    def of_one_bucket(self, bucket: Bucket, count: int) -> list[PlannedStep]:
        """Steps of one bucket after each other; a prefill goes on from its last chunk, or begins again where the context is full."""
        rows, steps, start, longest = self.rows_of(bucket), [], 0, self.limits.max_model_len
        if kind_of(bucket).decodes:
            return [self.decode(bucket, rows, self.first_decode + i) for i in range(count)]
        for i in range(count):
            tokens = max(1, bucket.q_len - (i * 3) % max(1, bucket.q_len // 2))
            start = 0 if start + tokens > longest else start
            steps.append(self.prefill(bucket, rows, start, tokens))
            start += tokens
        return steps

    @property
    def first_decode(self) -> int:
        """Position at which decode rows start that no prefill came before: behind a page and a part of one, where the context allows."""
        return min(self.limits.page_size + 3, self.limits.max_model_len // 4)

    def initial_state(self, leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        """Pools in which every request is behind a prompt of `first_decode` tokens: random values, as if computed elsewhere."""
        generator, pools = self._seeded, []
        for leaf in leaves:
            if is_request_slots(leaf):
                pools.append(torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype))
                for i, own in enumerate(self.requests):
                    tokens, accepted = self._tokens(1 + self.limits.drafts), i % self.limits.slots_per_request
                    pools[-1][own.request_slot] = request_slot.start(self.first_decode, tokens, self.limits, accepted=accepted)
            else:
                pools.append((0.3 * torch.randn(leaf.aval.shape, generator=generator)).to(leaf.aval.dtype))
        return pools

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.generator.integers(0, self.vocab, count)]


def _sampling(row: int) -> Sampling:
    """Every third row samples, the others are greedy."""
    return SAMPLED if row % 3 == 1 else Sampling()

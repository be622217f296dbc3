"""Time of a decode step on a CPU, from what its graph computes and reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import GraphEntry, Manifest
from ..bench.step import needed_bytes
from .products import Array, both

NORM = 3.0
"""Of waiting for weights and arithmetic: 1 is their sum. Of benches of two models, the largest error is 24.9 % with 1, 15.4 with 2 and 14.4
with 3 and with 6, which however predicts the smallest buckets too fast."""


@dataclass(frozen=True)
class ReadRates:
    """How fast this machine reads buffers by their size: what no cache holds comes from memory. As the bench measured it.

    Attributes:
        points: (bytes of a buffer, bytes/s), by size; between two of them the rate goes with the logarithm of the size.
    """

    points: Sequence[tuple[float, float]]

    def of(self, nbytes: float) -> float:
        """Bytes/s of a buffer, or of a step that reads so many bytes in all."""
        sizes, rates = (np.asarray(column, dtype=float) for column in zip(*sorted(self.points), strict=True))
        return float(np.interp(math.log(max(nbytes, 1.0)), np.log(sizes), rates))


@dataclass(frozen=True)
class StepLaw:
    """Seconds of a decode step on a CPU.

    Products wait for their weights or for the arithmetic of all rows of the bucket, padding included. A step has products of both
    kinds, so the maximum is a smooth one (a 3-norm). Weights take what reading as many bytes takes.
    Attention reads the keys and values of live rows, and computes with them while it does.

    Attributes:
        rates: of reading.
        fixed: seconds that every step takes: starting operators, and what is as small in every bucket.
        per_flop: seconds of an operation.
        keys: how many times as long as reading them attention over keys and values takes.
    """

    manifest: Manifest
    rates: ReadRates
    fixed: float
    per_flop: float
    keys: float

    def seconds(self, entry: GraphEntry, rows: int, context: int) -> float:
        """Of a step with so many live rows, whose requests have so many cached tokens."""
        weights, keys, flops = _parts(self.manifest, self.rates, entry, rows, context)
        return self.fixed + float(both(weights, self.per_flop * flops, NORM)) + self.keys * keys

    @staticmethod
    def fit(manifest: Manifest, points: Sequence[tuple[GraphEntry, int, float]], rates: ReadRates) -> StepLaw:
        """The law that misses steps (bucket, context, seconds) with every row live least, relative to each; no part is negative.

        Raises:
            SpecError: fewer than two points.
        """
        if len(points) < 2:
            raise SpecError(f"{len(points)} measured steps; legal is at least two")
        parts = [_parts(manifest, rates, entry, entry.bucket.batch, context) for entry, context, _ in points]
        weights, keys, flops = (np.asarray(column) for column in zip(*parts, strict=True))
        seconds = np.asarray([each for *_, each in points])
        columns = np.stack([np.ones_like(seconds), keys], axis=1) / seconds[:, None]

        def of(per_flop: float) -> tuple[float, Array]:
            return non_negative(columns, 1 - both(weights, per_flop * flops, NORM) / seconds)

        # One unknown is not linear: it is searched on a grid that gets finer.
        best, step = float((seconds / flops).min()) * 1e-2, 1e-2 ** (-1 / 60)
        candidates = [best * step**i for i in range(61)]
        for _ in range(4):
            best = min(candidates, key=lambda candidate: of(candidate)[0])
            candidates = [best * step ** (i / 10) for i in range(-10, 11)]
            step **= 0.1
        fixed, per_key = of(best)[1].tolist()
        return StepLaw(manifest, rates, fixed, best, per_key)


def _parts(manifest: Manifest, rates: ReadRates, entry: GraphEntry, rows: int, context: int) -> tuple[float, float, float]:
    """Seconds of reading the weights and states of a step, and its keys and values; and its operations."""
    weights = needed_bytes(manifest, entry, -entry.bucket.q_len)
    keys = (needed_bytes(manifest, entry, context) - weights) * rows / entry.bucket.batch
    rate = rates.of(weights + keys)
    return weights / rate, keys / rate, float(entry.cost["flops"])


def non_negative(columns: Array, target: Array) -> tuple[float, Array]:
    """The least squares of `columns @ x - target` over x without negative entries, and x: few columns have few sets of entries that are
    not zero, and all are tried."""
    count = columns.shape[1]
    best, found = float((target**2).sum()), np.zeros(count)
    units = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    for used in itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in range(1, count + 1)):
        some, *_ = np.linalg.lstsq(columns[:, used] / units[list(used)], target, rcond=None)
        whole = np.zeros(count)
        whole[list(used)] = some / units[list(used)]
        miss = float(((columns @ whole - target) ** 2).sum())
        if (some >= 0).all() and miss < best - 1e-15:
            best, found = miss, whole
    return best, found

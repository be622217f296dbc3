"""Test cases of encode steps, in which nothing that no live segment may read is the same twice.

Patches are bytes, of which none is NaN: a case is made twice with other bytes in padding, one for the reference and one for what is
compared with it. The pool is NaN but for rows that the step writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...graphs.types import Bucket, Signature
from .compare import Differences
from .pools import NAN
from .tolerances import Measure

Step = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""An executable, or what runs one step otherwise: operands to results."""

PADDINGS = (0, 255)
"""Bytes of padding of a case for the reference, and for what is compared with it."""


@dataclass(frozen=True)
class EncodeStep:
    """A test case.

    Attributes:
        pool: of rows of pictures, before the step.
        inputs: by name.
        places: live segment -> rows of the pool that it is written to.
    """

    pool: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    places: Mapping[int, list[int]]

    @property
    def written(self) -> list[int]:
        """Rows of the pool that live segments write."""
        return [row for rows in self.places.values() for row in rows]


def poisoned_encode(bucket: Bucket, signature: Signature, live: int, seed: int, padding: int) -> EncodeStep:
    """A step with `live` random segments at random places, the first of them as long as the bucket; equal but for padding for one seed.

    Args:
        padding: what its patches are.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {leaf.path: torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in signature.inputs}
    inputs["patches"] += padding
    (pool,) = (torch.full(leaf.aval.shape, NAN, dtype=leaf.aval.dtype) for leaf in signature.state)
    free = [1 + int(row) for row in torch.randperm(len(pool) - 1, generator=generator)]
    places: dict[int, list[int]] = {}
    most = inputs["picture_rows"].shape[1]
    merge = math.isqrt(bucket.q_len // most)
    for segment in torch.randperm(bucket.batch, generator=generator)[:live].tolist():
        rows = next(size for size in range(math.isqrt(most), 0, -1) if most % size == 0)
        columns = most // rows
        if places:
            rows = int(torch.randint(1, most + 1, (), generator=generator))
            columns = int(torch.randint(1, most // rows + 1, (), generator=generator))
        count, shape = rows * columns, (rows * columns * merge**2, inputs["patches"].shape[-1])
        inputs["patches"][segment, : shape[0]] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        inputs["grids"][segment] = torch.tensor([rows * merge, columns * merge])
        places[segment], free = free[:count], free[count:]
        inputs["picture_rows"][segment, :count] = torch.tensor(places[segment])
    return EncodeStep(pool, inputs, places)


def encoded(executable: Step, params: Sequence[torch.Tensor], case: EncodeStep, signature: Signature) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `finite` [B] and the pool after a step."""
    pool = case.pool.clone()
    (finite,) = executable([*params, pool, *(case.inputs[leaf.path] for leaf in signature.inputs)])
    return finite, pool


def encode_differences(case: EncodeStep, expected: torch.Tensor, finite: torch.Tensor, pool: torch.Tensor, measure: Measure) -> Differences:
    """How far a run is from the pool that a step leaves; infinitely where it writes another row, or says that one is not finite."""
    others = sorted({*range(1, len(pool))} - {*case.written})
    right = bool(pool[others].isnan().all()) and bool((finite[list(case.places)] == 1).all())
    error = measure([(expected[case.written], pool[case.written])]) if right else math.inf
    return Differences((), (error,) * len(case.places))


def compare_encode(
    reference: Step,
    candidate: Step,
    params: Sequence[torch.Tensor],
    cases: tuple[EncodeStep, EncodeStep],
    signature: Signature,
    measure: Measure,
) -> Differences:
    """Differences of two executables, each on a case of its own that differs in padding alone."""
    _, expected = encoded(reference, params, cases[0], signature)
    return encode_differences(cases[1], expected, *encoded(candidate, params, cases[1], signature), measure)

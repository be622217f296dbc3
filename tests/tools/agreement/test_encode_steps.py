"""tools/agreement/encode_steps.py: a step that reads padding, or writes what is not its own, agrees with nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from npucompile.graphs.types import PICTURE_ROWS, Aval, Bucket, Leaf, Signature
from npucompile.tools.agreement.compare import Differences
from npucompile.tools.agreement.encode_steps import PADDINGS, compare_encode, poisoned_encode
from npucompile.tools.agreement.tolerances import difference

BUCKET = Bucket("encode", 3, 24)
SIGNATURE = Signature(
    (),
    (Leaf("state.picture_pool", Aval((20, 1, 1, 2), torch.float32, (PICTURE_ROWS, None, None, None))),),
    (
        Leaf("inputs.patches", Aval((3, 24, 5), torch.uint8)),
        Leaf("inputs.grids", Aval((3, 2), torch.int32)),
        Leaf("inputs.picture_rows", Aval((3, 6), torch.int32)),
    ),
    (Leaf("outputs.finite", Aval((3,), torch.int32)),),
)


class Mean:
    """Writes the mean of a segment's patches to each of its rows."""

    backend = "toy"

    def __init__(self, own: bool = True, stray: int = 0, finite: int = 1) -> None:
        self.own, self.stray, self.finite = own, stray, finite

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pool, patches, grids, places = operands
        for segment, (height, width) in enumerate(grids.tolist()):
            count = height * width
            if count:
                pool[places[segment, : count // 4].long()] = patches[segment, : count if self.own else None].float().mean()
        if self.stray:
            pool[(pool.isnan().flatten(1).any(1).nonzero().flatten()[-1]).item()] = 1.0
        return [torch.full((3,), self.finite, dtype=torch.int32)]


def differences(candidate: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], live: int = 2) -> Differences:
    one, other = (poisoned_encode(BUCKET, SIGNATURE, live, 5, padding) for padding in PADDINGS)
    return compare_encode(Mean(), candidate, (), (one, other), SIGNATURE, difference)  # type: ignore[arg-type]


def test_what_reads_its_own_patches_agrees() -> None:
    assert differences(Mean()) == Differences((), (0.0,) * 2)
    assert differences(Mean(), live=3) == Differences((), (0.0,) * 3)


@pytest.mark.parametrize(("wrong", "at_least"), [(Mean(own=False), 0.01), (Mean(stray=1), math.inf), (Mean(finite=0), math.inf)])
def test_what_does_not_differs(wrong: Mean, at_least: float) -> None:
    assert differences(wrong).state[0] >= at_least


def test_the_first_segment_fills_the_bucket() -> None:
    case = poisoned_encode(BUCKET, SIGNATURE, 1, 0, 255)
    ((segment, rows),) = case.places.items()
    assert case.inputs["grids"][segment].tolist() == [4, 6]
    assert len(rows) == 6
    assert sum(case.inputs["grids"].flatten().tolist()) == 10

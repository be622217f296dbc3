"""The program of an encode bucket: patches of pictures -> rows in the pool that prompts read (models/step.py).

Each rank of a group runs all segments of a step. To share four of 1,024 patches between two ranks would save half of 4.0 TFLOP in the tower
of the 397B, some 10 ms at half the rate of a die of an Ascend 910C, and gather 8 MB, in a tenth of one: worth it where steps have a segment
a rank, which one picture, what a first token waits for most of the time, does not.
"""

from __future__ import annotations

from typing import Any

import torch

from ..graphs import ops
from ..graphs.errors import SpecError
from ..graphs.steps.kind import SegmentSizes
from ..graphs.steps.table import StepInputs, kind_of
from ..graphs.types import Bucket, Limits, Program, Tree
from .family import Tower
from .params import avals
from .quant.declare import stored
from .step import PICTURES, Model


def params(model: Model, cfg: Any, dtype: torch.dtype) -> Tree:
    """Tree of Param that encode programs read, under the tower's key.

    Args:
        cfg: configuration of the tower (`Tower.read_config`), with the variant that a deployment stores it in.

    Raises:
        SpecError: the model's family has no tower.
    """
    tower = _tower(model)
    return {tower.key: stored(tower.abstract_params(cfg, dtype), cfg.variant)}


def _tower(model: Model) -> Tower[Any]:
    if model.family.tower is None:
        raise SpecError(f"{model.name} is of the family {model.family.name}, which has no vision tower; legal is a family with one")
    return model.family.tower


def program(model: Model, cfg: Any, bucket: Bucket, limits: Limits, dtype: torch.dtype) -> Program:
    """The program of B segments of N patches: `(params, state, inputs) -> (outputs, state)`.

    Inputs are those of graphs/steps/encode.py. Outputs: `finite` [B] i32, 0 where a row of a segment is not finite: a request with it
    fails, as one does whose logits are not.

    Args:
        cfg: as of `params`.

    Raises:
        SpecError: the family has no tower, the limits no rows, or N no whole number of rows.
    """
    tower = _tower(model)
    if not kind_of(bucket).tower or bucket.q_len % cfg.merged:
        raise SpecError(f"{bucket.name}: legal are encode buckets of a multiple of {cfg.merged} patches")
    if not limits.picture_rows:
        raise SpecError(f"{bucket.name}, and no rows of pictures are kept; legal is at least 2")

    def forward(params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        rows = tower.encode(cfg, params[tower.key], {**inputs, "patches": tower.normalised(cfg, inputs["patches"], dtype)})
        places = inputs["picture_rows"]
        pool = ops.paged_write(state[PICTURES], rows.flatten(0, 1)[:, None], places.reshape(-1))
        # What is not finite has a difference to itself; a sum shows it, whatever a maximum makes of it (ops/sample.py).
        differences = (rows - rows).sum(-1)
        broken = (differences != differences) & (places > 0)
        finite = broken.to(torch.int32).sum(-1, dtype=torch.int32) == 0
        return {"finite": finite.to(torch.int32)}, {**state, PICTURES: pool}

    inputs = StepInputs(bucket, limits, segments=SegmentSizes(cfg.patch_dim, cfg.merged)).avals()
    state = {PICTURES: model.state(limits, dtype)[PICTURES]}
    return Program(f"{model.name}/{bucket.name}", bucket, forward, avals(params(model, cfg, dtype)), state, inputs)

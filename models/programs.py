"""The programs of all kinds of buckets of a model, and the parameters and state that these share."""

from __future__ import annotations

from typing import Any

import torch

from ..graphs import tree
from ..graphs.steps.table import kind_of
from ..graphs.types import Bucket, Limits, Program, Signature, Tree
from . import encode_step, step
from .params import avals


def program(model: step.Model, bucket: Bucket, limits: Limits, dtype: torch.dtype, **emitted: Any) -> Program:
    """The program of a bucket: that of models/encode_step.py or of models/step.py, whose `program` says what they take and raise.

    Args:
        emitted: `emit_logits` and `max_logprobs` of `step.program`.
    """
    if kind_of(bucket).tower:
        return encode_step.program(model, model.tower, bucket, limits, dtype)
    return step.program(model, bucket, limits, dtype, **emitted)


def params(model: step.Model, dtype: torch.dtype) -> Tree:
    """Tree of Param that programs of any kind read: the language model's, and the tower's behind them."""
    return model.params(dtype) | (encode_step.params(model, model.tower, dtype) if model.tower is not None else {})


def leaves(model: step.Model, limits: Limits, dtype: torch.dtype) -> Signature:
    """Parameters and state of all buckets, as an artifact has them; no inputs and no outputs."""
    state = tree.leaves("state", model.state(limits, dtype))
    return Signature(tree.leaves("params", avals(params(model, dtype))), state, (), ())

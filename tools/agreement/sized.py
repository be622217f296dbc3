"""Executables that take any size, at the sizes at which they serve: no rows of padding, no columns beyond the longest chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...graphs.steps.table import StepInputs, kind_of
from ...graphs.types import Bucket, Leaf, Limits, Signature
from ...lowering.executable import Executable
from ...runtime.steps.resized import resized


class LiveRows:
    """Runs the live rows of a bucket's step as a step of these rows, whose chunks are as long as the longest of them."""

    def __init__(self, executable: Executable, bucket: Bucket, signature: Signature, limits: Limits) -> None:
        self.backend = executable.backend
        self._executable, self._bucket, self._limits = executable, bucket, limits
        self._shared = len(signature.params) + len(signature.state)
        self._inputs = [leaf.path for leaf in signature.inputs]
        self._outputs = [leaf.aval for leaf in signature.outputs]

    def __call__(self, operands: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Outputs of the batch; rows of padding are zero."""
        inputs = {name: operand.numpy() for name, operand in zip(self._inputs, operands[self._shared :], strict=True)}
        rows = inputs["request_slots"].nonzero()[0].tolist()
        kind = kind_of(self._bucket)
        longest = max(int(inputs["query_lens"].max()), kind.least) if kind.ragged else self._bucket.q_len
        sizes = StepInputs(kind.bucket(len(rows), longest), self._limits, "logprobs" in inputs)
        own = resized(inputs, rows, sizes)
        values = self._executable([*operands[: self._shared], *(torch.from_numpy(own[name]) for name in self._inputs)])
        if len(rows) == self._bucket.batch:
            return values
        results = [torch.zeros(aval.shape, dtype=aval.dtype) for aval in self._outputs]
        for result, value in zip(results, values, strict=True):
            # Outputs may be as wide as these chunks.
            wide: tuple[Any, ...] = rows, *map(slice, value.shape[1:])
            result[wide] = value
        return results


def signature_of(bucket: Bucket, signature: Signature, limits: Limits) -> Signature:
    """The signature of an executable at other sizes than those of the bucket that this one is of."""
    shapes = {field.name: shape for field, shape in StepInputs(bucket, limits).shapes([leaf.path for leaf in signature.inputs])}

    def sized(leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
        return replace(leaf, aval=replace(leaf.aval, shape=shape))

    inputs = tuple(sized(leaf, shapes[leaf.path]) for leaf in signature.inputs)
    outputs = tuple(sized(leaf, (bucket.batch, *leaf.aval.shape[1:])) for leaf in signature.outputs)
    return replace(signature, inputs=inputs, outputs=outputs)

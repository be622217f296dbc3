"""The reference run: a model's steps on one device in float32, with the logits of its draft head among the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...graphs.ir.trace import call_flat, signature_of
from ...graphs.types import Bucket, Leaf, Limits, Tree
from ...models import step
from ...models.family import Family

DRAFT_LOGITS = "draft_logits"
"""Name of the draft head's logits among a step's outputs."""


class ReferenceRun:
    """A model called as it is written, on one device in float32; nothing is traced, rewritten or lowered.

    Args:
        params: in the order of the model's flattened parameters.
        max_logprobs: number of most likely tokens whose log probabilities a step returns.
    """

    def __init__(self, model: step.Model, limits: Limits, params: Sequence[torch.Tensor], max_logprobs: int = 0) -> None:
        self._draft_logits: list[torch.Tensor] = []
        self._model = replace(model, family=_recording(model.family, self._draft_logits))
        self._limits, self._params, self._max_logprobs = limits, list(params), max_logprobs

    def leaves(self, bucket: Bucket) -> tuple[Leaf, ...]:
        """Leaves of the state, which are the same for all buckets."""
        return signature_of(self._program(bucket)).state

    def step(
        self, bucket: Bucket, state: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """One step of a bucket.

        Args:
            state: pools, which stay as they are.
            inputs: by name (graphs/steps/).

        Returns:
            Outputs by name, with `draft_logits` [B, k, V] where drafts are made; and the new pools.
        """
        program = self._program(bucket)
        self._draft_logits.clear()
        with torch.no_grad():
            flat, leaves = call_flat(program, signature_of(program), [*self._params, *state, *(inputs[name] for name in program.inputs)])
        outputs = dict(zip((leaf.path for leaf in leaves), flat, strict=False))
        if self._draft_logits:
            outputs[DRAFT_LOGITS] = torch.stack(self._draft_logits, 1)
        return outputs, flat[len(leaves) :]

    def _program(self, bucket: Bucket) -> Any:
        return step.program(self._model, bucket, self._limits, torch.float32, max_logprobs=self._max_logprobs)


def _recording(family: Family[Any], records: list[torch.Tensor]) -> Family[Any]:
    """A family that appends its draft head's logits [B, V] to `records`, draft by draft."""
    head = family.draft_head
    if head is None:
        return family
    logits_of = head.logits

    def logits(cfg: Any, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
        records.append(logits_of(cfg, params, hidden))
        return records[-1]

    return replace(family, draft_head=replace(head, logits=logits))

"""Turns a model into its steps on one device, called as they are written, with what its draft head thought beside what it said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from ...graphs.ir.trace import call_flat, signature_of
from ...graphs.types import Bucket, Leaf, Limits, Tree
from ...models import step

THOUGHT = "draft_logits"
"""Name of the draft head's logits among a step's outputs."""


class Alone:
    """One device with a model's parameters, in float32; nothing is traced, rewritten or lowered.

    Args:
        params: flat, in the order of the model's parameters.
        max_logprobs: of how many tokens log probabilities are told.
    """

    def __init__(self, model: step.Model, limits: Limits, params: Sequence[torch.Tensor], max_logprobs: int = 0) -> None:
        self._family = _Listening(model.family)
        self._model = replace(model, family=self._family)
        self._limits, self._params, self._max_logprobs = limits, list(params), max_logprobs

    def leaves(self, bucket: Bucket) -> tuple[Leaf, ...]:
        """State pools, the same for all buckets."""
        return signature_of(self._program(bucket)).state

    def step(
        self, bucket: Bucket, state: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """One step of a bucket.

        Args:
            state: pools, which stay as they are.
            inputs: by name, as `models.batch.abstract_inputs` lists them.

        Returns:
            outputs by name, with `draft_logits` [B, k, V] where drafts are made; and the new pools.
        """
        program = self._program(bucket)
        self._family.heard.clear()
        with torch.no_grad():
            flat, told = call_flat(program, signature_of(program), [*self._params, *state, *(inputs[name] for name in program.inputs)])
        outputs = dict(zip((leaf.path for leaf in told), flat, strict=False))
        if self._limits.drafts:
            outputs[THOUGHT] = torch.stack(self._family.heard, 1)
        return outputs, flat[len(told) :]

    def _program(self, bucket: Bucket) -> Any:
        return step.program(self._model, bucket, self._limits, torch.float32, max_logprobs=self._max_logprobs)


class _Listening(ModuleType):
    """A family whose draft head is heard.

    Attributes:
        heard: logits [B, V] of each draft since it was cleared.
    """

    def __init__(self, family: ModuleType) -> None:
        super().__init__(family.__name__)
        self.__dict__.update(vars(family))
        self.heard: list[torch.Tensor] = []

        def draft_head(cfg: Any, params: Tree, hidden: torch.Tensor) -> torch.Tensor:
            self.heard.append(family.draft_head(cfg, params, hidden))
            return self.heard[-1]

        self.draft_head = draft_head

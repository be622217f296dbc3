"""Finds the scales of activations that one scale for all tokens needs, by running the float model over a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...graphs import tree
from ...graphs.errors import SpecError
from ...graphs.types import Tree
from ...models.step import Model
from ..progress import Progress
from .forward import logits
from .layout import Activations

WINDOW_TOKENS = 512
MOST_WINDOWS = 128
"""Of a longer text only the beginning is run; recipes of ModelSlim 26.1.0 have about as many samples."""


class _Observer(TorchDispatchMode):
    """Keeps the least and the largest number that each matrix is multiplied by.

    Args:
        matrices: their tensors, by name.
    """

    def __init__(self, matrices: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in matrices.items()}
        self.ranges: dict[str, tuple[float, float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "npuc" and isinstance(args[0], torch.Tensor):
            for other in args[1:]:
                if isinstance(other, torch.Tensor) and (name := self._names.get(other.untyped_storage().data_ptr())):
                    self._observe(name, args[0])
        return func(*args, **(kwargs or {}))

    def _observe(self, name: str, x: torch.Tensor) -> None:
        least, largest = (float(value) for value in x.aminmax())
        low, high = self.ranges.get(name, (0.0, 0.0))
        self.ranges[name] = min(low, least), max(high, largest)


def calibrated(
    model: Model, params: Tree, batches: Sequence[torch.Tensor], wanted: Mapping[str, str], progress: Progress
) -> dict[str, Activations]:
    """Scale and offset of the activations of each wanted matrix.

    Args:
        model: float.
        params: its tensors.
        batches: tokens [B, Q] int32.
        wanted: paths of matrices in the tree, and their names in a checkpoint.

    Raises:
        SpecError: a matrix is not the second operand of a product.
    """
    leaves = dict(tree.flatten(params))
    observer = _Observer({path: leaves[path] for path in wanted if path in leaves})
    with progress.bar("calibrating", len(batches)) as bar:
        for tokens in batches:
            with observer:
                logits(model, params, tokens, torch.float32)
            bar.step(f"{tokens.numel()} tokens")
    if missing := [name for path, name in wanted.items() if path not in observer.ranges]:
        raise SpecError(
            f"{missing[0]} can have no scale for all tokens: the calibration ran no product of it, nor of {len(missing) - 1} more; "
            "legal is to --keep what a draft head multiplies by"
        )
    return {path: Activations.of_range(*observer.ranges[path]) for path in wanted}

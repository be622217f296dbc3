"""The layout of a model on a mesh: which mesh axes each logical axis is split over."""

from __future__ import annotations

from typing import Any

from ..graphs.errors import PartitionError
from ..graphs.steps.table import kind_of
from ..graphs.types import Bucket, Mesh, Rules
from . import expert_placement
from .context_parallel import AXIS as SLICES


def rules(
    mesh: Mesh, *, experts: int = 0, expert_parallel: bool = True, tokens: int = 0, sliced: bool = False, chunks: bool = True
) -> Rules:
    """The layout of a model on a mesh.

    Heads, feed-forward channels and the vocabulary are split over `tp`. With expert parallelism whole experts are spread over all
    devices, and the residual stream is split by tokens between a row-parallel and the next column-parallel product
    (sequence_parallel.py). Without it each expert is split over `tp`, and splitting the stream would move the same bytes in twice as
    many collectives.

    Args:
        experts: E, 0 for a dense model.
        expert_parallel: spread whole experts over all devices.
        tokens: T of the step; where it is smaller than `tp` the stream is not split.
        sliced: the devices of a group have all heads of attention, and share the tokens of prompts (context_parallel.py). The delta rule,
            which goes from token to token, keeps its heads split.
        chunks: whether the step has chunks of prompts; the tokens of others are not shared.

    Raises:
        PartitionError: the number of experts is not a multiple of the number of devices.
    """
    group = mesh.axis("tp")
    spread = bool(experts) and expert_parallel and mesh.size > 1
    if spread and experts % mesh.size:
        raise PartitionError(
            f"{experts} experts over the {mesh.size} devices of mesh {mesh}: each must hold equally many; legal are meshes whose size "
            f"divides {experts}"
        )
    table: dict[str, str | tuple[str, ...]] = {
        "q_heads": "tp",
        "kv_heads": "tp",
        "delta_heads": "tp",
        "ffn": "tp",
        "vocab": "tp",
        "sampled_rows": "tp",
    }
    if spread:
        table["experts"] = ("dp", "tp")
        if tokens >= group:
            table["tokens"] = table["expert_tokens"] = "tp"
    else:
        table["expert_ffn"] = table["shared_ffn"] = "tp"
    if sliced:
        del table["q_heads"], table["kv_heads"]
        if chunks:
            table[SLICES] = "tp"
        if tokens >= group:
            table["tokens"] = "tp"
    return Rules.of(table)


def rules_of(config: Any, mesh: Mesh, bucket: Bucket | None = None, *, expert_parallel: bool = True) -> Rules:
    """Layout of a bucket's graph, or of parameters and state, the same in every bucket, of a model of that configuration."""
    return rules(
        mesh,
        experts=expert_placement.count(config),
        expert_parallel=expert_parallel,
        tokens=bucket.tokens if bucket else mesh.axis("tp"),
        sliced=config.variant.sliced,
        chunks=bucket is None or kind_of(bucket).chunks,
    )

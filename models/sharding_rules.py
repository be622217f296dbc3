"""The layout of a model on a mesh: which mesh axes each logical axis is split over."""

from __future__ import annotations

from ..graphs.errors import PartitionError
from ..graphs.types import Mesh, Rules


def rules(mesh: Mesh, *, experts: int = 0, expert_parallel: bool = True, tokens: int = 0) -> Rules:
    """The layout of a model on a mesh.

    Heads, feed-forward channels and the vocabulary are split over `tp`. With expert parallelism whole experts are spread over all
    devices, and the residual stream is split by tokens between a row-parallel and the next column-parallel product
    (sequence_parallel.py). Without it each expert is split over `tp`, and splitting the stream would move the same bytes in twice as
    many collectives.

    Args:
        experts: E, 0 for a dense model.
        expert_parallel: spread whole experts over all devices.
        tokens: T of the step; where it is smaller than `tp` the stream is not split.

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
    return Rules.of(table)

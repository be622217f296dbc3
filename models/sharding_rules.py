"""Turns a mesh into the rules by which a model's logical axes are split over it."""

from __future__ import annotations

from ..graphs.errors import PartitionError
from ..graphs.types import Mesh, Rules


def rules(mesh: Mesh, *, experts: int = 0, expert_parallel: bool = True, tokens: int = 0) -> Rules:
    """The layout of a model on a mesh.

    Heads, feed-forward channels and the vocabulary are split over `tp`. Experts are spread over all devices; without expert
    parallelism each is split over `tp`. Where experts are spread the residual stream is split by tokens between a row-parallel
    and the next column-parallel product; elsewhere that would move the same bytes in twice as many collectives.

    Args:
        experts: E, 0 for a dense model.
        expert_parallel: spread whole experts over all devices.
        tokens: T of the step; with fewer tokens than a group has devices each device has all of them.

    Raises:
        PartitionError: experts do not spread evenly over the devices, or data parallel groups would have parts of experts.
    """
    group = mesh.axis("tp")
    spread = bool(experts) and expert_parallel and mesh.size > 1
    if spread and experts % mesh.size:
        raise PartitionError(
            f"{experts} experts over the {mesh.size} devices of mesh {mesh}: each must hold as many; legal are meshes whose size divides "
            f"{experts}"
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

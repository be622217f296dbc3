"""The backend of captured graphs for Ascend NPUs: operators of torch_npu, recorded on the device when the graph is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket
from ..ascend.npu_backend import NpuBackend
from ..backend import CompiledFile

if TYPE_CHECKING:
    from ..lower import LoweredProgram


class AclGraph(NpuBackend):
    """Makes flat graphs of torch operators.

    A file names operators and no processor: what is built on x86-64 opens on aarch64. Decode buckets are captured when they are opened;
    prefill, whose operators run longer than their launch takes, is launched operator by operator.
    """

    name = "aclgraph"
    suffix = "aclgraph"
    graph = "a captured graph"

    def compile(self, lowered: LoweredProgram, *, cache_dir: Path, threads: int) -> CompiledFile:
        """One flat graph for all ranks, in the format of lowering/ascend/acl_graph/file.py, on two streams where ranks exchange rows."""
        from ..ascend.acl_graph.make import acl_file
        from ..ascend.acl_graph.multi_stream import with_second_stream
        from ..ascend.prefetch import in_captured
        from ..ascend.shipped import CAPTURED

        made = acl_file(lowered.graph, lowered.signature, captured=isinstance(lowered.bucket, Bucket) and kind_of(lowered.bucket).decodes)
        made = in_captured(with_second_stream(made, lowered.mesh, lowered.platform), lowered.mesh, lowered.platform)
        return CompiledFile(CAPTURED.encode(made), CAPTURED.census(made))


BACKEND = AclGraph()

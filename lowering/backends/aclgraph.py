"""The backend of captured graphs for Ascend NPUs: operators of torch_npu, recorded on the device when the graph is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket
from ..ascend.npu_backend import NpuBackend
from ..backend import Claims, Compiled
from ..platform import CPU, Platform

if TYPE_CHECKING:
    from ...graphs.spmd.partition import Partitioned
    from ..lower import Lowered


class AclGraph(NpuBackend):
    """Makes flat graphs of torch operators.

    A file names operators and no processor: what is built on x86-64 opens on aarch64. Decode buckets are captured when they are opened;
    prefill, whose operators run longer than their launch takes, is launched operator by operator.
    """

    name = "aclgraph"
    suffix = "aclgraph"
    graph = "a captured graph"

    def compile(self, lowered: Lowered, *, cache_dir: Path, threads: int) -> Compiled:
        """One flat graph for all ranks, in the format of lowering/ascend/acl_graph/file.py."""
        from ..ascend.acl_graph import inspect_acl
        from ..ascend.acl_graph.file import encode
        from ..ascend.acl_graph.make import acl_file

        made = acl_file(lowered.graph, lowered.signature, captured=isinstance(lowered.bucket, Bucket) and kind_of(lowered.bucket).decodes)
        return Compiled(encode(made), inspect_acl.census(made))

    def prove(self, compiled: Compiled, partitioned: Partitioned | Claims, platform: Platform = CPU) -> None:
        """Checks that pools are written in place, no length is baked in, no step computes from weights or constants alone, collectives
        are those of the partitioned graph in order, and a device takes every operator where the platform names a chip.

        Limits on the sizes of a model are left out for models narrower than `SMALLEST_MODEL` of legality/check.py, as in GE graphs.
        """
        from .. import collectives_check
        from ..ascend.acl_graph import inspect_acl
        from ..ascend.acl_graph.file import decode
        from ..ascend.legality import check as legality

        acl_file = decode(compiled.data)
        inspect_acl.check(acl_file, partitioned.signature)
        collectives_check.agree(partitioned.collectives, collectives_check.of_acl_file(acl_file))
        if platform.chip:
            legality.prove(acl_file, platform, sizes=legality.has_kernels(partitioned.signature.params))


BACKEND = AclGraph()

"""The machines that graphs are built for: sizes, speeds and defaults of each."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, replace

from ...graphs import control_group
from ...graphs.errors import SpecError
from ...graphs.sizes import MESH_AXES, Mesh
from ...lowering.machines import NPUS, Npu
from ..notation import PrefillSize
from .settings.model import MAX_LOGPROBS
from .settings.sizes import CPU_BUCKETS, DEFAULT_BUCKETS, DEFAULT_PREFILL


@dataclass(frozen=True)
class Target:
    """A kind of machine that graphs are built for; one rank runs on one NPU.

    Attributes:
        name: what `--target` calls it.
        backend: name of the default backend.
        backends: names of all legal backends.
        dtypes: names of the computing types that its kernels support.
        state_dtype: of recurrent states.
        max_npus: most ranks of a mesh.
        page_size: P, tokens per KV page that the attention kernel wants.
        buckets, max_model_len, prefill, max_logprobs, structured_outputs, logit_adjustments: defaults of a plan, which
            tools/builder/defaults.py fits to this machine's memory and answers.py to NPUs. Chunks longer than the context are cut to it.
        npu: nameplate of the NPU; None for CPUs.
        cann: release of CANN that graphs are lowered for unless a build names another.
        local: whether it is the machine of this process. Its artifacts have weights, and an eager reference of every bucket, which runs
            until the bucket has an executable and which that executable is compared with.
        dispatches: whether the lowering of the fused expert dispatch and combine operators fits this target.
        tp_across_nodes: whether links between nodes are fast enough for the collectives of every layer.
    """

    name: str
    backend: str
    max_npus: int
    page_size: int
    backends: tuple[str, ...]
    dtypes: tuple[str, ...]
    state_dtype: str
    buckets: tuple[int, ...]
    max_model_len: int
    prefill: tuple[PrefillSize, ...]
    max_logprobs: int
    structured_outputs: int = 8
    logit_adjustments: int = 8
    npu: Npu | None = None
    cann: str = ""
    local: bool = False
    dispatches: bool = True
    tp_across_nodes: bool = True

    @property
    def chip(self) -> str:
        """Name of the NPU in CANN's operator definitions, "" for CPUs."""
        return self.npu.chip if self.npu else ""

    @property
    def npus_per_node(self) -> int:
        """Ranks of one server."""
        return self.npu.npus_per_node if self.npu else self.max_npus

    def default_backend(self, mesh: Mesh) -> str:
        """The backend of a mesh: several ranks of this machine run uncompiled."""
        return self.backend if not self.local or mesh.size == 1 else "eager"

    def nodes(self, mesh: Mesh) -> int:
        """Servers that the ranks of a mesh need."""
        return -(-mesh.size // self.npus_per_node)

    def memory_bytes(self, mesh: Mesh) -> int:
        """Memory of one rank, including what the runtime reserves."""
        return self.npu.hbm_bytes if self.npu else MACHINE_BYTES // mesh.size

    def reserved_bytes(self, mesh: Mesh) -> int:
        """The part of `memory_bytes` that the runtime reserves."""
        return self.npu.hbm_bytes - self.npu.usable_hbm_bytes if self.npu else 0


_PHYSICAL_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MACHINE_BYTES = min(_PHYSICAL_BYTES, control_group.memory_limit() or _PHYSICAL_BYTES)
"""Memory of this machine that its ranks share: of a container, what its control group may take."""

# Ranks are processes of this machine; 64 of them are enough to test any mesh.
_CPU = Target(
    "cpu",
    backend="inductor",
    max_npus=64,
    page_size=16,
    backends=("inductor", "eager", "null"),
    dtypes=("float32", "bfloat16"),
    state_dtype="float32",
    buckets=CPU_BUCKETS,
    max_model_len=1024,
    prefill=DEFAULT_PREFILL,
    max_logprobs=MAX_LOGPROBS,
    local=True,
)


def _of(npu: Npu, name: str, max_npus: int) -> Target:
    """The target of an NPU, with its nameplate."""
    return Target(
        name,
        backend="ge",
        max_npus=max_npus,
        page_size=128,
        backends=("ge", "aclgraph", "null"),
        # The fused operators take only bfloat16, the recurrent one also for its states, whatever dtype the checkpoint states.
        dtypes=("bfloat16",),
        state_dtype="bfloat16",
        buckets=DEFAULT_BUCKETS,
        max_model_len=4096,
        # A short prompt takes the smaller one.
        prefill=(PrefillSize(128), PrefillSize(2048)),
        # Graphs are static: every step would compute these for every row, so a build takes them where they are cheap (answers.py).
        max_logprobs=0,
        logit_adjustments=0,
        npu=npu,
        cann="9.1",
    )


# A supernode has 48 nodes.
_A3 = _of(NPUS["ascend910_93"], "ascend-a3", max_npus=768)

# Eight NPUs a node; nodes are linked by RoCE. CANN's expert dispatch takes 2, 4 or 8 such nodes (aclnnMoeDistributeDispatchV2,
# constraints), so eight are the most. Its operands differ from the A3's (expert_scales, another shape of counts), and the lowering
# here does not supply them: tokens are gathered instead.
_A2 = replace(_of(NPUS["ascend910b"], "ascend-a2", max_npus=64), tp_across_nodes=False, dispatches=False)


_TARGETS = {kind.name: kind for kind in (_CPU, _A3, _A2)}
TARGETS = tuple(_TARGETS)
"""Names of all targets."""


def target(name: str) -> Target:
    """The target of that name.

    Raises:
        SpecError: naming the targets there are.
    """
    if name not in _TARGETS:
        near = difflib.get_close_matches(name.lower(), TARGETS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise SpecError(f"target {name!r} is not known{hint}; legal are {', '.join(TARGETS)}")
    return _TARGETS[name]


def check_mesh(target: Target, mesh: Mesh) -> None:
    """Refuses a mesh that a target does not support.

    Raises:
        SpecError: an axis is unknown or repeated, there are more ranks than NPUs, or a tp group straddles nodes.
    """
    names = [name for name, _ in mesh.axes]
    if unknown := [name for name in names if name not in MESH_AXES]:
        raise SpecError(f"mesh {mesh}: unknown axis {', '.join(map(repr, unknown))}; legal are {' and '.join(MESH_AXES)}, as in dp=8,tp=2")
    if names != [name for name in MESH_AXES if name in names]:
        raise SpecError(f"mesh {mesh}: axes are {','.join(names)}; legal is each of {','.join(MESH_AXES)} at most once, in this order")
    if mesh.size > target.max_npus:
        raise SpecError(f"mesh {mesh} has {mesh.size} ranks and {target.name} at most {target.max_npus}")
    tp, node = mesh.axis("tp"), target.npus_per_node
    if mesh.size <= node:
        return
    if tp > node and not target.tp_across_nodes:
        raise SpecError(f"mesh {mesh}: tp is {tp} and a node of {target.name} has {node} NPUs; legal is tp up to {node}, the rest in dp")
    if node % tp and tp % node:
        raise SpecError(f"mesh {mesh}: groups of tp={tp} straddle nodes of {node} NPUs; legal is a tp that divides {node} or a multiple")

"""The machines that graphs are built for: sizes, speeds and defaults of each."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, replace

import torch

from ...graphs.errors import SpecError
from ...graphs.types import MESH_AXES, Mesh
from ...lowering.machines import NPUS, Npu
from ..notation import PrefillSize
from .choices import DEFAULT_PREFILL, MAX_LOGPROBS


@dataclass(frozen=True)
class Target:
    """A kind of machine that graphs are built for; one rank runs on one NPU.

    Attributes:
        name: what `--target` calls it.
        backend: name of the default backend.
        backends: names of all legal backends.
        dtypes: names of the computing types that its kernels support.
        state_dtype: of recurrent states.
        npus_per_node: ranks of one server.
        max_npus: most ranks of a mesh.
        hbm_bytes: memory of one NPU; for "cpu" that of the machine, which all ranks share.
        usable_hbm_bytes: the part of it that the runtime does not reserve.
        page_size: P, tokens per KV page that the attention kernel wants.
        max_model_len, prefill, max_logprobs, structured_outputs, logit_adjustments: defaults of a build. Chunks longer than the context are
            cut to it.
        chip: name of the NPU in CANN's operator definitions, "" for CPUs.
        cann: release of CANN that graphs are lowered for unless a build names another.
        local: whether it is the machine of this process. Its artifacts have weights, and an eager reference of every bucket, which runs
            until the bucket has an executable and which that executable is compared with.
        shared_memory: whether all ranks share `hbm_bytes`.
        dispatches: whether the lowering of the fused expert dispatch and combine operators fits this target.
        tp_across_nodes: whether links between nodes are fast enough for the collectives of every layer.
        hbm_bytes_per_s: memory bandwidth of one NPU; like every speed here a nameplate figure, None where unknown.
        bf16_flops_per_s: dense bfloat16 matrix products of one NPU.
        int8_ops_per_s: dense int8 matrix products of one NPU.
        link_bytes_per_s: one NPU to the others of its node, one direction.
        node_link_bytes_per_s: one NPU to other nodes, one direction.
    """

    name: str
    backend: str
    npus_per_node: int
    max_npus: int
    hbm_bytes: int
    usable_hbm_bytes: int
    page_size: int
    backends: tuple[str, ...]
    dtypes: tuple[str, ...]
    state_dtype: torch.dtype
    max_model_len: int
    prefill: tuple[PrefillSize, ...]
    max_logprobs: int
    structured_outputs: int = 8
    logit_adjustments: int = 8
    chip: str = ""
    cann: str = ""
    local: bool = False
    shared_memory: bool = False
    dispatches: bool = True
    tp_across_nodes: bool = True
    hbm_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    int8_ops_per_s: float | None = None
    link_bytes_per_s: float | None = None
    node_link_bytes_per_s: float | None = None

    def nodes(self, mesh: Mesh) -> int:
        """Servers that the ranks of a mesh need."""
        return -(-mesh.size // self.npus_per_node)

    def memory_bytes(self, mesh: Mesh) -> int:
        """Memory of one rank, including what the runtime reserves."""
        return self.hbm_bytes // mesh.size if self.shared_memory else self.hbm_bytes

    def reserved_bytes(self, mesh: Mesh) -> int:
        """The part of `memory_bytes` that the runtime reserves."""
        reserved = self.hbm_bytes - self.usable_hbm_bytes
        return reserved // mesh.size if self.shared_memory else reserved


_MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

# Ranks are processes of this machine; 64 of them are enough to test any mesh.
_CPU = Target(
    "cpu",
    backend="inductor",
    npus_per_node=64,
    max_npus=64,
    hbm_bytes=_MACHINE_BYTES,
    usable_hbm_bytes=_MACHINE_BYTES,
    page_size=16,
    backends=("inductor", "eager", "null"),
    dtypes=("float32", "bfloat16"),
    state_dtype=torch.float32,
    max_model_len=1024,
    prefill=DEFAULT_PREFILL,
    max_logprobs=MAX_LOGPROBS,
    local=True,
    shared_memory=True,
)


def _of(npu: Npu, name: str, max_npus: int) -> Target:
    """The target of an NPU, with its nameplate."""
    return Target(
        name,
        backend="ge",
        npus_per_node=npu.npus_per_node,
        max_npus=max_npus,
        hbm_bytes=npu.hbm_bytes,
        usable_hbm_bytes=npu.usable_hbm_bytes,
        page_size=128,
        backends=("ge", "aclgraph", "null"),
        # The fused operators take only bfloat16, the recurrent one also for its states, whatever dtype the checkpoint states.
        dtypes=("bfloat16",),
        state_dtype=torch.bfloat16,
        max_model_len=4096,
        prefill=(PrefillSize(2048),),
        # Graphs are static: with log probabilities, every step would compute them for every row.
        max_logprobs=0,
        logit_adjustments=0,
        chip=npu.chip,
        cann="9.1",
        hbm_bytes_per_s=npu.hbm_bytes_per_s,
        bf16_flops_per_s=npu.bf16_ops_per_s,
        int8_ops_per_s=npu.int8_ops_per_s,
        link_bytes_per_s=npu.link_bytes_per_s,
        node_link_bytes_per_s=npu.node_link_bytes_per_s,
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

"""The environment that the ranks of an artifact for NPUs run with: a plan from the target, the mesh and the sizes of its communicators.

Published launch scripts set these variables by hand. Sources: CANN's reference of environment variables (hiascend.com, maintenance
reference of CANN 9.0, envref_07_0080, _0096, _0077, _0078, _0099) and TorchNPU's (Ascend/pytorch, docs/zh/api/environment_variable).
docs/on-hardware.md lists what is left out, and why.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...graphs.types import DISPATCH, FUSED_EXPERTS, Mesh
from ...lowering.artifact.manifest import Variable
from .memory import HCCL_BUFFER_BYTES, MIB
from .targets import Target

CONNECT_TIMEOUT_S = 600
"""How long ranks wait for each other when communicators are made; legal is 120 to 7200."""

EXEC_TIMEOUT_S = 204
"""How long a collective waits for a rank on the device; legal is up to 1091 in AIV mode."""

TRANSFER_TIMEOUT_MS, TRANSFER_PORT = 10_000, 11_000
"""Of Mooncake over the links of NPUs, which waits 3 s by default: for a connection, and for a batch; and where its ports begin."""


def environment(target: Target, mesh: Mesh, communicator_bytes: Mapping[str, int], *, captured: bool = False) -> dict[str, Variable]:
    """The variables of every rank, by name; equal for all ranks and machines. There are none but for NPUs.

    Args:
        target: the machine that the artifact is built for.
        mesh: of all ranks.
        communicator_bytes: size of one buffer of each communicator by symbol of its group; empty where ranks do not communicate.
        captured: whether graphs are captured where they run.
    """
    if not target.cann:
        return {}
    settings = {
        "PYTORCH_NPU_ALLOC_CONF": Variable(
            "expandable_segments:True",
            "graphs of all sizes take their workspaces from one allocator; segments that grow leave no gaps between them",
        ),
        **dict.fromkeys(
            ("ASCEND_CONNECT_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT"),
            Variable(
                str(TRANSFER_TIMEOUT_MS),
                "ms; handovers between servers wait so long for a peer that loads, as long as a silent peer is lost",
            ),
        ),
        "ASCEND_BASE_PORT": Variable(
            str(TRANSFER_PORT),
            "handovers between servers listen from here, at 100 ports for each NPU; the default differs between releases",
        ),
    }
    if captured:
        settings["TASK_QUEUE_ENABLE"] = Variable("1", "torch_npu captures no graph under 2 (torch_npu/csrc/core/npu/NPUGraph.cpp)")
    return settings | _communication(target, mesh, communicator_bytes) if communicator_bytes else settings


def _communication(target: Target, mesh: Mesh, communicator_bytes: Mapping[str, int]) -> dict[str, Variable]:
    settings = {
        "HCCL_BUFFSIZE": _buffer_size(communicator_bytes),
        "HCCL_CONNECT_TIMEOUT": Variable(
            str(CONNECT_TIMEOUT_S), "seconds; ranks of several hosts reach the first communicator minutes apart, and the default is 120"
        ),
        "HCCL_EXEC_TIMEOUT": Variable(
            str(EXEC_TIMEOUT_S),
            "seconds; bounds the wait for a lost rank on the device (default 1091 or 1836), and is longer than a step's limit on the host, "
            "which ends the ranks in order",
        ),
        "HCCL_DETERMINISTIC": Variable(
            "false",
            "sums of ranks may differ in the last bits from run to run; true makes them repeatable, and slower: it goes before AIV mode",
        ),
    }
    # An A2 allows AIV mode for one communicator at a time (envref_07_0096); those of experts run kernels of their own and no collective.
    groups = {mesh.group(symbol, 0) for symbol in communicator_bytes if symbol not in (DISPATCH, FUSED_EXPERTS)}
    if target.tp_across_nodes or len(groups) <= 1:
        settings["HCCL_OP_EXPANSION_MODE"] = Variable(
            "AIV", "collectives run on the vector cores, without a launch by the host or by an AI CPU for each"
        )
    return settings


def _buffer_size(communicator_bytes: Mapping[str, int]) -> Variable:
    nbytes = communicator_bytes.get(DISPATCH, HCCL_BUFFER_BYTES)
    if DISPATCH in communicator_bytes:
        why = "MiB; the window of expert dispatch, whose kernels read this variable; other communicators are made with sizes of their own"
    else:
        why = "MiB; one of the two buffers of a communicator that is made without a size of its own"
    return Variable(str(-(-nbytes // MIB)), why)

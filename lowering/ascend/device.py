"""Turns a `.ge` file into an executable on an NPU, through torchair's own loader.

Written against torchair's sources and its generated cache code; it has not run on a machine with CANN (docs/on-hardware.md).
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import LoweringError
from .ge_file import Container, decode, parse, patched
from .toolchain.harness import Torchair

FRACTAL_NZ = 29
"""ACL's number of the tiled format that matrix units read without rearranging (ACL_FORMAT_FRACTAL_NZ)."""

# Operators that accept their weight in NZ, and the name of that input; lists are numbered (weight0, weight1, ...).
_WEIGHTS = {
    "MatMul": "x2",
    "MatMulV2": "x2",
    "MatMulV3": "x2",
    "QuantBatchMatmulV3": "x2",
    "GroupedMatmul": "weight",
    "GroupedMatmulSwigluQuantV2": "weight",
}
# Last dimension of a tile by the number GE's messages give a dtype: bfloat16, float16, int8.
_TILE_WIDTHS = {27: 16, 2: 16, 3: 32}
_names = itertools.count()


@dataclass(frozen=True)
class Engine:
    """What running a graph takes of torchair; its generated cache code calls the same, in the same order.

    Attributes:
        graph: torchair's `GeGraph`.
        initialize: starts GE once per process; later calls must bring the same options.
        update_constants: writes addresses of operands into constants that stand for them.
        update_formats: writes each operand's storage format (ND, NZ) onto its `Data` op.
        device: type of the device that operands must be on.
    """

    graph: Callable[..., Any]
    initialize: Callable[[dict[str, str]], None]
    update_constants: Callable[[Any, Sequence[torch.Tensor]], None]
    update_formats: Callable[[Any, Sequence[torch.Tensor]], None]
    device: str = "npu"


def engine(torchair: Torchair) -> Engine:
    """The engine of a loaded torchair.

    Raises:
        LoweringError: stubs stand in for CANN here; calling them to run something would end the process.
    """
    if torchair.cann is None:
        raise LoweringError("running a GE graph needs CANN and an NPU, and this machine has no CANN; building and inspecting need neither")
    converter = importlib.import_module("torchair._ge_concrete_graph.fx2ge_converter")
    return Engine(
        graph=importlib.import_module("torchair.ge._ge_graph").GeGraph,
        initialize=importlib.import_module("torchair.core._backend").initialize_graph_engine,
        update_constants=converter._update_constplaceholder_attr_from_inputs,
        update_formats=converter._update_internal_format_from_inputs,
    )


class GeExecutable:
    """One step of one bucket on one NPU; the process's current device is the one it runs on.

    GE compiles at the first call, when the storage formats of the operands are known, and never again. The formats must stay.

    Args:
        container: of this rank (`container.patched`).
        engine: of torchair.

    Raises:
        LoweringError: the container still has patches, or other engine options than an earlier one of this process.
    """

    def __init__(self, container: Container, engine: Engine) -> None:
        if container.patches:
            raise LoweringError(f"{len(container.patches)} attributes of this graph differ between ranks and have not been patched")
        self.container, self._engine = container, engine
        try:
            engine.initialize(dict(container.engine))
        except (ValueError, AssertionError) as error:
            raise LoweringError(f"GE runs with other options than this graph's {dict(container.engine)}: {error}") from error
        # Graphs of one process share a session, and what was converted in different processes has the same names.
        self._graph = engine.graph(serialized_model_def=container.graph, name=f"npucompile_{next(_names)}")
        self._returned = len(self._graph.attr["_output_dtypes"].list.i)
        self._compiled = False

    @property
    def backend(self) -> str:
        """Name of the backend that made it."""
        return "ge"

    def __call__(self, operands: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Runs one step.

        Raises:
            LoweringError: at the first call, when GE cannot compile the graph or an operand is not on an NPU; at any, when GE
                returns another number of results than the graph has.
        """
        fed = [operands[index] for index in self.container.data]
        if not self._compiled:
            self._compile(operands, fed)
        if self.container.donations:
            assigned: list[torch.Tensor | None] = [None] * self._returned
            for output, operand in self.container.donations:
                assigned[output] = operands[operand]
            results = self._graph.run(fed, assigned)
        else:
            results = self._graph.run(fed)
        if len(results) != self._returned:
            raise LoweringError(f"GE returned {len(results)} tensors; the graph has {self._returned} outputs")
        return list(results[: self.container.outputs])

    def _compile(self, operands: Sequence[torch.Tensor], fed: list[torch.Tensor]) -> None:
        if len(operands) != self.container.inputs:
            raise LoweringError(f"{len(operands)} operands, the graph has {self.container.inputs}")
        if elsewhere := sorted({one.device.type for one in fed} - {self._engine.device}):
            raise LoweringError(f"operands are on {', '.join(elsewhere)}; legal is {self._engine.device}")
        self._engine.update_constants(self._graph, operands)
        self._engine.update_formats(self._graph, fed)
        try:
            self._graph.load(dict(self.container.options), create_pg=False)
            self._graph.compile()
        except RuntimeError as error:
            raise LoweringError(f"GE cannot compile the graph: {error}") from error
        self._compiled = True


def load(path: Path, torchair: Torchair, rank: int = 0, groups: Mapping[str, str] | None = None) -> GeExecutable:
    """Reads a file for one rank.

    Args:
        path: a `.ge` file.
        torchair: loaded with CANN.
        rank: number among all ranks.
        groups: communicator name by symbolic group (`communicators`).

    Raises:
        LoweringError: no CANN, or the file is not one, or needs a group that is not there.
    """
    return GeExecutable(patched(decode(path.read_bytes()), rank, groups or {}), engine(torchair))


def communicators(groups: Mapping[str, Any], rank: int) -> dict[str, str]:
    """HCCL's names of process groups; every rank of a group must call this, because it makes the communicator.

    Args:
        groups: symbolic name -> process group with an HCCL backend, as `torch.distributed.new_group` returns it.
        rank: this process's number among all.
    """
    device = torch.device("npu")
    return {name: group._get_backend(device).get_hccl_comm_name(rank, init_comm=True) for name, group in sorted(groups.items())}


def weight_operands(container: Container) -> tuple[int, ...]:
    """Operands that are worth storing in NZ: every reader is a matrix product that takes them as its weight, and no tile needs padding."""
    graph = parse(container.graph).graph[0]
    readers: dict[str, list[bool]] = {}
    for op in graph.op:
        # An input that is not fed is "" and described all the same; what only orders operators comes last and is not described.
        for name, described in zip(op.input, op.input_desc, strict=False):
            readers.setdefault(name, []).append(_is_weight(op.type, described.name))
    data = {f"{op.name}:0": op for op in graph.op if op.type == "Data"}
    found = [op.attr["index"].i for name, op in data.items() if all(readers.get(name, [False])) and _fills_tiles(op.output_desc[0])]
    return tuple(sorted(container.data[index] for index in found))


def _is_weight(op_type: str, name: str) -> bool:
    return op_type in _WEIGHTS and re.fullmatch(_WEIGHTS[op_type] + r"\d*", name) is not None


def _fills_tiles(described: Any) -> bool:
    """A tile is 16 rows of 32 bytes; padding would make the tensor larger than the memory plan says."""
    width = _TILE_WIDTHS.get(described.dtype)
    shape = list(described.shape.dim)
    return width is not None and len(shape) > 1 and shape[-2] % 16 == 0 and shape[-1] % width == 0


def to_nz(torch_npu: Any, weight: torch.Tensor) -> torch.Tensor:
    """A weight in NZ; same shape, dtype and values, another order in memory. Done once, when weights are loaded."""
    cast: torch.Tensor = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
    return cast

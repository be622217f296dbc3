"""Runs `.ge` files on an NPU through torchair's own loader.

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
from .ge_file import GeFile, decode, parse, patched
from .toolchain.harness import Torchair

FRACTAL_NZ = 29
"""ACL's number of the tiled format that matrix units read without rearranging (ACL_FORMAT_FRACTAL_NZ)."""

# Operators that accept their weight in NZ, and the name of that input; inputs of a list are numbered (weight0, weight1, ...).
_WEIGHTS = {
    "MatMul": "x2",
    "MatMulV2": "x2",
    "MatMulV3": "x2",
    "QuantBatchMatmulV3": "x2",
    "GroupedMatmul": "weight",
    "GroupedMatmulSwigluQuantV2": "weight",
}
# Width of a tile by the number of a dtype in GE's messages: bfloat16, float16, int8.
_TILE_WIDTHS = {27: 16, 2: 16, 3: 32}
_names = itertools.count()


@dataclass(frozen=True)
class GeEngine:
    """The functions of torchair that run a graph; torchair's generated cache code calls the same ones, in the same order.

    Attributes:
        graph: torchair's `GeGraph`.
        initialize: starts GE once per process; later calls must bring the same options.
        update_constants: writes addresses of operands into the constants that stand for them.
        update_formats: writes each operand's storage format (ND, NZ) into its `Data` op.
        device: device type of the operands.
    """

    graph: Callable[..., Any]
    initialize: Callable[[dict[str, str]], None]
    update_constants: Callable[[Any, Sequence[torch.Tensor]], None]
    update_formats: Callable[[Any, Sequence[torch.Tensor]], None]
    device: str = "npu"


def engine(torchair: Torchair) -> GeEngine:
    """The engine of a loaded torchair.

    Raises:
        LoweringError: there is no CANN here; the stub libraries would end the process when called.
    """
    if torchair.cann is None:
        raise LoweringError("running a GE graph needs CANN and an NPU, and this machine has no CANN; building and inspecting need neither")
    converter = importlib.import_module("torchair._ge_concrete_graph.fx2ge_converter")
    return GeEngine(
        graph=importlib.import_module("torchair.ge._ge_graph").GeGraph,
        initialize=importlib.import_module("torchair.core._backend").initialize_graph_engine,
        update_constants=converter._update_constplaceholder_attr_from_inputs,
        update_formats=converter._update_internal_format_from_inputs,
    )


class GeExecutable:
    """One step of one bucket on the process's current NPU. Its operands are those of the program, then the derived values (fold.py).

    GE compiles at the first call, when the storage formats of the operands are known, and never again; the formats must not change.

    Args:
        ge_file: of this rank (`ge_file.patched`).
        engine: of torchair.

    Raises:
        LoweringError: the GE file still has patches, or other engine options than an earlier one of this process.
    """

    def __init__(self, ge_file: GeFile, engine: GeEngine) -> None:
        if ge_file.patches:
            raise LoweringError(f"{len(ge_file.patches)} attributes of this graph differ between ranks and have not been patched")
        self.ge_file, self._engine = ge_file, engine
        try:
            engine.initialize(dict(ge_file.engine))
        except (ValueError, AssertionError) as error:
            raise LoweringError(f"GE runs with other options than this graph's {dict(ge_file.engine)}: {error}") from error
        # Graphs of one process share a session, and graphs converted in different processes may have equal names.
        self._graph = engine.graph(serialized_model_def=ge_file.graph, name=f"npucompile_{next(_names)}")
        self._returned = len(self._graph.attr["_output_dtypes"].list.i)
        self._compiled = False

    @property
    def backend(self) -> str:
        """Name of the backend that compiled it."""
        return "ge"

    def __call__(self, operands: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Runs one step.

        Raises:
            LoweringError: at the first call, when GE cannot compile the graph or an operand is not on an NPU; at any call, when GE
                returns another number of results than the graph has.
        """
        fed = [operands[index] for index in self.ge_file.data]
        if not self._compiled:
            self._compile(operands, fed)
        if self.ge_file.donations:
            assigned: list[torch.Tensor | None] = [None] * self._returned
            for output, operand in self.ge_file.donations:
                assigned[output] = operands[operand]
            results = self._graph.run(fed, assigned)
        else:
            results = self._graph.run(fed)
        if len(results) != self._returned:
            raise LoweringError(f"GE returned {len(results)} tensors; the graph has {self._returned} outputs")
        return list(results[: self.ge_file.outputs])

    def _compile(self, operands: Sequence[torch.Tensor], fed: list[torch.Tensor]) -> None:
        if len(operands) != self.ge_file.operands:
            derived = self.ge_file.operands - self.ge_file.inputs
            raise LoweringError(f"{len(operands)} operands, the graph has {self.ge_file.inputs} and {derived} derived values")
        if elsewhere := sorted({tensor.device.type for tensor in fed} - {self._engine.device}):
            raise LoweringError(f"operands are on {', '.join(elsewhere)}; legal is {self._engine.device}")
        self._engine.update_constants(self._graph, operands)
        self._engine.update_formats(self._graph, fed)
        try:
            self._graph.load(dict(self.ge_file.options), create_pg=False)
            self._graph.compile()
        except RuntimeError as error:
            raise LoweringError(f"GE cannot compile the graph: {error}") from error
        self._compiled = True


def load(path: Path, torchair: Torchair, rank: int = 0, groups: Mapping[str, str] | None = None) -> GeExecutable:
    """Loads a `.ge` file for one rank.

    Args:
        path: a `.ge` file.
        torchair: loaded with CANN.
        rank: number among all ranks.
        groups: communicator name by symbolic group (`communicators`).

    Raises:
        LoweringError: there is no CANN, the file is no GE file, or it needs a group that `groups` lacks.
    """
    return GeExecutable(patched(decode(path.read_bytes()), rank, groups or {}), engine(torchair))


def communicators(groups: Mapping[str, Any], rank: int) -> dict[str, str]:
    """HCCL's communicator names of process groups; the call creates the communicators, so every rank of a group must make it.

    Args:
        groups: symbolic name -> process group with an HCCL backend, as `torch.distributed.new_group` returns it.
        rank: this process's number among all.
    """
    device = torch.device("npu")
    return {name: group._get_backend(device).get_hccl_comm_name(rank, init_comm=True) for name, group in sorted(groups.items())}


def weight_operands(ge_file: GeFile) -> tuple[int, ...]:
    """Operands and derived values worth storing in NZ: all their readers are matrix products that take them as the weight, and no tile
    needs padding."""
    graph = parse(ge_file.graph).graph[0]
    readers: dict[str, list[bool]] = {}
    for op in graph.op:
        # An absent input is "" and has a description; control inputs come last and have none.
        for name, described in zip(op.input, op.input_desc, strict=False):
            readers.setdefault(name, []).append(_is_weight(op.type, described.name))
    data = {f"{op.name}:0": op for op in graph.op if op.type == "Data"}
    indices = [op.attr["index"].i for name, op in data.items() if all(readers.get(name, [False])) and _fills_tiles(op.output_desc[0])]
    return tuple(sorted(ge_file.data[index] for index in indices))


def _is_weight(op_type: str, name: str) -> bool:
    return op_type in _WEIGHTS and re.fullmatch(_WEIGHTS[op_type] + r"\d*", name) is not None


def _fills_tiles(described: Any) -> bool:
    """Whether a tensor divides into tiles of 16 rows of 32 bytes; padding would make it larger than the memory plan says."""
    width = _TILE_WIDTHS.get(described.dtype)
    shape = list(described.shape.dim)
    return width is not None and len(shape) > 1 and shape[-2] % 16 == 0 and shape[-1] % width == 0


def to_nz(torch_npu: Any, weight: torch.Tensor) -> torch.Tensor:
    """A weight in NZ: same shape, dtype and values in another memory order. Called once, when weights are loaded."""
    cast: torch.Tensor = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
    return cast

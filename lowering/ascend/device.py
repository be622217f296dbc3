"""Runs `.ge` files on an NPU through torchair's own loader.

Written against torchair's sources and its generated cache code; it has not run on a machine with CANN (docs/on-hardware.md).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import LoweringError
from ...graphs.types import Leaf
from ..device import DerivedValue
from ..device_error import named
from ..switches import KERNELS, NZ, OVERLAP
from . import fold
from .convert import shape_of
from .ge_file import GE_DTYPES, GeFile, decode, messages, on_one_stream, parse, patched
from .nz_weights import weight_operands
from .options import other_kernels
from .toolchain.harness import Torchair

FRACTAL_NZ = 29
"""ACL's number of the tiled format that matrix units read without rearranging (ACL_FORMAT_FRACTAL_NZ)."""

_names = itertools.count()


@dataclass(frozen=True)
class GeEngine:
    """The functions of torchair that run a graph; torchair's generated cache code calls the same ones, in the same order.

    Attributes:
        graph: torchair's `GeGraph`.
        initialize: starts GE once per process; later calls must bring the same options.
        update_constants: writes addresses of operands into the constants that stand for them.
        update_formats: writes each operand's storage format (ND, NZ) into its `Data` op.
        device: what `place` says of operands.
        place: says where a tensor lies.
    """

    graph: Callable[..., Any]
    initialize: Callable[[dict[str, str]], None]
    update_constants: Callable[[Any, Sequence[torch.Tensor | None]], None]
    update_formats: Callable[[Any, Sequence[torch.Tensor]], None]
    device: str = "npu"
    place: Callable[[torch.Tensor], str] = lambda tensor: tensor.device.type


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

    GE compiles once, when the storage formats of the operands are known; the formats must not change.

    Args:
        ge_file: of this rank (`ge_file.patched`).
        engine: of torchair.
        version: what compiled graphs depend on besides the graph, see `lowering.device.Device`.

    Raises:
        LoweringError: the GE file still has patches, or other engine options than an earlier one of this process.
    """

    def __init__(self, ge_file: GeFile, engine: GeEngine, version: str = "") -> None:
        if ge_file.patches:
            raise LoweringError(f"{len(ge_file.patches)} attributes of this graph differ between ranks and have not been patched")
        self.ge_file, self._engine, self._version = ge_file, engine, version
        try:
            engine.initialize(dict(ge_file.engine))
        except (ValueError, AssertionError) as error:
            raise LoweringError(f"GE runs with other options than this graph's {dict(ge_file.engine)}: {error}") from error
        self._graph = self._named()
        self._returned = len(self._graph.attr["_output_dtypes"].list.i)
        self._compiled, self._nz = False, True

    def _named(self) -> Any:
        # Graphs of one process share a session, and graphs converted in different processes may have equal names.
        return self._engine.graph(serialized_model_def=self.ge_file.graph, name=f"npucompile_{next(_names)}")

    def switch_off(self, switches: Collection[str]) -> None:
        """Does without these (`lowering.switches`)."""
        self._nz = NZ not in switches
        if KERNELS in switches:
            self.ge_file = replace(self.ge_file, options=other_kernels(self.ge_file.options))
        if OVERLAP in switches:
            self.ge_file = on_one_stream(self.ge_file)
            self._graph = self._named()

    @property
    def backend(self) -> str:
        """Name of the backend that compiled it."""
        return "ge"

    @property
    def reads(self) -> frozenset[int]:
        """Operands that the graph takes."""
        return frozenset(self.ge_file.data)

    def derived(self, params: Sequence[Leaf]) -> tuple[DerivedValue, ...]:
        """Values that are computed from parameters when they are loaded, see fold.py."""
        return tuple(map(DerivedValue, fold.expressions(self.ge_file, params), fold.sources(self.ge_file)))

    def derive(self, number: int, params: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Computes one of them on the CPU."""
        (value,) = fold.evaluate(self.ge_file, params, (number,))
        return value

    @functools.cached_property
    def nz_operands(self) -> frozenset[int]:
        """Operands that the graph wants in NZ, see `weight_operands`."""
        return frozenset(weight_operands(self.ge_file, needed=not self._nz))

    def compile(self, operands: Sequence[torch.Tensor | None], cache_dir: Path | None = None) -> bool:
        """Compiles the graph for these operands, or takes it from GE's cache, see `lowering.device.DeviceExecutable`.

        The cache finds a graph by the key it is given and compares nothing, so the key is a digest of all that was compiled: the graph
        of this rank with its communicators, the options, the operands' formats, and the version of the device.

        Raises:
            LoweringError: GE cannot compile the graph, it is compiled already, the directory is not there, or an operand is not what
                the graph declares.
        """
        if self._compiled:
            raise LoweringError("the graph is compiled already; legal is once")
        fed = self._fed(operands)
        _check_declared(self.ge_file, fed, self._engine)
        with named("giving GE the operands"):
            self._engine.update_constants(self._graph, operands)
            self._engine.update_formats(self._graph, fed)
        options, cached = dict(self.ge_file.options), False
        if cache_dir is not None:
            if not cache_dir.is_dir():
                raise LoweringError(f"the directory of compiled graphs {cache_dir} is not there; legal is one that exists")
            key = self._key()
            # GE writes one index file a key: docs/architecture/features/model_cache.md of gitcode.com/cann/ge.
            cached = (cache_dir / f"{key}.idx").is_file()
            options |= {"ge.graph_compiler_cache_dir": str(cache_dir), "ge.graph_key": key}
        with named("compiling the graph with GE"):
            self._graph.load(options, create_pg=False)
            self._graph.compile()
        self._compiled = True
        return not cached

    def warm_up(self, operands: Sequence[torch.Tensor | None]) -> None:
        """Does nothing: GE captures nothing."""

    def __call__(self, operands: Sequence[torch.Tensor | None], /) -> list[torch.Tensor]:
        """Runs one step.

        Raises:
            LoweringError: the graph is not compiled, the number of operands is another, GE refuses, or returns another number of results
                than the graph has.
        """
        if not self._compiled:
            raise LoweringError("the graph is not compiled; legal is compile() before the first step")
        fed = self._fed(operands)
        assigned: list[torch.Tensor | None] = [None] * self._returned if self.ge_file.donations else []
        for output, operand in self.ge_file.donations:
            assigned[output] = operands[operand]
        # At the first run the graph is loaded, and takes its memory.
        with named(f"a step on {self._engine.device}"):
            results = self._graph.run(fed, assigned) if assigned else self._graph.run(fed)
        if len(results) != self._returned:
            raise LoweringError(f"GE returned {len(results)} tensors; the graph has {self._returned} outputs")
        return list(results[: self.ge_file.outputs])

    def _fed(self, operands: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        if len(operands) != self.ge_file.operands:
            derived = self.ge_file.operands - self.ge_file.inputs
            raise LoweringError(f"{len(operands)} operands, the graph has {self.ge_file.inputs} and {derived} derived values")
        fed = [operand for index in self.ge_file.data if (operand := operands[index]) is not None]
        if len(fed) != len(self.ge_file.data):
            absent = [index for index in self.ge_file.data if operands[index] is None]
            raise LoweringError(f"operands {absent} are absent, and the graph reads them")
        return fed

    def _key(self) -> str:
        formats = [op.output_desc[0].attr["format_for_int"].i for op in self._graph.op if op.type == "Data"]
        described = json.dumps([sorted(self.ge_file.options.items()), sorted(self.ge_file.engine.items()), formats, self._version])
        return hashlib.sha256(described.encode() + b"\0" + self.ge_file.graph).hexdigest()


def _check_declared(ge_file: GeFile, fed: Sequence[torch.Tensor], engine: GeEngine) -> None:
    """Refuses operands that a compiled graph would misread: it never checks where they lie, shapes, dtypes or strides."""
    for op in parse(ge_file.graph).graph[0].op:
        if op.type != "Data":
            continue
        operand, declared = fed[op.attr["index"].i], op.output_desc[0]
        if (place := engine.place(operand)) != engine.device:
            raise LoweringError(f"operand {op.name} is on {place}; legal is {engine.device}")
        dtype, sizes = messages().DataType.Name(declared.dtype), list(declared.shape.dim)
        if (_ge_name(operand.dtype), list(operand.shape)) != (dtype, sizes):
            raise LoweringError(f"operand {op.name} is {shape_of(operand)}; the graph takes {dtype} {sizes}")
        if not operand.is_contiguous():
            raise LoweringError(f"operand {op.name} has strides {operand.stride()}; legal is contiguous")


def _ge_name(dtype: torch.dtype) -> str:
    return GE_DTYPES[dtype][0] if dtype in GE_DTYPES else f"DT_{str(dtype).removeprefix('torch.').upper()}"


def load(path: Path, torchair: Torchair, rank: int = 0, groups: Mapping[str, str] | None = None, version: str = "") -> GeExecutable:
    """Loads a `.ge` file for one rank.

    Args:
        path: a `.ge` file.
        torchair: loaded with CANN.
        rank: number among all ranks.
        groups: communicator name by symbolic group (`communicators`).
        version: of the device (`lowering.device.Device`), which the key of a compiled graph covers.

    Raises:
        LoweringError: there is no CANN, the file is no GE file, or it needs a group that `groups` lacks.
    """
    return GeExecutable(patched(decode(path.read_bytes()), rank, groups or {}), engine(torchair), version)


def communicators(groups: Mapping[str, Any], rank: int) -> dict[str, str]:
    """HCCL's communicator names of process groups; the call creates the communicators, so every rank of a group must make it.

    Args:
        groups: symbolic name -> process group with an HCCL backend, as `torch.distributed.new_group` returns it.
        rank: this process's number among all.
    """
    device = torch.device("npu")
    return {name: group._get_backend(device).get_hccl_comm_name(rank, init_comm=True) for name, group in sorted(groups.items())}


def to_nz(torch_npu: Any, weight: torch.Tensor) -> torch.Tensor:
    """A weight in NZ: same shape, dtype and values in another memory order. Called once, when weights are loaded.

    int32 holds packed int4 and is arranged as the int8 that two int4 share, in tiles of 16 rows of 64 int4, as public recipes do
    (module/quantization/compressed_tensors/compressed_tensors_moe_gmm.py of hicann/cann-recipes-infer, fbc225d).
    """
    if weight.dtype == torch.int32:
        packed: torch.Tensor = torch_npu.npu_format_cast(weight.view(torch.int8), FRACTAL_NZ).view(torch.int32)
        return packed
    cast: torch.Tensor = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
    return cast

"""Turns a partitioned graph into a GE graph for Ascend NPUs: lowered and converted on any machine, run on one with CANN."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...graphs.errors import LoweringError
from ..ascend.toolchain import harness
from ..backend import Backend

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from ...graphs.spmd.partition import Partitioned
    from ...graphs.types import Signature
    from ..executable import Executable
    from ..lower import Lowered

_READY: dict[None, harness.Torchair] = {}


def prepare(cache_dir: Path) -> None:
    """Loads torchair; without CANN over stub libraries that are kept in `cache_dir`.

    Raises:
        LoweringError: saying what is missing and how to install it.
    """
    _READY[None] = harness.load(cache_dir)


def _torchair() -> harness.Torchair:
    if not _READY:
        raise LoweringError("backend ge is not prepared in this process; call its `prepare` before it lowers or compiles")
    return _READY[None]


def lower(partitioned: Partitioned) -> Lowered:
    """Bodies of NPU operators, each kind of layer once."""
    from ..ascend.lowered import lower as lower_bodies

    _torchair()
    return lower_bodies(partitioned)


def compile_graph(graph: GraphModule, signature: Signature, out_path: Path, *, cache_dir: Path, threads: int) -> None:
    """Converts the graph with torchair, proves what can be proved of it, and writes a GE file (lowering/ascend/ge_file.py)."""
    from ..ascend.ge_file import encode
    from ..ascend.inspect_ge import check
    from ..ascend.link import link

    ge_file = link(graph, signature, _torchair())
    check(ge_file, signature)
    out_path.write_bytes(encode(ge_file))


def _load(path: Path) -> Executable:
    from ..ascend.device import load

    return load(path, _torchair())


def _options(threads: int) -> Mapping[str, Any]:
    versions = harness.installed()
    return {name: versions.get(name, "") for name in harness.DISTRIBUTIONS}


def _check_target() -> None:
    if reason := harness.available():
        raise LoweringError(reason)


def _cpu_features() -> tuple[str, ...]:
    return ()


BACKEND = Backend(
    name="ge",
    suffix="ge",
    lower=lower,
    options=_options,
    cpu_features=_cpu_features,
    check_target=_check_target,
    compile=compile_graph,
    load=_load,
    prepare=prepare,
)

"""Nameplate facts of NPUs, each with its source: sizes, speeds and links. What kernels reach of them is fitted where it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..graphs.errors import SpecError

GIB = 2**30


class SourcedNumber(NamedTuple):
    """A number, its unit, and the public source that has it."""

    value: float
    unit: str
    source: str


_BOTH = {
    "hbm_bytes": SourcedNumber(64 * GIB, "bytes", "the 64 GiB parts: CANN 9.0 platform_config (Ascend910_9382.ini, Ascend910B2.ini)"),
    "usable_hbm_bytes": SourcedNumber(int(60.96 * GIB), "bytes", "torch_npu device properties of an Ascend910_9382"),
    "hbm_bytes_per_s": SourcedNumber(
        1.6e12, "bytes/s",
        "arXiv:2506.12708 (3.2 TB/s a package of two dies); nameplate of the 64 GiB parts of both generations",
    ),
    "cache_bytes": SourcedNumber(
        96 * 2**20, "bytes",
        "half of the 192 MiB L2 in CANN's platform_config (Ascend910_9382.ini, Ascend910B2.ini): the other half holds what streams by",
    ),
    "cache_bytes_per_s": SourcedNumber(
        3.82e12, "bytes/s",
        "86 bytes a cycle and core (write; read is 110) x 24 cores x 1.85 GHz: CANN platform_config of Ascend910_9382",
    ),
    "cores": SourcedNumber(24, "matrix cores", "CANN platform_config Ascend910_9382.ini and Ascend910B2.ini"),
    "bf16_ops_per_s": SourcedNumber(
        3.54e14, "operations/s",
        "24 cores x 8192 operations x 1.8 GHz: Huawei MindStudio msmodeling, tensor_cast/device.py; the product page has 3.76e14",
    ),
    "int8_ops_per_s": SourcedNumber(7.08e14, "operations/s", "twice bf16: Huawei MindStudio msmodeling, tensor_cast/device.py"),
    "vector_ops_per_s": SourcedNumber(
        5.5e12, "float32 operations/s",
        "48 vector cores x 64 lanes x 1.8 GHz, from the 256 bytes a vector instruction takes (Ascend C documentation); not measured",
    ),
    "link_bytes_per_s": SourcedNumber(1.96e11, "bytes/s of one NPU, one direction", "arXiv:2506.12708: seven links of 28 GB/s"),
}  # fmt: skip
_OWN = {
    "ascend910_93": {
        "npus_per_node": SourcedNumber(16, "NPUs", "Atlas 800I A3: 8 packages of two dies"),
        "node_link_bytes_per_s": SourcedNumber(
            1.96e11, "bytes/s of one NPU, one direction",
            "arXiv:2506.12708: within 3 % of the links of one node, among the 48 nodes of a supernode",
        ),
    },
    "ascend910b": {
        "npus_per_node": SourcedNumber(8, "NPUs", "Atlas 800I A2: 8 NPUs"),
        "node_link_bytes_per_s": SourcedNumber(
            2.5e10, "bytes/s of one NPU, one direction",
            "RoCE 200 Gbit/s; CANN HIXL benchmarks/A2_benchmark_performance.md measured 22.6 GB/s",
        ),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Npu:
    """Nameplate of one NPU, which is one die of an Atlas A3 package.

    Attributes:
        chip: its name in CANN's operator definitions.
        hbm_bytes, usable_hbm_bytes: memory, and what the runtime leaves of it.
        hbm_bytes_per_s: of that memory.
        cache_bytes, cache_bytes_per_s: of the L2 cache, the part that keeps results.
        cores, bf16_ops_per_s, int8_ops_per_s: matrix units; dense products.
        vector_ops_per_s: vector units, float32.
        link_bytes_per_s, node_link_bytes_per_s: to the others of its node, and to other nodes, one direction.
        npus_per_node: of one server.
    """

    chip: str
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bytes_per_s: float
    cache_bytes: int
    cache_bytes_per_s: float
    cores: int
    bf16_ops_per_s: float
    int8_ops_per_s: float
    vector_ops_per_s: float
    link_bytes_per_s: float
    node_link_bytes_per_s: float
    npus_per_node: int


def facts(chip: str) -> Mapping[str, SourcedNumber]:
    """What is known of a chip, by the field of `Npu`.

    Raises:
        SpecError: naming the chips there are.
    """
    if chip not in _OWN:
        raise SpecError(f"no speeds are known for chip {chip!r}; legal are {', '.join(_OWN)}")
    return _BOTH | _OWN[chip]


def npu(chip: str) -> Npu:
    """The NPU of a chip.

    Raises:
        SpecError: naming the chips there are.
    """
    known = facts(chip)
    return Npu(chip, **{field.name: known[field.name].value for field in fields(Npu)[1:]})  # type: ignore[arg-type]


NPUS = {chip: npu(chip) for chip in _OWN}
"""Both generations, by chip."""

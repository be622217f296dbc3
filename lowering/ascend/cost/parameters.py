"""What times of steps are computed with: nameplates (lowering/machines.py), and what kernels reach of them, with its source in
`parameters.json`."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from ....graphs.errors import SpecError
from ...machines import facts

_SHARED = "common"


@dataclass(frozen=True)
class Parameters:
    """Speeds and fixed costs of one NPU and its links. Rates are nameplate figures, fractions what kernels reach of them.

    Attributes:
        chip: name of the NPU in CANN's operator definitions.
        hbm_bytes_per_s, memory_fraction: of products and vector operators.
        stream_fraction: of `hbm_bytes_per_s`, where attention and recurrent kernels read keys, values and states.
        core_bytes_per_s, cores: what one core can read; attention splits its work by request and key/value head.
        cache_bytes, cache_bytes_per_s: the L2 cache; results of a launch up to that size together are read from it.
        vector_cache_fraction: of that rate, which vector operators reach.
        bf16_ops_per_s, bf16_fraction, int8_ops_per_s, int8_fraction, attention_fraction: matrix units.
        vector_ops_per_s, vector_fraction: vector units.
        matrix_launch_s, vector_launch_s: from one kernel's end to the next one's start in a static graph, and what the next one takes
            with hardly any work, where its operator has no time of its own (`KernelTime`).
        launch_gap_s: the former alone.
        collective_latency_s, collective_hop_s, node_latency_s: fixed parts of a collective: any, a doubling of ranks, across nodes.
        link_bytes_per_s, node_link_bytes_per_s, link_fraction: within a node, and across nodes.
        exchange_latency_s, exchange_hop_s, dispatch_bytes_per_s, combine_bytes_per_s: expert dispatch and combine.
        expert_imbalance: rows of the busiest rank over the mean.
        expert_skew: a in the popularity i^-a of the i-th most popular expert.
    """

    chip: str
    hbm_bytes_per_s: float
    memory_fraction: float
    stream_fraction: float
    core_bytes_per_s: float
    cores: int
    cache_bytes: float
    cache_bytes_per_s: float
    vector_cache_fraction: float
    bf16_ops_per_s: float
    bf16_fraction: float
    int8_ops_per_s: float
    int8_fraction: float
    attention_fraction: float
    vector_ops_per_s: float
    vector_fraction: float
    matrix_launch_s: float
    vector_launch_s: float
    launch_gap_s: float
    collective_latency_s: float
    collective_hop_s: float
    link_bytes_per_s: float
    link_fraction: float
    node_link_bytes_per_s: float
    node_latency_s: float
    exchange_latency_s: float
    exchange_hop_s: float
    dispatch_bytes_per_s: float
    combine_bytes_per_s: float
    expert_imbalance: float
    expert_skew: float
    npus_per_node: int


def parameters(chip: str) -> Parameters:
    """The parameters of a chip.

    Raises:
        SpecError: naming the chips there are.
    """
    return Parameters(chip=chip, **{name: entry["value"] for name, entry in sources(chip).items()})


def sources(chip: str) -> dict[str, dict[str, Any]]:
    """Value, unit and source of each parameter of a chip, by name.

    Raises:
        SpecError: naming the chips there are.
    """
    wanted = {field.name for field in fields(Parameters)} - {"chip"}
    nameplate = {name: fact._asdict() for name, fact in facts(chip).items() if name in wanted}
    table = _table()
    entries = nameplate | table[_SHARED] | table[chip]
    if set(entries) != wanted:
        raise SpecError(f"parameters of {chip} are {', '.join(sorted(entries))}; legal are {', '.join(sorted(wanted))}")
    return entries


@functools.cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(resources.files(__package__).joinpath("parameters.json").read_text("utf-8"))
    return table

"""Options of GE that graphs are compiled with beyond torchair's defaults, each with the release it needs, its reason and its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..platform import PREBUILT, Platform

KERNELS = "ge.jit_compile"

# Sources, by their shares of the reasons below:
#   TA: Ascend/torchair@fced884, docs/zh/ascend_ir/features/advanced and torchair/npu_graph_executor.
#   CR: hicann/cann-recipes-infer@fbc225d, executor/utils/graph_utils.py, what Huawei runs Qwen3.5-397B with through GE.


class Option(NamedTuple):
    """One option of a graph.

    Attributes:
        name, value: as GE reads them.
        needs: what the platform must have (`Platform.features`).
        reason: why graphs have it, with its source.
    """

    name: str
    value: str
    needs: frozenset[str]
    reason: str


OPTIONS = (
    Option(
        "ge.tiling_schedule_optimize",
        "1",
        frozenset({"cann>=8.3"}),
        "Lengths of attention are computed on the device. With this option its tiling is too, and the whole static graph is launched once; "
        "without it the host schedules the graph in every step (TA tiling_schedule_optimize.md, typical_issues.md; CR). Legal for layouts "
        "other than TND (ops-transformer@c29bc10, prompt_flash_attention_tiling.cpp)",
    ),
    Option(
        "ge.topoSortingMode",
        "3",
        frozenset({"cann>=8.3"}),
        "StableRDFS: operators run in the order of the graph, in which the model calls them on every rank; those that GE adds "
        "are sorted in reverse depth-first order (TA topology_sorting_strategy.md; CR)",
    ),
    Option(
        KERNELS,
        "0",
        frozenset({PREBUILT}),
        "CANN's own binaries first: a first start does not compile hundreds of kernels, and needs no bisheng. torchair's graphs have 2, "
        "which compiles kernels of static shapes online (TA jit_compile.md; torchair/configs/experimental_config.py)",
    ),
)
"""Options besides `frozenInput`. torchair's own default of the memory policy, `ge.exec.staticMemoryPolicy=2`, is what CR runs with."""

LATER_ATTRIBUTES = (("MoeDistributeDispatchV2", "y_dtype", "cann>=9.0"),)
"""(operator, attribute, what the platform must have): attributes that torchair always writes, and that definitions of older releases lack.
They say what follows from other attributes there. ops-transformer@c29bc10 (8.5.0.alpha001), moe_distribute_dispatch_v2_def.cpp."""

FROZEN = "frozenInput"
"""torchair's option: 1 for each input whose address is the same in every call. Such an input is not updated between calls (TA
frozen_parameter.md; static_npu_graph_executor.cpp, UpdateInputsInner)."""


@dataclass(frozen=True)
class Operand:
    """An operand of a GE graph.

    Attributes:
        value: abstract.
        fixed: it is a parameter, a derived value or a pool, which lie where they are from loading on (device.py).
    """

    value: torch.Tensor
    fixed: bool


def drop_later_attributes(ops: Iterable[Any], platform: Platform) -> None:
    """Takes attributes that a platform's release does not know off its operators; a graph for no chip keeps all."""
    features = platform.features("ge")
    later = {(operator, attribute) for operator, attribute, needs in LATER_ATTRIBUTES if platform.chip and needs not in features}
    for op in ops:
        for operator, attribute in later:
            if op.type == operator and attribute in op.attr:
                del op.attr[attribute]


def graph_options(platform: Platform) -> dict[str, str]:
    """Options for every graph of a platform."""
    features = platform.features("ge")
    return {option.name: option.value for option in OPTIONS if option.needs <= features}


def other_kernels(options: Mapping[str, str]) -> dict[str, str]:
    """Options of a graph whose kernels come from the other place; torchair's graphs have 2, which compiles them online."""
    return {**options, KERNELS: "0" if options.get(KERNELS, "2") != "0" else "2"}


def operand_options(operands: Sequence[Operand], results: int, carried: Mapping[int, int]) -> dict[str, str]:
    """Options that say something of each operand and result, by number of its `Data` operator and of its output.

    Args:
        results: number of results, which come before the outputs that carry an operand's new value.
        carried: operand -> output that is bound to its memory.
    """
    options = {
        "ge.exec.outputReuseMemIndexes": ",".join(map(str, range(results))),
        "ge.exec.outputReuseInputMemIndexes": "|".join(f"{operand},{output}" for operand, output in carried.items()),
        FROZEN: ",".join(str(int(operand.fixed)) for operand in operands),
        "ge.inputHintShape": ";".join(f"{i}:{list(operand.value.shape)}" for i, operand in enumerate(operands)),
    }
    if not carried:
        del options["ge.exec.outputReuseInputMemIndexes"]
    return options

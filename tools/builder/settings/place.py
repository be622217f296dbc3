"""Settings that say where an artifact runs."""

from __future__ import annotations

from typing import Any

import click

from ....graphs.sizes import Mesh
from ....lowering.platform import CANN_RELEASES, KERNELS, OPERATOR_PACKAGES
from .record import Setting, by_row

TARGETS = ("cpu", "ascend-a3", "ascend-a2")
NPU_BACKENDS = ("ge", "aclgraph")


def _for_devices(plan: Any, value: object) -> object:
    """An argument of builds that are not for one rank of this machine."""
    return value if plan.mesh.size > 1 or not plan.target.local else ""


DEPLOYMENT = Setting(
    "deployment",
    "Published deployment to take target, mesh and sizes from; see `npucompile deployments`.",
    lambda plan: _for_devices(plan, plan.deployment),
    extra={"metavar": "ID"},
    recorded=lambda recorded: recorded.manifest.deployment or None,
    what=lambda value, recorded: f"It is built for the published deployment {value}.",
    explained=0,
)
PHASE = Setting(
    "phase",
    "One side of a disaggregated deployment.  [default: both]",
    lambda plan: _for_devices(plan, "" if plan.phase == "mixed" else plan.phase),
    legal=("prefill", "decode"),
    by=by_row,
    recorded=lambda recorded: recorded.argument("phase"),
    what=lambda value, recorded: f"It is the {value} side of the deployment.",
    explained=1,
)
TARGET = Setting(
    "target",
    "Machine to build for; it need not be present.  [default: cpu]",
    lambda plan: _for_devices(plan, plan.target.name),
    legal=TARGETS,
    by=by_row,
    recorded=lambda recorded: recorded.manifest.target,
    what=lambda value, recorded: f"It is for {value}.",
    change="graphs are lowered anew, for another machine",
    explained=2,
)
MESH = Setting(
    "mesh",
    "Ranks as dp groups of tp ranks, e.g. dp=8,tp=2.  [default: one, or the deployment's]",
    lambda plan: _for_devices(plan, str(plan.mesh) if plan.mesh.axes else ""),
    by=by_row,
    recorded=lambda recorded: recorded.manifest.mesh,
    what=lambda value, recorded: f"It runs on {recorded.ranks} ranks, mesh {value}." if recorded.ranks > 1 else "It runs on 1 rank.",
    change="more ranks in tp make a step shorter, more groups in dp take more requests",
    explained=3,
)
PREFILL_CP = Setting(
    "prefill-cp",
    "Ranks of a group that share a prompt's tokens in attention, and not its heads: 1, or all of tp, each with the whole cache.  "
    "[default: 1, or the deployment's]",
    lambda plan: plan.mesh.axis("tp") if plan.model.config.variant.sliced else "",
    legal=(1, None),
    extra={"metavar": "N"},
    by=by_row,
    recorded=lambda recorded: Mesh.parse(recorded.manifest.mesh).axis("tp") if "slices" in recorded.manifest.rules else None,
    what=lambda value, recorded: f"{value} ranks share the tokens of a prompt in attention.",
    change="a long prompt's attention takes less time, and each rank holds all heads and all of the cache",
    same=("--attn-cp-size",),
    otherwise={"--prefill-context-parallel-size": "its ranks come beside those of tp; legal is --prefill-cp with all ranks of a group"},
)
BACKEND = Setting(
    "backend",
    "inductor compiles for this CPU; eager serves uncompiled; ge and aclgraph lower for NPUs, to graphs that GE compiles or that are "
    "captured when they are loaded; null reports cost and memory only.  [default: the target's]",
    lambda plan: plan.backend,
    # Which of them a target runs is said by its row, which refuses others.
    extra={"type": click.Choice(("inductor", "eager", "null", *NPU_BACKENDS))},
    recorded=lambda recorded: recorded.manifest.backend,
    what=lambda value, recorded: f"Graphs are compiled by {value}.",
    change="the same partitioned graphs are compiled otherwise",
    explained=4,
)
CANN = Setting(
    "cann",
    "For NPUs: release of CANN to lower for.  [default: the target's]",
    lambda plan: plan.platform.cann if plan.platform.chip else "",
    legal=CANN_RELEASES,
    recorded=lambda recorded: recorded.manifest.platform.get("cann") or None,
    what=lambda value, recorded: f"Graphs are lowered for CANN {value}.",
    change="operators and attributes of another release are checked and used",
)
GE_KERNELS = Setting(
    "ge-kernels",
    "For GE: kernels are compiled online at the first start, or CANN's own are taken where there are any, which starts sooner.  "
    "[default: online]",
    lambda plan: plan.platform.kernels,
    legal=KERNELS,
    seldom=True,
    recorded=lambda recorded: recorded.manifest.platform.get("kernels") or None,
    what=lambda value, recorded: f"GE's kernels are {value}.",
    change="a first start compiles kernels, or takes those of CANN",
)
NO_OVERLAP = Setting(
    "no-overlap",
    "For NPUs: run operators one after the other. Else a part of a prompt's tokens travels to its experts while they compute another.",
    lambda plan: plan.platform.serial or None,
    extra={"is_flag": True, "default": None},
    seldom=True,
    recorded=lambda recorded: "" if recorded.manifest.platform.get("serial") else None,
    what=lambda value, recorded: "Operators of a graph run one after the other.",
    change="the same operators, with exchanges of experts on a stream beside the products or not",
)
PREFETCH_WEIGHTS = Setting(
    "prefetch-weights",
    "For NPUs: fetch weights of the next products into the cache while links carry messages, and HBM is idle.",
    lambda plan: plan.platform.prefetch or None,
    extra={"is_flag": True, "default": None},
    seldom=True,
    recorded=lambda recorded: "" if recorded.manifest.platform.get("prefetch") else None,
    what=lambda value, recorded: "Weights are fetched into the cache beside collectives.",
    change="the same operators, with weights that are in the cache or not when they are read",
)
PACKAGES = Setting(
    "operator-packages",
    f"For NPUs: packages with operators of their own that are installed where it runs, of {', '.join(OPERATOR_PACKAGES)}.",
    lambda plan: ",".join(plan.platform.packages) if plan.platform.chip else "",
    read=lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
    extra={"metavar": "LIST", "default": ""},
    recorded=lambda recorded: ",".join(recorded.manifest.platform.get("packages") or ()) or None,
    what=lambda value, recorded: f"Operators of {value} are used.",
    change="operators of the packages take the place of CANN's where they do more",
)

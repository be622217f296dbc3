"""Graphs for NPUs whose bytes, legality and costs are pinned as digests."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from support import ranks, tiny

from npucompile.graphs.types import Bucket, Mesh
from npucompile.lowering.ascend.cost.estimate import estimate
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.legality import check
from npucompile.lowering.ascend.legality.assumptions import assumptions
from npucompile.lowering.ascend.shipped import ENCODINGS
from npucompile.lowering.backend import backend
from npucompile.lowering.platform import CANN_RELEASES, OPERATOR_PACKAGES, Platform
from npucompile.models import registry
from npucompile.tools.builder.deployments import deployments
from npucompile.tools.builder.plan import Options, Plan, plan
from npucompile.tools.builder.stages import stage

MIXTURE = "mixture"
"""A random model of two layers, written where a case is planned."""
BACKENDS = ("ge", "aclgraph")
MESHES = ("", "tp=2", "dp=2,tp=2")
CONTEXT = 1024
"""Cached tokens of each request whose steps are costed."""


@dataclass(frozen=True)
class Case:
    """A plan, of which the smallest bucket of each kind is compared.

    Attributes:
        options: fields of `Options`.
        quick: whether `make test` compares it.
        kinds: of buckets.
        picture_rows: that its prompts may read.
    """

    name: str
    options: Mapping[str, Any] = field(repr=False)
    quick: bool = False
    kinds: tuple[str, ...] = ("prefill", "decode")
    picture_rows: int = 0


def _tiny() -> Iterator[Case]:
    for mesh in MESHES:
        for chosen in BACKENDS:
            options = {"model": MIXTURE, "mesh": mesh, "backend": chosen}
            yield Case(f"tiny {mesh or 'one'} {chosen}", options, quick=mesh == MESHES[-1])


def _releases() -> Iterator[Case]:
    """A mixture of experts with int4 weights for each release of CANN, with and without operator packages."""
    for release in CANN_RELEASES:
        for packages in ((), OPERATOR_PACKAGES):
            for chosen in BACKENDS:
                options = {"model": MIXTURE, "quantization": "w4a8", "cann": release, "operator_packages": packages, "backend": chosen}
                newest, oldest = (CANN_RELEASES[-1], OPERATOR_PACKAGES), (CANN_RELEASES[0], ())
                quick = (release, packages) == newest or ((release, packages) == oldest and chosen == "ge")
                yield Case(f"w4a8 cann {release} {'packages' if packages else 'plain'} {chosen}", options, quick)


def _published() -> Iterator[Case]:
    """Every published deployment at full size; those that differ in their buckets alone once."""
    known = set()
    for row in deployments().values():
        for phase in row.phases.values() if row.model in registry.presets() else ():
            mesh, drafts = str(phase.mesh), phase.num_speculative_tokens
            if (form := (row.model, row.target, row.quantization, mesh, phase.name, drafts)) not in known:
                known.add(form)
                kinds = ("prefill", "decode") if phase.name == "mixed" else (phase.name,)
                options = {"model": row.model, "deployment": row.id, "phase": None if phase.name == "mixed" else phase.name}
                yield Case(f"published {row.id} {phase.name}", options, kinds=kinds)


CAPTURED = {"qwen3.5-397b": OPERATOR_PACKAGES, "deepseek-v3.2": (), "qwen3-235b-a22b": ("vllm-ascend",), "qwen3-next-80b-a3b": ()}
"""Models whose first published deployment is also compared as captured graphs, with operator packages."""


def _captured() -> Iterator[Case]:
    for model, packages in CAPTURED.items():
        row = next(row for row in deployments().values() if row.model == model and row.phases)
        phase = next(iter(row.phases))
        kinds = ("prefill", "decode") if phase == "mixed" else (phase,)
        options = {"model": model, "deployment": row.id, "phase": None if phase == "mixed" else phase}
        options |= {"backend": "aclgraph", "operator_packages": packages}
        yield Case(f"captured {model}", options, kinds=kinds)


def _pictures() -> Iterator[Case]:
    """Graphs whose prompts may have pictures."""
    for chosen in BACKENDS:
        yield Case(f"tiny pictures {chosen}", {"model": MIXTURE, "backend": chosen}, picture_rows=33)
    full: dict[str, Any] = {"model": "qwen3.5-397b"}
    yield Case("pictures qwen3.5-397b", full, kinds=("prefill",), picture_rows=16385)
    captured = {"backend": "aclgraph", "operator_packages": OPERATOR_PACKAGES, "deployment": "qwen35-397b-a3x8-in3k5-out1k5-50ms"}
    yield Case("captured pictures qwen3.5-397b", full | captured, kinds=("prefill",), picture_rows=16385)


def cases() -> tuple[Case, ...]:
    """All cases, those of `make test` among them."""
    return (*_tiny(), *_releases(), *_published(), *_captured(), *_pictures())


@functools.cache
def _mixture(home: Path) -> Path:
    return Path(tiny.write_checkpoint(home / "mixture", seed=7, **ranks.NPU_SIZES))


def planned(case: Case, home: Path) -> Plan:
    """The plan of a case.

    Args:
        home: a directory that a model may be written in.
    """
    if case.options["model"] == MIXTURE:
        sizes = {"mesh": "dp=2,tp=2", "buckets": (2,), "max_model_len": 128, **case.options}
        made = tiny.planned_device(_mixture(home), **{name: value for name, value in sizes.items() if name != "model"})
    else:
        made = plan(Options(**case.options))
    return replace(made, limits=replace(made.limits, picture_rows=case.picture_rows)) if case.picture_rows else made


def buckets(case: Case, of: Plan) -> list[Bucket]:
    """The smallest bucket of each kind."""
    return [min(bucket for bucket in of.buckets if bucket.kind == kind) for kind in case.kinds]


def texts(case: Case, home: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """What is compared of each bucket of a case: by name of the bucket, and of what is compared."""
    of = planned(case, home)
    chosen = backend(of.backend)
    chosen.prepare(home)
    for bucket in buckets(case, of):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            staged = stage(of, bucket)
            made = chosen.compile(staged.lowered, cache_dir=home, threads=0)
            if case.picture_rows:
                chosen.prove(made, staged.partitioned, of.platform)
        data = made.data
        assert isinstance(data, bytes)
        yield bucket.name, {"file": data, **analyses(of.backend, of.platform, of.mesh, data)}


def analyses(chosen: str, own: Platform, mesh: Mesh, data: bytes) -> dict[str, bytes]:
    """What is said of a graph, besides its bytes."""
    made = ENCODINGS[chosen].decode(data)
    cost = estimate(made, parameters(own.chip), mesh, CONTEXT, own)
    legality = [_legality(check.examine(made, platform), platform) for platform in platforms(own)]
    return {
        "cost": _json({"as dict": cost.as_dict(), "all": repr(cost)}),
        "legality": "\n".join(line for lines in legality for line in lines).encode(),
    }


def platforms(own: Platform) -> tuple[Platform, ...]:
    """What graphs are checked for: their own platform, and the oldest and the newest that the table speaks of."""
    oldest = Platform("ascend910_93", CANN_RELEASES[0])
    newest = Platform("ascend910b", CANN_RELEASES[-1], OPERATOR_PACKAGES)
    return tuple(dict.fromkeys((own, oldest, newest)))


def _legality(checked: check.CheckedGraph, platform: Platform) -> list[str]:
    named = f"Platform(chip={platform.chip!r}, cann={platform.cann!r}, packages={platform.packages!r})"
    lines = [named, *(f"{copies} x {violation} sizes={violation.sizes}" for violation, copies in checked.pairs())]
    return [*lines, *(json.dumps(asdict(row)) for row in assumptions([checked], platform))]


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()


def digest(data: bytes) -> str:
    """The first half of a sha256."""
    return hashlib.sha256(data).hexdigest()[:32]

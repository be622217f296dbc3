"""Which switch, off alone, makes what fails in a bucket go away: a bring-up of the bucket for each of them, in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ....graphs.errors import SpecError
from ....lowering.artifact.artifact import Artifact
from ....lowering.ascend.shipped import shipped_graph
from ....lowering.platform import ONLINE, PREBUILT
from ....lowering.switches import AIV, BUCKETS, CAPTURE, KERNELS, OVERLAP, SWITCHES
from ...ranks.environment import EXPANSION_MODE, under
from ...ranks.executors import with_few_buckets
from . import results
from .findings import Findings
from .results import ALTERNATION, BringupFailure, Wanted
from .rungs import Bringup

NAME = "bisect.json"
"""File of a report."""
PASSES, FAILS = "passes", "fails"


@dataclass(frozen=True)
class BisectTrial:
    """The bucket, run once.

    Attributes:
        off: the switch that was off; "" in the first one.
        rung: which ran it, "buckets" or "alternation".
        outcome: `PASSES`, `FAILS`, or why it was not run.
    """

    off: str
    rung: str
    outcome: str
    seconds: float = 0.0
    failures: Sequence[BringupFailure] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "instead": SWITCHES.get(self.off, "as built"), "failures": [failure.as_dict() for failure in self.failures]}

    @property
    def line(self) -> str:
        """As text."""
        name, ran = f"without {self.off}" if self.off else "as built", self.outcome in (PASSES, FAILS)
        said = "".join(f"\n    {failure.what}: {failure.message}" for failure in self.failures[:1])
        return f"{self.rung:<12} {name:<18} {self.outcome}" + (f" {self.seconds:8.1f} s{said}" if ran else "")


def bisect(bringup: Bringup, bucket: str) -> Iterator[BisectTrial]:
    """Runs the bucket, then all buckets in turns if nothing was wrong alone; where one of them fails, again with each switch off in turn.

    Raises:
        SpecError: the artifact has no such bucket, or a launcher started the ranks, which join once.
    """
    names = [entry.bucket.name for entry in bringup.artifact.manifest.graphs]
    if bucket not in names:
        raise SpecError(f"--bisect {bucket}: there is no such bucket; legal are {', '.join(names)}")
    if bringup.config:
        raise SpecError(
            "--bisect starts the ranks anew for each switch; where a launcher does, type --only buckets with --off SWITCH instead"
        )
    for rung in (results.BUCKETS, ALTERNATION):
        yield (first := _trial(bringup, bucket, rung))
        if first.outcome == FAILS:
            for switch in SWITCHES:
                reason = without_part(bringup, bucket, switch)
                yield BisectTrial(switch, rung, reason) if reason else _trial(bringup, bucket, rung, switch)
            return


def _trial(bringup: Bringup, bucket: str, rung: str, switch: str = "") -> BisectTrial:
    settings = replace(bringup.settings, off=bringup.settings.off | {switch} - {""}, bucket=bucket)
    wanted = Wanted({rung: (bucket,) if rung == results.BUCKETS else ()}, whole=True)
    environment = under(settings.off, bringup.environment)
    run = replace(bringup, settings=settings, environment=environment, wanted=wanted, findings=Findings(), resume=False)
    began = time.monotonic()
    failures = [failure for result in run.run() for failure in result.failures]
    return BisectTrial(switch, rung, PASSES if run.passed else FAILS, time.monotonic() - began, failures)


def without_part(bringup: Bringup, bucket: str, switch: str) -> str:
    """Why a switch changes nothing of an artifact; "" where it may."""
    artifact, backend = bringup.artifact, bringup.artifact.manifest.backend
    graph = shipped_graph(artifact, next(entry for entry in artifact.manifest.graphs if entry.bucket.name == bucket))
    reasons = {
        AIV: f"{EXPANSION_MODE} is not set" if EXPANSION_MODE not in bringup.environment else "",
        BUCKETS: "there are no others" if with_few_buckets(artifact, bucket).manifest.graphs == artifact.manifest.graphs else "",
        OVERLAP: "" if graph is not None and graph.overlaps else "its operators run one after the other",
        CAPTURE: "GE captures nothing" if backend == "ge" else "",
        KERNELS: "GE has no part in captured graphs" if backend != "ge" else "",
    }
    return "off already" if switch in bringup.settings.off else reasons.get(switch, "")


def advice(artifact: Artifact, bucket: str, trials: Sequence[BisectTrial]) -> list[str]:
    """What the trials say, and what to type next."""
    if not any(trial.outcome == FAILS for trial in trials):
        return [f"nothing is wrong with {bucket}, alone and in turns: npucompile bringup {artifact.path} tries everything"]
    helps = [trial.off for trial in trials if trial.off and trial.outcome == PASSES]
    if helps:
        return [f"without {switch} nothing fails: {SWITCHES[switch]}. {_go_on(artifact, switch)}" for switch in helps]
    other, parts = "aclgraph" if artifact.manifest.backend == "ge" else "ge", f"--only operators:{bucket} --only layers:{bucket}"
    return [
        f"no switch helps alone; its operators and layers: npucompile bringup {artifact.path} {parts}",
        f"the same buckets by other means: {_build(artifact, f'--backend {other}')}",
    ]


def _go_on(artifact: Artifact, switch: str) -> str:
    serve = f"npucompile serve {artifact.path} --off {switch}"
    if switch == OVERLAP:
        return f"{serve}, or for good: {_build(artifact, '--no-overlap')}"
    if switch != KERNELS:
        return serve
    kernels = ONLINE if artifact.manifest.platform.get("kernels") == PREBUILT else PREBUILT
    return f"{serve}, or for good: {_build(artifact, f'--ge-kernels {kernels}')}"


def _build(artifact: Artifact, option: str) -> str:
    """The line that builds it again with another value of an option."""
    words, name = list(artifact.manifest.build_arguments), option.split()[0]
    if name in words:
        del words[words.index(name) : words.index(name) + 2]
    return f"npucompile build {' '.join(words)} {option}"

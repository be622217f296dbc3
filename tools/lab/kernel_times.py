"""Judges the cost model's time of single operators by profiles, and fits `KernelTime` to half of their forms.

An operator's tensors lie in the cache where a launch's fit, as in a step; weights of products in HBM. Times are compared without the gap
before a launch, which a profile does not count.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...graphs.errors import LoweringError
from ...lowering.ascend.cost.parameters import Parameters, parameters
from ...lowering.ascend.cost.timing import Topology, duration
from ...lowering.ascend.cost.work import works_of
from ...lowering.ascend.operators.node import Node
from ...lowering.ascend.operators.table import BY_TYPE
from ...lowering.ascend.operators.work import AS_MOST, Facts, KernelTime
from .profiles import Profile, read

ENOUGH, MANY = 4, 20
"""Forms of an operator that are fitted: all of them, or where there are many half, and the others judge."""
LARGE_S = 3e-6
_FIXED_US = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0)
_SLOWDOWNS = tuple(round(math.exp(math.log(0.5) + i * math.log(120 / 0.5) / 60), 3) for i in range(61))
_ALONE = Topology({"world": 1}, frozenset())
_FEW_CORES = 20 / 24


def speeds_of(chip: str) -> Parameters:
    """The speeds of a chip of profiles. 910B4 has 20 cores of 1.65 GHz: msopmodeling, tilesim/core/config/arc_config/910B4."""
    if chip != "910B4":
        return parameters("ascend910_93" if chip == "A3" else "ascend910b")
    full, clock = parameters("ascend910b"), 1.65 / 1.8
    rates = {name: getattr(full, name) * _FEW_CORES * clock for name in ("bf16_ops_per_s", "int8_ops_per_s", "vector_ops_per_s")}
    return replace(full, cores=20, cache_bytes_per_s=full.cache_bytes_per_s * _FEW_CORES, **rates)


@dataclass(frozen=True)
class Estimated:
    """A profile beside the model.

    Attributes:
        launch_s, busy_s: of the model, without what its record says of the kernel.
    """

    profile: Profile
    launch_s: float
    busy_s: float

    def ratio(self, time: KernelTime, gap_s: float) -> float:
        """Measured over modelled."""
        fixed = self.launch_s - gap_s if time.fixed_s is None else time.fixed_s
        return self.profile.seconds / (fixed + self.busy_s * time.slowdown)

    @property
    def fitted(self) -> bool:
        """Whether the form is of the half that is fitted; a coin that its operands toss."""
        return hashlib.sha256(repr((self.profile.inputs, self.profile.outputs)).encode()).digest()[0] % 2 == 0


@dataclass(frozen=True)
class Judged:
    """How far an operator is off: median, tenth and ninetieth percent of measured over modelled, of forms that were not fitted if there are
    `MANY`.

    Attributes:
        type: of the operator.
        forms, launches: of all its profiles.
        plain, recorded, fit: without a record of its own, with it, and with `time`.
        time: fitted; None where forms are too few.
    """

    type: str
    forms: int
    launches: int
    plain: tuple[float, float, float]
    recorded: tuple[float, float, float]
    fit: tuple[float, float, float] | None
    time: KernelTime | None


def judge(paths: Sequence[Path], chip: str) -> tuple[list[Judged], Counter[str]]:
    """Every operator whose work follows from its operands, and how many rows were not judged, by reason.

    Raises:
        SpecError: there are no profiles.
    """
    profiles, left = read(paths, chip)
    by_type = defaultdict[str, list[Estimated]](list)
    for profile in profiles:
        try:
            form = estimated(profile)
        except (LoweringError, LookupError, ValueError) as error:
            left[f"{profile.type}: {error}"[:90]] += profile.launches
        else:
            by_type[profile.type].append(form)
    return [_judged(kind, own) for kind, own in sorted(by_type.items())], left


def estimated(profile: Profile) -> Estimated:
    """The model's time of a form.

    Raises:
        LookupError: the operator is not known.
        LoweringError: its work does not follow from its operands.
    """
    if profile.type not in BY_TYPE:
        raise LookupError("no operator of ours")
    given = {f"in{i}:0": tensor for i, tensor in enumerate(profile.inputs)}
    results = {f"op:{i}": tensor for i, tensor in enumerate(profile.outputs)}
    node = Node(
        "op", profile.type, input=tuple(given), slots=tuple(f"x{i}" for i in range(len(given))), results=len(results),
    )  # fmt: skip
    speeds = speeds_of(profile.chip)
    weights = {"in1:0": "in1:0"} if "MatMul" in profile.type or "Matmul" in profile.type else {}
    facts = Facts(given | results, weights, frozenset(), 0, _ALONE.groups, speeds.cache_bytes, speeds.expert_skew, speeds.expert_imbalance)
    times = [duration(replace(work, time=AS_MOST), speeds, _ALONE) for work in works_of(node, facts)]
    return Estimated(profile, sum(time.launch_s for time in times), sum(time.busy_s for time in times))


def fit(forms: Sequence[Estimated], gap_s: float) -> KernelTime:
    """The time of a kernel with the smallest mean error of the logarithm, on a grid: few forms say no more.

    Forms that hardly work say nothing of a slowdown.
    """
    large = any(form.busy_s > LARGE_S for form in forms)
    choices = (KernelTime(us * 1e-6, slowdown) for us, slowdown in itertools.product(_FIXED_US, _SLOWDOWNS if large else (1.0,)))
    return min(choices, key=lambda time: sum(abs(math.log(form.ratio(time, gap_s))) for form in forms))


def _judged(kind: str, own: Sequence[Estimated]) -> Judged:
    gap_s, many = parameters("ascend910_93").launch_gap_s, len(own) >= MANY
    seen, unseen = ([form for form in own if not many or form.fitted is half] for half in (True, False))
    time = fit(seen, gap_s) if len(own) >= ENOUGH else None

    def spread(time: KernelTime) -> tuple[float, float, float]:
        ratios = sorted(form.ratio(time, gap_s) for form in unseen)
        return statistics.median(ratios), ratios[len(ratios) // 10], ratios[len(ratios) * 9 // 10]

    launches = sum(form.profile.launches for form in own)
    fitted = spread(time) if time else None
    return Judged(kind, len(own), launches, spread(AS_MOST), spread(BY_TYPE[kind].time), fitted, time)


def lines(judged: Sequence[Judged], left: Counter[str]) -> list[str]:
    """The table for the terminal."""
    head = f"{'measured / modelled':<24} {'forms':>5} {'launches':>8}   {'by class':<18} {'by its record':<18} fit"
    rows = [head]
    for each in judged:
        time = f"{each.time.fixed_s * 1e6:.1f} us, x {each.time.slowdown:.2f}" if each.time and each.time.fixed_s else ""
        spreads = "".join(f" {_said(spread):<18}" for spread in (each.plain, each.recorded, each.fit))
        rows.append(f"{each.type:<24} {each.forms:>5} {each.launches:>8}  {spreads} {time}".rstrip())
    if left:
        rows += [f"not judged: {sum(left.values())} rows", *(f"  {count:>6}  {why}" for why, count in left.most_common(12))]
    return [*rows, f"median (10 % .. 90 %); from {MANY} forms on of those that were not fitted"]


def as_dict(judged: Sequence[Judged], left: Counter[str]) -> dict[str, object]:
    """Plain values."""
    operators = {each.type: {**asdict(each), "time": each.time._asdict() if each.time else None} for each in judged}
    return {"operators": operators, "not_judged": dict(left)}


def _said(spread: tuple[float, float, float] | None) -> str:
    return "" if spread is None else f"{spread[0]:.2f} ({spread[1]:.2f}..{spread[2]:.2f})"

"""What a rung found: failures with the assumption that each refutes, timings, and what was left out; of each case, and of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from ....graphs.errors import SpecError
from ....lowering.device_error import code_of, with_way_out
from .device_graph import Host
from .risks import ASSUMPTIONS

ENVIRONMENT, OPERATORS, LAYERS, COLLECTIVES = "environment", "operators", "layers", "collectives"
BUCKETS, ALTERNATION, SERVE, HANDOVERS = "buckets", "alternation", "serve", "handovers"
RUNGS = (ENVIRONMENT, OPERATORS, LAYERS, COLLECTIVES, BUCKETS, ALTERNATION, SERVE, HANDOVERS)
"""Names in order. Collectives come before whole buckets, which contain them."""
GOLDEN = "golden"
ALL = (*RUNGS, GOLDEN)
"""With the rung that is run where there is a file of golden tokens."""
PARTS: Mapping[str, tuple[str, ...]] = {
    LAYERS: (OPERATORS,),
    BUCKETS: (OPERATORS, LAYERS, COLLECTIVES),
    ALTERNATION: (OPERATORS, LAYERS, COLLECTIVES, BUCKETS),
    SERVE: (OPERATORS, LAYERS, COLLECTIVES, BUCKETS, ALTERNATION),
    HANDOVERS: (BUCKETS, SERVE),
    GOLDEN: (OPERATORS, LAYERS, COLLECTIVES, BUCKETS, ALTERNATION, SERVE),
}
"""The rungs that run parts of what a rung runs: where one of them failed, that may be why this one does."""


@dataclass(frozen=True)
class BringupFailure:
    """Something that is wrong on a device.

    Attributes:
        assumption: short name of the documented assumption that it refutes (risks.py).
        what: the operator, layer, bucket or collective.
        message: both sides of the disagreement.
        code: the runtime's (`device_error.code_of`), or how the process with the device ended (`ChildError.code`).
    """

    assumption: str
    what: str
    message: str
    code: str = ""

    @classmethod
    def of(cls, assumption: str, what: str, error: BaseException, where: str = "") -> BringupFailure:
        """That of an error.

        Args:
            where: stands before the message.
        """
        text = str(error) or type(error).__name__
        return cls(assumption, what, with_way_out(f"{where}{text}"), code_of(text) or getattr(error, "code", ""))

    def as_dict(self) -> dict[str, str]:
        """Plain values, with the assumption's heading in docs/on-hardware.md."""
        return {**asdict(self), "heading": ASSUMPTIONS[self.assumption]}


@dataclass(frozen=True)
class Timing:
    """How long something took on the device.

    Attributes:
        what: operator, layer or bucket.
        shapes: of its operands.
        seconds: from the launch until the device had finished, as the host sees it.
        moved_bytes: operands and results, each read or written once.
        estimate_s: of the cost model, or of an operator of a captured graph of its bytes; None where there is none.
    """

    what: str
    shapes: str
    seconds: float
    moved_bytes: int = 0
    estimate_s: float | None = None


@dataclass(frozen=True)
class Wanted:
    """What is to be run.

    Attributes:
        cases: for each rung parts of the names of its cases; none takes all.
        whole: whether they are whole names.
    """

    cases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict.fromkeys(RUNGS, ()))
    whole: bool = False

    @classmethod
    def of(cls, texts: Iterable[str]) -> Wanted:
        """What somebody typed: names of rungs, or `RUNG:CASE`; nothing is everything.

        Raises:
            SpecError: there is no such rung.
        """
        cases: dict[str, tuple[str, ...]] = {}
        for text in texts:
            rung, _, case = text.partition(":")
            if rung not in ALL:
                raise SpecError(f"--only {text}: {rung!r} is no rung; legal are {', '.join(ALL)}, and RUNG:CASE")
            cases[rung] = (*cases.get(rung, ()), *([case] if case else []))
        return cls(cases) if cases else cls()

    def takes(self, rung: str, case: str) -> bool:
        """Whether a case is to be run."""
        texts = self.cases.get(rung)
        return texts is not None and (not texts or any(text == case or (text in case and not self.whole) for text in texts))


class Judgement(NamedTuple):
    """What running one case came to.

    Attributes:
        spent: whether the device can run no more, as after a step that failed.
    """

    failures: Sequence[BringupFailure] = ()
    timings: Sequence[Timing] = ()
    facts: Mapping[str, Any] = {}
    left_out: Sequence[str] = ()
    spent: bool = False


class DeviceCase(Protocol):
    """Something that is run on one device by itself; it is pickled on its way to the process that has the device."""

    @property
    def name(self) -> str:
        """Of all cases of a rung."""
        ...

    @property
    def assumption(self) -> str:
        """What it refutes if it ends the process."""
        ...

    def judge(self, host: Host) -> Judgement:
        """Runs it and compares."""
        ...


@dataclass(frozen=True)
class BringupFinding:
    """What a case came to; or, without the name of a case, what a rung says of itself when all of its cases have been judged."""

    rung: str
    case: str
    seconds: float = 0.0
    failures: Sequence[BringupFailure] = ()
    timings: Sequence[Timing] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BringupFinding:
        """The inverse of `asdict`."""
        parts = {"failures": [BringupFailure(**v) for v in values["failures"]], "timings": [Timing(**v) for v in values["timings"]]}
        return cls(**{**values, **parts})


@dataclass
class RungResult:
    """One rung.

    Attributes:
        name: of the rung.
        seconds: that it took.
        facts: what it found out, and how much it ran.
        left_out: what it did not run, and why.
        finished: whether all of its cases were judged.
    """

    name: str
    seconds: float = 0.0
    failures: list[BringupFailure] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    finished: bool = True

    @classmethod
    def of(cls, rung: str, findings: Iterable[BringupFinding]) -> RungResult:
        """All findings of a rung; numbers that several cases found out are added up."""
        result = cls(rung, finished=False)
        for finding in findings:
            result.seconds += finding.seconds
            result.failures += finding.failures
            result.timings += finding.timings
            result.left_out += finding.left_out
            for name, value in finding.facts.items():
                result.facts[name] = result.facts.get(name, 0) + value if isinstance(value, int) else value
            result.finished |= not finding.case
        return result

    @property
    def passed(self) -> bool:
        """Whether all was judged and nothing was wrong."""
        return self.finished and not self.failures

    def explained_by(self, others: Iterable[RungResult]) -> list[str]:
        """Rungs that failed and ran parts of what this one runs."""
        return [other.name for other in others if self.failures and other.failures and other.name in PARTS.get(self.name, ())]

    def as_dict(self) -> Mapping[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "passed": self.passed,
            "finished": self.finished,
            "seconds": self.seconds,
            "failures": [failure.as_dict() for failure in self.failures],
            "timings": [asdict(timing) for timing in self.timings],
            "facts": self.facts,
            "left_out": self.left_out,
        }

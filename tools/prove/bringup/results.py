"""What a rung found: failures with the assumption that each refutes, timings, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .risks import ASSUMPTIONS


@dataclass(frozen=True)
class Failure:
    """Something that is wrong on a device.

    Attributes:
        assumption: short name of the documented assumption that it refutes (risks.py).
        what: the operator, layer, bucket or collective.
        message: both sides of the disagreement.
    """

    assumption: str
    what: str
    message: str

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
        estimate_s: of the cost model; None where it has none.
    """

    what: str
    shapes: str
    seconds: float
    moved_bytes: int = 0
    estimate_s: float | None = None


@dataclass
class RungResult:
    """One rung.

    Attributes:
        name: of the rung.
        seconds: that it took.
        facts: what it found out, and how much it ran.
        left_out: what it did not run, and why.
    """

    name: str
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.failures

    def as_dict(self) -> Mapping[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "passed": self.passed,
            "seconds": self.seconds,
            "failures": [failure.as_dict() for failure in self.failures],
            "timings": [asdict(timing) for timing in self.timings],
            "facts": self.facts,
            "left_out": self.left_out,
        }

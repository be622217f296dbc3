"""The parts of lowered graphs: buckets of a kind share those of one executable, where the backend compiles kinds."""

from __future__ import annotations

from ...graphs.errors import NpucompileError
from ...graphs.types import Bucket
from ...lowering.backend import GraphKind, GraphParts, backend
from ...lowering.lower import LoweredProgram
from ..progress import Progress
from .planned import Plan
from .pool import THREADS
from .stages import stage


class Kinds:
    """The kinds of steps that a build has met so far.

    Attributes:
        any_size: the buckets whose parts are those of their kind, so that their executable runs steps of any size.
    """

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._known = dict[tuple[Bucket, ...], GraphKind | None]()
        self.any_size = set[Bucket]()

    def parts(self, lowered: LoweredProgram) -> GraphParts | None:
        """The parts to compile for a bucket; None where its graph is compiled as one. A graph that is none of its kind is compiled for
        itself, and the build says so."""
        bucket, chosen = lowered.bucket, backend(self._plan.backend)
        assert isinstance(bucket, Bucket)
        if samples := chosen.samples(bucket):
            if samples not in self._known:
                self._known[samples] = self._common(samples)
            kind = self._known[samples]
            if kind and kind.holds(lowered):
                self.any_size.add(bucket)
                return kind.parts
            if kind:
                self._progress.say(f"{bucket.name} is compiled for itself: its graph differs from others of its kind in more than sizes")
        return chosen.parts(lowered, threads=THREADS)

    def _common(self, samples: tuple[Bucket, ...]) -> GraphKind | None:
        chosen = backend(self._plan.backend)
        try:
            return chosen.kind([stage(self._plan, bucket).lowered for bucket in samples], threads=THREADS)
        except NpucompileError as error:
            self._progress.say(f"{samples[0].kind} buckets are compiled one by one: {error}")
            return None

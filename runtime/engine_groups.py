"""Engines of dp groups that share no collective: each steps by itself, and all together are to a server what one engine is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..graphs.errors import RequestError
from ..graphs.types import Mesh, Rules
from ..lowering.artifact.manifest import Manifest
from .delivery import Sink
from .distributed.sharded_executor import ShardedExecutor
from .engine import Engine
from .executor import Executor
from .histogram import HistogramSnapshot
from .request import FinishEvent, ParkedEvent, Request

OF_THE_PROCESS = ("compiles_after_ready_total", "backends")
"""Numbers that all engines of a process have in common."""


def groups_apart(manifest: Manifest) -> bool:
    """Whether there are several dp groups, and nothing is split over them: as in all dense models, none waits for another."""
    mesh, rules = Mesh.parse(manifest.mesh), Rules.of(manifest.rules)
    return mesh.axis("dp") > 1 and all("dp" not in axes for _, axes in rules.table)


class EngineGroups:
    """The interface of `Engine` over one for each dp group.

    A request goes, of the groups with the fewest requests or at most half as many again and one, to that which knows most of its prompt,
    as within one engine (`scheduler.advance.submit`).

    Attributes:
        engines: of the groups, in their order.
        executor: of all groups.
    """

    def __init__(self, engines: Sequence[Engine], executor: Executor) -> None:
        self.engines, self.executor = tuple(engines), executor
        # A request is looked for in all engines before it goes into one.
        self._placing = threading.Lock()

    @staticmethod
    def from_loader(load_executor: Callable[[], Executor], on_failure: Callable[[], None] = lambda: None, **settings: Any) -> EngineGroups:
        """As `Engine.from_loader`, on whose thread the first group is stepped, which is that of this process.

        Args:
            load_executor: returns a `ShardedExecutor`.
            on_failure: called once for each group.
        """
        loaded = list[ShardedExecutor]()

        def load() -> Executor:
            executor = load_executor()
            assert isinstance(executor, ShardedExecutor)
            loaded.extend((executor, *executor.of_groups()))
            return loaded[1]

        first = Engine.from_loader(load, on_failure, **settings)
        whole, _, *executors = loaded
        others = [Engine(executor, on_failure=on_failure, **settings) for executor in executors]
        for engine in others:
            engine.start()
        return EngineGroups([first, *others], whole)

    def submit(self, request: Request, sink: Sink) -> None:
        """See `Engine`."""
        with self._placing:
            if any(engine.has(request.id) for engine in self.engines):
                raise RequestError(f"id {request.id!r} is the id of a live request; legal is one that is not", param="id")
            self._engine_for(request).submit(request, sink)

    def hold(self) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.hold()

    def release(self) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.release()

    def cancel(self, *request_ids: str) -> bool:
        """See `Engine`."""
        return any([engine.cancel(*request_ids) for engine in self.engines])

    def landed(self, request_id: str, *, filled: bool = True) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.landed(request_id, filled=filled)

    def on_parked(self, told: Callable[[ParkedEvent], None]) -> None:
        """See `Engine`; to the engine of a group it is the only one."""

        def told_of(group: int) -> Callable[[ParkedEvent], None]:
            return lambda event: told(event._replace(group=group))

        for group, engine in enumerate(self.engines):
            engine.on_parked(told_of(group))

    def flush_prefix_cache(self) -> bool:
        """See `Engine`."""
        return all([engine.flush_prefix_cache() for engine in self.engines])

    def stop(self, *, drain: bool = True) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.refuse("it is stopping")
        for engine in self.engines:
            engine.stop(drain=drain)

    def give_up(self, message: str) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.give_up(message)

    @property
    def failure(self) -> str | None:
        """Of the first engine that has one: the ranks of all end with those of one."""
        return next((engine.failure for engine in self.engines if engine.failure is not None), None)

    @property
    def alive(self) -> bool:
        """Whether all take requests."""
        return all(engine.alive for engine in self.engines)

    @property
    def step_age_s(self) -> float:
        """Of the oldest call of `step`."""
        return max(engine.step_age_s for engine in self.engines)

    @property
    def on_end(self) -> Callable[[FinishEvent], None]:
        """See `Engine`; by the threads of all."""
        return self.engines[0].on_end

    @on_end.setter
    def on_end(self, told: Callable[[FinishEvent], None]) -> None:
        for engine in self.engines:
            engine.on_end = told

    def stats(self) -> dict[str, Any]:
        """Those of the engines together; what is by dp group is numbered by engine."""
        return merged([engine.stats() for engine in self.engines])

    def _engine_for(self, request: Request) -> Engine:
        loads = [engine.load for engine in self.engines]
        most = min(loads)[0] * 3 // 2 + 1
        known = [engine.known_pages(request) if load[0] <= most else 0 for engine, load in zip(self.engines, loads, strict=True)]
        return self.engines[min(range(len(loads)), key=lambda group: (-known[group], loads[group]))]


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of engines of one dp group each, as one engine of all groups would have them."""
    return {name: _merged(name, [part[name] for part in parts]) for name in parts[0]}


def _merged(name: str, values: Sequence[Any]) -> Any:
    if name in OF_THE_PROCESS:
        return values[0]
    if name.startswith("dp_"):
        return {group: value[0] for group, value in enumerate(values)}
    if name == "kv_cache_usage_perc":
        return sum(values) / len(values)
    if name == "histograms":
        return {each: _added([value[each] for value in values]) for each in values[0]}
    if isinstance(values[0], Mapping):
        return {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(key for value in values for key in value)}
    return sum(values)


def _added(histograms: Sequence[HistogramSnapshot]) -> HistogramSnapshot:
    counts = tuple(map(sum, zip(*(histogram.counts for histogram in histograms), strict=True)))
    return HistogramSnapshot(histograms[0].bounds, counts, sum(histogram.total for histogram in histograms))

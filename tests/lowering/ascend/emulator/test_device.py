"""lowering/ascend/emulator/device.py: a model on emulated devices is, bit for bit, what the interpreter computes for all its ranks."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fleets
from support.emulated import DeviceGraph, Machine, on_device, opened

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.spmd.partition import PartitionedProgram
from npucompile.graphs.types import Bucket, Mesh
from npucompile.lowering import device as protocol
from npucompile.lowering.ascend import prefetch
from npucompile.lowering.ascend.acl_graph.file import AclFile
from npucompile.lowering.ascend.acl_graph.make import acl_file
from npucompile.lowering.ascend.acl_graph.multi_stream import with_second_stream
from npucompile.lowering.ascend.emulator.device import EmulatedDevice, engine, open_device
from npucompile.lowering.ascend.ge_file import GeFile, encode, messages
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.lowered import lower
from npucompile.lowering.ascend.shipped import CAPTURED, GE
from npucompile.lowering.ascend.toolchain import harness
from npucompile.lowering.ascend.toolchain.harness import Torchair
from npucompile.lowering.platform import Platform
from npucompile.models.variant import Variant

A3 = Platform("ascend910_93", "9.1", prefetch=True)


@pytest.mark.parametrize("backend", ["ge", "aclgraph"])
@pytest.mark.parametrize(("mesh", "experts"), [("tp=2", False), ("dp=2,tp=2", True)])
@pytest.mark.short_cases("tp=2-False-aclgraph")
def test_a_model_on_devices_is_the_model_of_the_interpreter(
    ta: Torchair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, mesh: str, experts: bool
) -> None:
    """Prefill and steps with drafts that are accepted, rejected or the model's own: outputs and state are equal in every bit; of captured
    graphs, which replay decode steps, floats but for the order in which this machine's products sum: it may depend on where a tensor
    lies. Weights of any size are fetched beside collectives."""
    monkeypatch.setattr(prefetch, "LEAST_BYTES", 1)
    where, machines = Mesh.parse(mesh), list[Machine]()
    files: dict[Bucket, GeFile | AclFile] = {}

    def shipped(partitioned: PartitionedProgram) -> GeFile | AclFile:
        if (bucket := partitioned.program.bucket) not in files:
            lowered = lower(partitioned, backend=backend)
            if backend == "ge":
                files[bucket] = prefetch.in_ge(link(lowered.graph, lowered.signature, ta), where, A3)
                fetched = GE.census(files[bucket]).get("Cmo", 0)
            else:
                made = acl_file(lowered.graph, lowered.signature, captured=bucket.kind == "decode")
                files[bucket] = prefetch.in_captured(with_second_stream(made, where, A3), where, A3)
                fetched = CAPTURED.census(files[bucket]).get("npu.npu_prefetch.default", 0)
            assert fetched
        return files[bucket]

    def machine(file: GeFile | AclFile, mesh: Mesh) -> Machine:
        machines.append(Machine(tmp_path, file, mesh))
        return machines[-1]

    model = fleets.model(Variant(grouped=True) if experts else Variant(), experts=experts)
    interpreted = fleets.Fleet(model, where, form=shipped, drafts=2)
    emulated = fleets.Fleet(model, where, form=shipped, machine=machine, drafts=2)
    live = (2,) * where.axis("dp")
    serving, truths = fleets.Serving(2, 2, live), fleets.answers(model, 2, live, 9)
    for bucket, inputs in serving.steps(2):
        for group, truth in enumerate(truths if bucket.kind == "decode" else ()):
            for pool in (pool for fleet in (interpreted, emulated) for pool in fleet.request_slots(group)):
                serving.force(group, pool, truth)
        want, got = interpreted.step(bucket, inputs), emulated.step(bucket, inputs)
        for one, other in ((want, got), (interpreted.state, emulated.state)):
            for a, b in zip(one, other, strict=True):
                for x, y in zip(*(list(v.values()) if isinstance(v, dict) else v for v in (a, b)), strict=True):
                    close = 1e-5 * (backend == "aclgraph" and x.is_floating_point())
                    torch.testing.assert_close(x, y, rtol=close, atol=close / 10, equal_nan=True)
        serving.commit(bucket, inputs, want)
    for used in machines:
        used.close()
    assert [[row == truth[: len(row)] for row, truth in zip(*pair, strict=True)] for pair in zip(serving.output, truths, strict=True)] == [
        [True] * 2
    ] * len(live)


def doubled(**engine_options: str) -> GeFile:
    hand = DeviceGraph()
    x = hand.operand(0, "f32[2]", "inputs.x")
    return hand.file(hand.op("Add", {"x1": x, "x2": x}, "sum", ["f32[2]"]), **engine_options)


def test_it_is_what_the_protocol_says(device: EmulatedDevice, tmp_path: Path) -> None:
    for part, kind in (
        (device, protocol.Device),
        (device.record(), protocol.Event),
        (opened(device, doubled(), tmp_path), protocol.DeviceExecutable),
    ):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                assert list(inspect.signature(getattr(part, name)).parameters) == list(inspect.signature(member).parameters)[1:], name
    assert (device.kind, device.name) == ("emulated", "emulated:0")
    assert protocol.missing("emulated") is None
    opened_by_kind = protocol.open_device("emulated", 4)
    assert opened_by_kind.name == "emulated:4"
    opened_by_kind.close()


@pytest.mark.usefixtures("ta")
def test_the_engine_has_the_calls_of_torchairs(device: EmulatedDevice) -> None:
    real = harness.importlib.import_module("torchair.ge._ge_graph").GeGraph
    graph = engine(device._state).graph(serialized_model_def=doubled().graph, name="one")
    for name in ("load", "compile", "run"):
        theirs, ours = (list(inspect.signature(getattr(owner, name)).parameters.values()) for owner in (real, type(graph)))
        assert [(p.name, p.kind, p.default in (inspect.Parameter.empty, p.default)) for p in theirs] == [
            (p.name, p.kind, p.default in (inspect.Parameter.empty, p.default)) for p in ours
        ], name


def test_zeros_and_pinned_memory(device: EmulatedDevice) -> None:
    there, host = device.zeros((2, 3), torch.bfloat16), device.pinned(12)
    assert (host.dtype, host.shape, host.device.type) == (torch.uint8, (12,), "cpu")
    host.view(torch.bfloat16).fill_(3)
    host.view(torch.bfloat16).view(2, 3).copy_(there, non_blocking=True)
    device.record().wait(30)
    assert host.view(torch.bfloat16).tolist() == [0] * 6


def test_other_engine_options_than_an_earlier_graphs_are_refused(device: EmulatedDevice, tmp_path: Path) -> None:
    opened(device, doubled(level="O3"), tmp_path)
    opened(device, doubled(level="O3"), tmp_path)
    with pytest.raises(LoweringError, match=r"GE runs with other options.*level is 'O1' and was 'O3'"):
        opened(device, doubled(level="O1"), tmp_path)


def test_compiled_graphs_are_kept_and_found(device: EmulatedDevice, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    operands = [on_device(device, torch.ones(2))]
    assert [opened(device, doubled(), tmp_path).compile(operands, cache) for _ in range(2)] == [True, False]
    (record,) = cache.iterdir()
    record.write_text(record.read_text().replace('"graph": "', '"graph": "00'))
    with pytest.raises(LoweringError, match="another graph is cached under the same key"):
        opened(device, doubled(), tmp_path).compile(operands, cache)


def test_files_that_are_none_or_contradict_themselves_are_refused(device: EmulatedDevice, tmp_path: Path) -> None:
    path = tmp_path / "one.ge"
    path.write_bytes(b"nothing")
    with pytest.raises(LoweringError, match=r"this is not a file of format .npucompile\.ge"):
        device.open(path, 0, {})
    path.write_bytes(encode(replace(doubled(), bound=(0,))))
    with pytest.raises(LoweringError, match=r"the GE file has .0. bound"):
        device.open(path, 0, {})
    path.write_bytes(encode(replace(doubled(), patches=(("sum", "group", "group"),))))
    with pytest.raises(LoweringError, match="attribute 'group' of operator 'sum'"):
        device.open(path, 0, {})


def test_a_constant_that_stands_for_an_operand_is_refused(device: EmulatedDevice) -> None:
    graph: Any = messages().ModelDef().graph.add()
    graph.op.add(name="w", type="ConstPlaceHolder")
    with pytest.raises(LoweringError, match="w stand for operands as constants"):
        engine(device._state).update_constants(graph, [])


def test_a_closed_device_runs_nothing(tmp_path: Path) -> None:
    device = open_device(0)
    device.close()
    with pytest.raises(LoweringError, match="emulated:0 is closed"):
        device.zeros((2,), torch.float32)


WITHOUT_TORCH_NPU = """
import sys, pathlib, torch
from npucompile.lowering.device import open_device
device = open_device("emulated", 0)
executable = device.open(pathlib.Path(sys.argv[1]), 0, {})
x = device.empty((2,), torch.float32).copy_(torch.tensor([1.0, 2.0]))
executable.compile([x])
(result,) = executable([x])
device.record().wait(30)
assert result.cpu().tolist() == [2.0, 4.0]
device.close()
print(sorted(name for name in sys.modules if name.startswith(("torch_npu", "torchair", "npucompile.models"))))
"""


def test_a_process_that_serves_imports_neither_torch_npu_nor_torchair(tmp_path: Path) -> None:
    path = tmp_path / "one.ge"
    path.write_bytes(encode(doubled()))
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH_NPU, str(path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr

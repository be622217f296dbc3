"""lowering/ascend/emulator/acl_engine.py: steps of a captured graph see lengths of their own; what cannot be captured is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support.emulated import WAIT_S, on_device, on_devices, opened

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.acl_graph.file import AclFile
from npucompile.lowering.ascend.acl_graph.program import AclProgram
from npucompile.lowering.ascend.emulator import checks
from npucompile.lowering.ascend.emulator.acl_engine import in_some_order
from npucompile.lowering.ascend.emulator.device import EmulatedDevice

POOL, ROWS, PAGES, STARTS = ((4, 128, 16), ag.BF16), ((2, 16), ag.BF16), ((2, 2), ag.I32), ((2,), ag.I32)


pytestmark = pytest.mark.usefixtures("ta")


def counted(pool: Any, starts: Any, x: Any, pages: Any) -> tuple[Any, ...]:
    """Attention of rows that are one key longer in each step, as the pool of starts says."""
    lengths = (starts + 1).long()
    out = ag.attend(x.exp(), pool, pages, lengths)
    starts.add_(1)
    return (out,)


def attention(device: EmulatedDevice, tmp_path: Path, *, captured: bool = True) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """An executable of `counted`, its operands on the device, and the same on the host."""
    made, _ = ag.of_body(counted, captured=captured, state_pool=POOL, state_starts=STARTS, inputs_x=ROWS, inputs_pages=PAGES)
    host = [
        torch.randn(POOL[0]).to(ag.BF16),
        torch.zeros(2, dtype=ag.I32),
        torch.randn(ROWS[0]).to(ag.BF16),
        torch.tensor([[1, 2], [3, 0]]),
    ]
    host[3] = host[3].to(ag.I32)
    return opened(device, made, tmp_path), [on_device(device, value) for value in host], host


def step(device: EmulatedDevice, executable: Any, operands: list[torch.Tensor]) -> None:
    """Queues a step and waits for it; either raises what made it fail."""
    executable(operands)
    device.record().wait(WAIT_S)


def longer(host: list[torch.Tensor], keys: int) -> torch.Tensor:
    pool, _, x, pages = host
    rows = [pool[row.long()].flatten(0, 1)[:keys].float() for row in pages]
    query = x.exp().float()
    return torch.stack([((q @ k.t()).softmax(-1) @ k) for q, k in zip(query, rows, strict=True)]).to(ag.BF16)


@pytest.mark.parametrize("captured", [True, False])
def test_steps_that_are_queued_before_the_last_one_ended_see_lengths_of_their_own(
    device: EmulatedDevice, tmp_path: Path, captured: bool
) -> None:
    executable, operands, host = attention(device, tmp_path, captured=captured)
    assert executable.compile(operands)
    seen = []
    for _ in range(4):
        # Each output is copied before the next step is queued, which may write the same memory.
        (out,) = executable(operands)
        memory = device.pinned(out.nbytes).view(ag.BF16).view(ROWS[0])
        memory.copy_(out, non_blocking=True)
        seen.append((memory, out.data_ptr()))
    device.record().wait(WAIT_S)
    for step, (memory, _) in enumerate(seen):
        torch.testing.assert_close(memory, longer(host, step + 1), rtol=2e-2, atol=2e-2)
    assert (len({address for _, address in seen}) == 1) == captured
    assert operands[1].cpu().tolist() == [4, 4]


@pytest.mark.parametrize("second_first", [False, True])
def test_streams_are_as_early_or_as_late_as_events_let_them(second_first: bool) -> None:
    def body(x: Any) -> tuple[Any, ...]:
        rows, scale = torch.ops.npu.npu_dynamic_quant(x)
        return (rows.to(ag.BF16).exp() + x.sin().cos(), scale)

    made, _ = ag.of_body(body, inputs_x=((2, 32), ag.BF16))
    names = ag.names(made)
    beside = [i + made.operands for i, name in enumerate(names) if name in ("aten.sin.default", "aten.cos.default")]
    made = replace(made, beside=((beside[0], beside[-1] + 1),))
    (segment,) = AclProgram(made, lambda name: print, 0, {}, torch.device("cpu")).segments
    order = [call.name.split(".")[1] for call in in_some_order(segment.calls, second_first=second_first)]
    # What is unpacked is there with what it comes from.
    first = ["npu_dynamic_quant", "getitem", "getitem", "_to_copy", "exp"]
    assert order == [*(["sin", "cos", *first] if second_first else [*first, "sin", "cos"]), "add"]


def test_operands_that_move_or_are_not_what_was_captured_are_refused(device: EmulatedDevice, tmp_path: Path) -> None:
    executable, operands, host = attention(device, tmp_path)
    with pytest.raises(LoweringError, match="the graph is not compiled; legal is compile"):
        executable(operands)
    for wrong, message in (
        ([host[0], *operands[1:]], r"operand state.pool is on cpu; legal is emulated:0"),
        (
            [*operands[:1], on_device(device, torch.zeros(3, dtype=ag.I32)), *operands[2:]],
            r"state.starts is i32\[3\]; the graph takes i32\[2\]",
        ),
        (operands[:3], "3 operands, the graph has 4 and 0 derived values"),
        ([*operands[:3], None], "operand inputs.pages is absent"),
    ):
        with pytest.raises(LoweringError, match=message):
            executable.compile(wrong)
    executable.compile(operands)
    with pytest.raises(LoweringError, match="compiled already"):
        executable.compile(operands)
    with pytest.raises(LoweringError, match=r"operands inputs.x are not those.*legal is the same memory in every step"):
        executable([*operands[:2], on_device(device, host[2]), operands[3]])


def test_memory_that_nothing_wrote_is_not_read(device: EmulatedDevice, tmp_path: Path) -> None:
    executable, operands, _ = attention(device, tmp_path)
    operands[2] = device.empty(*ROWS)
    executable.compile(operands)
    with pytest.raises(LoweringError, match=r"operand inputs.x: nothing was written to its bytes 0 to 63"):
        step(device, executable, operands)


def test_a_kernel_that_fails_ends_the_step_and_names_its_operator(device: EmulatedDevice, tmp_path: Path) -> None:
    executable, operands, _ = attention(device, tmp_path)
    operands[1].copy_(torch.full((2,), 256, dtype=ag.I32))
    executable.compile(operands)
    executable(operands)
    with pytest.raises(
        LoweringError, match=r"operator .*npu_fused_infer_attention_score.default\): .*257 keys in a block_table row of 2 pages"
    ):
        device.record().wait(WAIT_S)
    with pytest.raises(LoweringError, match="has failed before"):
        executable(operands)


def test_an_update_without_a_replay_or_during_one_is_refused(device: EmulatedDevice, tmp_path: Path) -> None:
    """A real update of a running graph changes what it computes: vllm-ascend waits for the stream before each replay for that reason."""
    executable, operands, _ = attention(device, tmp_path)
    executable.compile(operands)
    segment, (number,) = executable._captured[1], executable._program.segments[1].lists
    with pytest.raises(LoweringError, match="updated 1 times for 0 replays"):
        segment.update({number: [1, 1]})
    executable._captured[0].replay()
    segment.replay()
    with pytest.raises(LoweringError, match=r"without the lists of nodes \[\d+\]; legal are all of them"):
        segment.update({})
    segment._replays += 1
    segment._updates += 1
    with pytest.raises(LoweringError, match="updated while an earlier replay of it runs"):
        segment.update({number: [1, 1]})
    segment._updates -= 1
    segment.update({number: [1, 1]})
    device.record().wait(WAIT_S)


def test_operators_whose_results_depend_on_values_are_not_captured(device: EmulatedDevice, tmp_path: Path) -> None:
    made, _ = ag.of_body(lambda x: (x + x.index_select(0, torch.ops.aten.argmax(x).view(1)),), inputs_x=((4,), ag.F32))
    opened(device, made, tmp_path).compile([on_device(device, torch.ones(4))])
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(4, device="meta"), leaf="inputs.x")
    mask = graph.call_function(torch.ops.aten.gt.Scalar, (x, 0))
    mask.meta["val"] = torch.empty(4, dtype=torch.bool, device="meta")
    for target, args in ((torch.ops.aten.nonzero.default, (x,)), (torch.ops.aten.index.Tensor, (x, [mask]))):
        copy = torch.fx.Graph()
        values: dict[Any, Any] = {}
        for node in graph.nodes:
            values[node] = copy.node_copy(node, values.__getitem__)
            values[node].meta = dict(node.meta)
        result = copy.call_function(target, torch.fx.node.map_arg(args, values.__getitem__))
        result.meta["val"] = torch.empty(4, device="meta")
        copy.output((result,))
        data = ag.encoded(torch.fx.GraphModule(torch.nn.Module(), copy))
        file = AclFile(data, 1, 1, (), (), True, (("", 2),))
        with pytest.raises(LoweringError, match=r"needs the values of its operands; it cannot be captured"):
            opened(device, file, tmp_path).compile([on_device(device, torch.ones(4))])


def test_more_captured_graphs_than_streams_are_refused(device: EmulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_STREAMS", 2)
    made, _ = ag.of_body(lambda x: (x + x,), inputs_x=((4,), ag.F32))
    operands = [on_device(device, torch.ones(4))]
    for _ in range(2):
        opened(device, made, tmp_path).compile(operands)
    with pytest.raises(LoweringError, match="captured graphs take 3 streams; legal are 2: build fewer buckets"):
        opened(device, made, tmp_path).compile(operands)


def test_what_communicates_is_captured_warm_alone(tmp_path: Path) -> None:
    made, _ = ag.of_body(lambda x: (torch.ops._c10d_functional.all_reduce(x, "sum", "tp") + 1,), inputs_x=((4,), ag.F32))

    def work(device: EmulatedDevice, rank: int, names: Any) -> list[float]:
        executable, operands = opened(device, made, tmp_path, rank, names), [on_device(device, torch.ones(4))]
        with pytest.raises(LoweringError, match=r"is captured before links over emulated/tp/0 are made; legal is `warm_up`"):
            executable.compile(operands)
        executable = opened(device, made, tmp_path, rank, names)
        executable.warm_up(operands)
        executable.compile(operands)
        (result,) = executable(operands)
        device.record().wait(WAIT_S)
        values: list[float] = result.cpu().tolist()
        return values

    assert on_devices(Mesh.parse("tp=2"), work) == [[3.0] * 4] * 2

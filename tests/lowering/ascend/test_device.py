"""lowering/ascend/device.py: the executable calls torchair in the order in which torchair's own generated code calls it.

Without CANN, a recorder stands in for torchair's objects: its signatures are compared with theirs, and its log of calls with that of
the code that the real `codegen` emits for the same graph.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend import device
from npucompile.lowering.ascend.ge_file import STREAM, GeFile, canonical, encode, parse
from npucompile.lowering.switches import KERNELS, OVERLAP

GRAPHS, BACKEND = "torchair.ge._ge_graph", "torchair.core._backend"
CONVERTER = "torchair._ge_concrete_graph.fx2ge_converter"


class Recorder:
    """Stands in for a GeGraph and logs the calls."""

    def __init__(self, log, model_def=None, serialized_model_def=None, name=None):
        self.log, self.name = log, name
        graph = parse(serialized_model_def).graph[0]
        self.attr, self.op = graph.attr, graph.op
        log.append(("graph", serialized_model_def))

    def load(self, options, *, create_pg=False):
        self.log.append(("load", options, create_pg))

    def compile(self):
        self.log.append(("compile",))

    def run(self, inputs, assigned_outputs=[], stream=None):  # noqa: B006
        self.log.append(("run", list(map(id, inputs)), [None if t is None else id(t) for t in assigned_outputs]))
        dtypes = self.attr["_output_dtypes"].list.i
        assigned = list(assigned_outputs) or [None] * len(dtypes)
        return [torch.full((1,), float(at)) if t is None else t for at, t in enumerate(assigned)]


def recording(log) -> device.GeEngine:
    return device.GeEngine(
        graph=lambda *args, **kwargs: Recorder(log, *args, **kwargs),
        initialize=lambda options=None: log.append(("initialize", options)),
        update_constants=lambda graph, inputs: log.append(("constants", [id(tensor) for tensor in inputs])),
        update_formats=lambda graph, inputs: log.append(("formats", [id(tensor) for tensor in inputs])),
        device="cpu",
    )


def compiled(ge_file, engine, operands):
    executable = device.GeExecutable(ge_file, engine)
    assert executable.compile(operands)
    return executable


@pytest.fixture(scope="module")
def runner(ta):
    """Four operands: one is never read, one is a pool written in place, one is a buffer a dense result is assigned to."""

    def step(x, unread, pool, buffer, where):
        out = torch.ops.npu.npu_scatter_nd_update(pool, where, x)
        result = out + x.sum()
        pool.copy_(out)
        buffer.copy_(x * 2)
        return (result,)

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operands = [torch.empty(*shape, device="meta") for shape in ((2, 8), (3,), (4, 8), (2, 8))]
        operands.append(torch.empty(2, 1, dtype=torch.int64, device="meta"))
        traced = make_fx(step)(*operands)
        return ta.get_compiler(ta.CompilerConfig())(traced, operands).runner


FEEDS = (0, 2, 3, 4)


@pytest.fixture(scope="module")
def ge_file(runner):
    options, engine = runner._normalize_ge_option()
    return GeFile(
        graph=runner.graph.SerializeToString(),
        options=options,
        donations=tuple((output, FEEDS[data]) for output, data in runner._graph_output_ref_input.items()),
        bound=tuple(FEEDS[data] for data in runner._ref_data_idx),
        inputs=5,
        outputs=1,
        patches=(),
        feeds=FEEDS,
        engine=engine,
    )


@pytest.fixture
def operands():
    return [torch.zeros(2, 8), torch.zeros(3), torch.zeros(4, 8), torch.zeros(2, 8), torch.zeros(2, 1, dtype=torch.int64)]


def test_calls_are_those_of_torchairs_own_generated_code(runner, ge_file, operands, monkeypatch):
    theirs: list = []
    engine = recording(theirs)
    monkeypatch.setattr(importlib.import_module(GRAPHS), "GeGraph", engine.graph)
    monkeypatch.setattr(importlib.import_module(BACKEND), "initialize_graph_engine", engine.initialize)
    converter = importlib.import_module(CONVERTER)
    monkeypatch.setattr(converter, "_update_constplaceholder_attr_from_inputs", engine.update_constants)
    monkeypatch.setattr(converter, "_update_internal_format_from_inputs", engine.update_formats)
    module: dict = {}
    exec(compile(runner.codegen({}), "generated", "exec"), module)
    module["kernel"](*operands)
    module["kernel"](*operands)

    ours: list = []
    executable = compiled(ge_file, recording(ours), operands)
    executable(operands)
    executable(operands)
    # The file torchair writes may have its maps in another order.
    for log in (ours, theirs):
        log[:] = [(call[0], parse(call[1])) if call[0] == "graph" else call for call in log]
    assert [call[0] for call in ours] == ["initialize", "graph", "constants", "formats", "load", "compile", "run", "run"]
    assert ours == theirs


def test_the_recorder_has_the_signatures_of_the_real_objects(ta):
    real = importlib.import_module(GRAPHS).GeGraph
    for name in ("load", "compile", "run"):
        assert inspect.signature(getattr(Recorder, name)) == inspect.signature(getattr(real, name)), name
    ours = list(inspect.signature(Recorder.__init__).parameters.values())
    assert [tensor for tensor in ours if tensor.name != "log"] == list(inspect.signature(real.__init__).parameters.values())
    source = inspect.getsource(inspect.getclosurevars(importlib.import_module(BACKEND).initialize_graph_engine).nonlocals["func"])
    assert "def initialize_graph_engine(global_compile_options: Dict = None):" in source


def test_the_engine_is_torchairs_own(ta):
    engine = device.engine(replace(ta, cann="pretended"))
    converter = importlib.import_module(CONVERTER)
    assert engine.graph is importlib.import_module(GRAPHS).GeGraph
    assert engine.initialize is importlib.import_module(BACKEND).initialize_graph_engine
    assert engine.update_constants is converter._update_constplaceholder_attr_from_inputs
    assert engine.update_formats is converter._update_internal_format_from_inputs
    assert list(inspect.signature(engine.update_constants).parameters) == ["graph", "runtime_inputs"]
    assert list(inspect.signature(engine.update_formats).parameters) == ["graph", "runtime_inputs"]
    assert engine.device == "npu"


def test_without_cann_nothing_runs(ta, ge_file, tmp_path):
    with pytest.raises(LoweringError, match="needs CANN and an NPU"):
        device.engine(ta)
    path = tmp_path / "one.ge"
    path.write_bytes(encode(ge_file))
    with pytest.raises(LoweringError, match="needs CANN and an NPU"):
        device.load(path, ta)


def test_results_are_the_programs_and_state_is_assigned(ge_file, operands):
    log: list = []
    executable = compiled(ge_file, recording(log), operands)
    results = executable(operands)
    assert executable.backend == "ge"
    assert [tensor.tolist() for tensor in results] == [[0.0]]
    _, fed, assigned = log[-1]
    assert fed == [id(operands[index]) for index in FEEDS]
    # The sum reads the pool's result, so its operator writes in place; the buffer is bound to an output of its own.
    assert (ge_file.outputs, {operand for _, operand in ge_file.donations}) == (1, {3})
    assert 2 in ge_file.bound
    assert {(output, id(operands[operand])) for output, operand in ge_file.donations} == {
        (output, tensor) for output, tensor in enumerate(assigned) if tensor is not None
    }


def test_without_donations_no_outputs_are_assigned(ge_file, operands):
    log: list = []
    compiled(replace(ge_file, donations=()), recording(log), operands)(operands)
    assert log[-1][2] == []


def test_it_compiles_once_and_with_a_name_of_its_own(ge_file, operands):
    log: list = []
    pair = [compiled(ge_file, recording(log), operands) for _ in range(2)]
    for executable in pair:
        executable(operands)
        executable(operands)
        with pytest.raises(LoweringError, match="compiled already; legal is once"):
            executable.compile(operands)
    assert [call[0] for call in log].count("compile") == 2
    assert pair[0]._graph.name != pair[1]._graph.name


def test_a_container_of_all_ranks_is_not_run(ge_file):
    shared = replace(ge_file, patches=(("Data", "index", "ep_rank"),))
    with pytest.raises(LoweringError, match="1 attributes of this graph differ between ranks"):
        device.GeExecutable(shared, recording([]))


def test_load_patches_for_the_rank(ge_file, tmp_path, ta, monkeypatch):
    model = parse(ge_file.graph)
    op = model.graph[0].op.add(name="gather", type="HcomAllGather")
    op.attr["group"].s = b"world"
    path = tmp_path / "one.ge"
    path.write_bytes(encode(replace(ge_file, graph=model.SerializeToString(), patches=(("gather", "group", "group"),))))
    log: list = []
    monkeypatch.setattr(device, "engine", lambda torchair: recording(log))
    device.load(path, ta, 3, {"world": "hccl_world"})
    operators = {op.name: op for op in parse(log[1][1]).graph[0].op}
    assert operators["gather"].attr["group"].s == b"hccl_world"
    with pytest.raises(LoweringError, match="this rank has no group"):
        device.load(path, ta)


def test_operands_elsewhere_are_refused_before_anything_is_loaded(ge_file, operands):
    log: list = []
    executable = device.GeExecutable(ge_file, replace(recording(log), device="npu"))
    with pytest.raises(LoweringError, match="operand x_1 is on cpu; legal is npu"):
        executable.compile(operands)
    assert [call[0] for call in log] == ["initialize", "graph"]


def test_another_number_of_operands_is_refused(ge_file, operands):
    with pytest.raises(LoweringError, match="6 operands, the graph has 5"):
        device.GeExecutable(ge_file, recording([])).compile([*operands, operands[0]])
    executable = compiled(ge_file, recording([]), operands)
    with pytest.raises(LoweringError, match="4 operands, the graph has 5"):
        executable(operands[:4])
    with pytest.raises(LoweringError, match=r"operands \[2\] are absent"):
        executable([*operands[:2], None, *operands[3:]])


def test_operands_that_a_compiled_graph_would_misread_are_refused(ge_file, operands):
    for tensor, message in (
        (torch.zeros(8, 2), r"operand x_1 is f32\[8,2\]; the graph takes DT_FLOAT \[2, 8\]"),
        (torch.zeros(2, 8, dtype=torch.bfloat16), r"operand x_1 is bf16\[2,8\]"),
        (torch.zeros(8, 2).t(), r"operand x_1 has strides \(1, 2\); legal is contiguous"),
    ):
        with pytest.raises(LoweringError, match=message):
            device.GeExecutable(ge_file, recording([])).compile([tensor, *operands[1:]])


def test_a_step_of_a_graph_that_is_not_compiled_is_refused(ge_file, operands):
    with pytest.raises(LoweringError, match="not compiled; legal is compile"):
        device.GeExecutable(ge_file, recording([]))(operands)


def test_operands_that_the_graph_does_not_read_may_be_absent(ge_file, operands):
    executable = device.GeExecutable(ge_file, recording([]))
    assert executable.reads == set(FEEDS)
    assert executable.compile([operands[0], None, *operands[2:]])


def test_the_cache_is_asked_by_a_key_of_all_that_was_compiled(ge_file, operands, tmp_path):
    def options(version="8.5", format_number=2, **changes):
        """What the graph is ta with, and whether it was compiled."""
        log: list = []

        def formats(graph, inputs):
            for op in graph.op:
                if op.type == "Data":
                    op.output_desc[0].attr["format_for_int"].i = format_number

        engine = replace(recording(log), update_formats=formats)
        fresh = device.GeExecutable(replace(ge_file, **changes), engine, version).compile(operands, tmp_path)
        return dict(next(call[1] for call in log if call[0] == "load")), fresh

    model = parse(ge_file.graph)
    model.graph[0].op[0].name = "renamed"
    first, fresh = options()
    assert fresh
    assert first["ge.graph_compiler_cache_dir"] == str(tmp_path)
    others = [
        options(version="9.0"),
        options(format_number=29),
        options(options={"a": "1"}),
        options(engine={"a": "1"}),
        options(graph=model.SerializeToString()),
    ]
    keys = {first["ge.graph_key"], *(other["ge.graph_key"] for other, _ in others)}
    assert len(keys) == 6
    (tmp_path / f"{first['ge.graph_key']}.idx").touch()
    assert options() == (first, False)
    with pytest.raises(LoweringError, match="nowhere is not there; legal is one that exists"):
        device.GeExecutable(ge_file, recording([])).compile(operands, tmp_path / "nowhere")


def test_kernels_may_come_from_the_other_place_and_the_cache_keeps_both_apart(ge_file, operands, tmp_path):
    keys = set()
    for off in ((), {KERNELS}):
        log: list = []
        executable = device.GeExecutable(ge_file, recording(log))
        executable.switch_off(off)
        executable.compile(operands, tmp_path)
        options = next(call[1] for call in log if call[0] == "load")
        assert (options.get("ge.jit_compile", "2") == "0") == bool(off)
        keys.add(options["ge.graph_key"])
    assert len(keys) == 2


def test_without_overlap_operators_have_no_stream_of_their_own(ge_file, operands):
    model = parse(ge_file.graph)
    model.graph[0].op[-2].attr[STREAM].s = b"exchange"
    overlapping = replace(ge_file, graph=model.SerializeToString(deterministic=True))
    log: list = []
    executable = device.GeExecutable(overlapping, recording(log))
    executable.switch_off({OVERLAP})
    executable.compile(operands)
    assert (overlapping.overlaps, executable.ge_file.overlaps) == (True, False)
    assert canonical(executable.ge_file.graph) == canonical(ge_file.graph)


def test_what_ge_says_is_passed_on(ge_file, operands):
    class Refusing(Recorder):
        def compile(self):
            raise RuntimeError("EZ9999: no kernel for FusedInferAttentionScore")

    engine = replace(recording([]), graph=lambda **kwargs: Refusing([], **kwargs))
    with pytest.raises(LoweringError, match="compiling the graph with GE failed: EZ9999"):
        device.GeExecutable(ge_file, engine).compile(operands)


def test_other_engine_options_than_the_processs_are_refused(ge_file):
    def initialize(options):
        raise ValueError("Unsupport twice initialtion with different options")

    with pytest.raises(LoweringError, match="other options than this graph's"):
        device.GeExecutable(ge_file, replace(recording([]), initialize=initialize))


def test_another_number_of_results_is_refused(ge_file, operands):
    class Short(Recorder):
        def run(self, inputs, assigned_outputs=(), stream=None):
            return super().run(inputs, assigned_outputs)[:-1]

    engine = replace(recording([]), graph=lambda **kwargs: Short([], **kwargs))
    executable = compiled(ge_file, engine, operands)
    with pytest.raises(LoweringError, match="GE returned"):
        executable(operands)


def test_communicators_are_made_by_their_groups():
    calls = []

    def group(name):
        backend = SimpleNamespace(get_hccl_comm_name=lambda rank, init_comm: calls.append((name, rank, init_comm)) or f"hccl_{name}")
        return SimpleNamespace(_get_backend=lambda where: backend if where.type == "npu" else None)

    assert device.communicators({"world": group("world"), "tp": group("tp")}, 5) == {"tp": "hccl_tp", "world": "hccl_world"}
    # The order is the same on all ranks, because creating a communicator waits for the group's other ranks.
    assert calls == [("tp", 5, True), ("world", 5, True)]


# --- weights in NZ ---


def test_packed_int4_is_tiled_as_the_int8_that_two_of_them_share():
    weight, seen = torch.arange(64, dtype=torch.int32).view(8, 8), []
    tiled = device.to_nz(SimpleNamespace(npu_format_cast=lambda tensor, number: seen.append((tensor.dtype, number)) or tensor), weight)
    assert seen == [(torch.int8, device.FRACTAL_NZ)]
    assert (tiled.dtype, tiled.tolist()) == (torch.int32, weight.tolist())


def test_a_weight_is_cast_to_the_format_torchair_knows_as_nz(ta):
    formats = importlib.import_module("torchair.ge._ge_graph").Format
    assert formats.FORMAT_FRACTAL_NZ.value == device.FRACTAL_NZ
    assert callable(ta.torch_npu.npu_format_cast)
    weight = torch.zeros(2)
    fake = SimpleNamespace(npu_format_cast=lambda tensor, number: (tensor, number))
    assert device.to_nz(fake, weight) == (weight, device.FRACTAL_NZ)

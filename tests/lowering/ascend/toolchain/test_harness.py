"""lowering/ascend/toolchain/harness.py: torchair's real converter runs without CANN, and importing it has no side effects here.

The effects of an import can be observed once per process, so one child process does it all, under -W error, and reports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.toolchain import harness

HERE = {"torch_npu": "2.13.0", "torch": "2.13.0+cpu", "protobuf": "7.36.2", "packaging": "26.3", "PyYAML": "6.0", "numpy": "2.4"}
HERE |= {"pyelftools": "0.33"}

CHILD = r"""
import json, signal, sys
from pathlib import Path
from npucompile.lowering.ascend.toolchain import harness, stubs

report = {"before": harness.available(), "imported_by_available": "torch_npu" in sys.modules}
report["symbols"] = len(stubs.missing(stubs.wheel_path())[0])
handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
loaded = harness.load(Path(sys.argv[1]))
report["handlers_kept"] = handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
report["again"] = harness.load(Path("/nowhere")) is loaded
report["cann"] = loaded.cann
report["symbols_after"] = len(stubs.missing(stubs.wheel_path())[0])

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

npu, mode = torch.ops.npu, FakeTensorMode()

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

def convert(function, make):
    with mode:
        operands = make()
        traced = make_fx(function)(*operands)
        runner = loaded.get_compiler(loaded.CompilerConfig())(traced, list(operands)).runner
    model = loaded.ge_pb2.ModelDef()
    model.ParseFromString(runner.graph.SerializeToString())
    return {
        "ops": [op.type for op in model.graph[0].op if op.type not in ("Data", "Const", "NetOutput")],
        "in_place": sorted({*runner._ref_data_idx, *runner._graph_output_ref_input.values()}),
        "fia": [list(op.input) for op in model.graph[0].op if op.type == "FusedInferAttentionScore"],
    }

report["norm"] = convert(lambda x, gamma: (npu.npu_rms_norm(x, gamma)[0],), lambda: (meta(4, 64), meta(64)))

def attend(q, k, v, k_pool, v_pool, slots, table, q_ends, kv_lengths, mask):
    new_k, new_v = npu.npu_scatter_pa_kv_cache_functional(k, v, k_pool, v_pool, slots, cache_mode="Norm")
    found, _ = loaded.torchair.ops.npu_fused_infer_attention_score(
        q, new_k.view(64, 128, 256), new_v.view(64, 128, 256), atten_mask=mask, block_table=table, actual_seq_lengths=q_ends,
        actual_seq_lengths_kv=kv_lengths, num_heads=16, num_key_value_heads=2, input_layout="TND", sparse_mode=3, block_size=128)
    k_pool.copy_(new_k)
    v_pool.copy_(new_v)
    return (found,)

report["attention"] = convert(attend, lambda: (
    meta(16, 16, 128), meta(16, 2, 128), meta(16, 2, 128), meta(64, 128, 2, 128), meta(64, 128, 2, 128),
    meta(16, dtype=torch.int32), meta(4, 8, dtype=torch.int32), meta(4, dtype=torch.int64), meta(4, dtype=torch.int64),
    meta(2048, 2048, dtype=torch.bool)))

# torch_npu lets optimizers ask a device which kernels it has, and there is none.
stepped = torch.nn.Parameter(torch.ones(3))
stepped.grad = torch.ones(3)
torch.optim.Adam([stepped], lr=0.5).step()
report["stepped"] = stepped.detach().tolist()

def own(x, gamma, meta_outputs=None):
    return loaded.torchair.ge.custom_op("OurOwn", inputs={"x": x}, attrs={}, outputs=["y"])

library = torch.library.Library("harness_test", "DEF")
library.define("own(Tensor x, Tensor y) -> Tensor")
library.impl("own", lambda x, y: torch.empty_like(x), "Meta")
loaded.register_converter(torch.ops.harness_test.own.default)(own)
report["custom"] = convert(lambda x, y: (torch.ops.harness_test.own(x, y),), lambda: (meta(4), meta(4)))["ops"]
operators = torch.ops.harness_test.own.default, npu.npu_rms_norm.default, npu.npu_silu.default
report["found"] = [loaded.find_converter(op) is not None for op in operators]
report["decompositions"] = torch.ops._c10d_functional.all_to_all_single.default in loaded.decompositions

try:
    convert(lambda x: (npu.npu_swiglu_quant(x)[0],), lambda: (meta(4, 64),))
except Exception as error:
    report["unknown"] = str(error)
gte = loaded.torch_npu.npu.utils._is_gte_cann_version
report["releases"] = [gte("8.2.RC1"), gte("8.5.0", "HCCL"), gte("8.5.1", module="CANN"), gte("9.2.0")]
report["device"] = loaded.torch_npu.npu.get_device_name()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    command = [sys.executable, "-W", "error", "-c", CHILD, str(tmp_path_factory.mktemp("cache"))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.fixture(scope="module")
def report(child):
    return json.loads(child.stdout.splitlines()[-1])


def test_import_says_nothing(child):
    assert len(child.stdout.splitlines()) == 1
    assert child.stderr == ""


def test_asking_whether_it_would_work_imports_nothing(report):
    assert report["before"] is None
    assert report["imported_by_available"] is False


def test_import_leaves_ctrl_c_alone_and_happens_once(report):
    assert report["handlers_kept"] is True
    assert report["again"] is True


def test_stubs_are_not_taken_for_cann(report):
    assert report["cann"] is None
    assert report["symbols_after"] == report["symbols"]


def test_a_norm_becomes_its_ge_op(report):
    assert report["norm"] == {"ops": ["RmsNorm"], "in_place": [], "fia": []}


def test_attention_writes_its_caches_in_place_and_reads_lengths_at_run_time(report):
    found = report["attention"]
    assert found["ops"] == ["ScatterPaKvCache", "Reshape", "Reshape", "FusedInferAttentionScore"]
    assert found["in_place"] == [3, 4]
    # Inputs 5 and 6 are the lengths: graph inputs, not constants baked at conversion.
    assert found["fia"][0][5:7] == ["q_ends_1:0", "kv_lengths_1:0"]


def test_own_operators_convert_through_own_converters(report):
    assert report["custom"] == ["OurOwn"]
    assert report["found"] == [True, True, False]
    assert report["decompositions"] is True


def test_an_op_without_converter_fails_as_it_would_with_cann(report):
    assert "No AscendIR NpuSwigluQuant was found to be registered" in report["unknown"]


def test_answers_are_those_of_one_release_and_one_chip(report):
    assert report["releases"] == [True, True, False, False]
    assert report["device"] == harness.ASSUMED_DEVICE


def test_this_environment_can_convert():
    assert harness.lacking(harness.installed()) is None
    assert harness.available() is None
    assert harness.lacking(HERE) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch_npu": None}, "needs torch_npu, which is not installed; pip install 'npucompile[npu]'"),
        ({"protobuf": None, "PyYAML": None}, "needs protobuf, PyYAML, which are not installed"),
        ({"protobuf": "3.20.3"}, "protobuf is 3.20.3, lowering to Ascend needs 4 or newer"),
        ({"torch": "2.12.1"}, "torch_npu is 2.13.0 and torch 2.12.1: legal is the same version of both"),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(change, message):
    versions = {name: version for name, version in {**HERE, **change}.items() if version is not None}
    assert message in harness.lacking(versions)


def test_a_minor_version_is_what_counts():
    assert harness.lacking({**HERE, "torch_npu": "2.13.0.post2", "torch": "2.13.1"}) is None


def test_without_a_compiler_it_would_not_work(monkeypatch):
    def none():
        raise LoweringError("install one")

    monkeypatch.setattr(harness, "_LOADED", {})
    monkeypatch.setattr(harness, "find_compiler", none)
    assert harness.available() == "install one"
    assert harness.available("/usr/local/Ascend") is None


def test_a_missing_package_refuses_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "_LOADED", {})
    monkeypatch.setattr(harness, "installed", lambda: {"torch": "2.13.0"})
    with pytest.raises(LoweringError, match="torch_npu, protobuf, packaging, PyYAML, numpy, pyelftools, which are not installed"):
        harness.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cache_says_how_to_mend_it(tmp_path):
    (tmp_path / "libhccl.so").write_bytes(b"half")
    with pytest.raises(LoweringError, match=rf"remove {tmp_path} and it is made again"):
        harness.preload([Path(tmp_path / "libhccl.so")])


def test_optimizers_go_on_working(report):
    assert report["stepped"] == pytest.approx([0.5] * 3, abs=1e-3)

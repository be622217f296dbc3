"""lowering/cuda/executable.py: a graph is compiled once per cache, captured once, and replayed over the memory it was captured with."""

from __future__ import annotations

import pytest
import torch
from support.fake_cuda import FakeCuda
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.record import record
from npucompile.lowering.artifact.graph_io import encode
from npucompile.lowering.cuda.cuda_file import CudaFile
from npucompile.lowering.cuda.executable import CudaExecutable


def cuda_file(arch: str = "90") -> CudaFile:
    """Operands x [2, 3], unread [4], pool [2, 3]: returns x + pool and x * 2 + ones, and adds x to the pool in place."""

    def fn(x, unread, pool):
        total, ones = x + pool, torch.ones(2, 3, device=x.device)
        pool.copy_(total)
        return total, x * 2 + ones

    operands = [torch.empty(2, 3, device="meta"), torch.empty(4, device="meta"), torch.empty(2, 3, device="meta")]
    graph = record(fn, operands, FakeTensorMode(), "cuda")
    for node, name in zip(
        [n for n in graph.graph.nodes if n.op == "placeholder"], ("inputs.x", "params.unread", "state.pool"), strict=True
    ):
        node.meta["leaf"] = name
    return CudaFile(arch, encode(graph))


@pytest.fixture
def cuda():
    cuda = FakeCuda()
    cuda.enter()
    yield cuda
    cuda.close()


def on_gpu(cuda, *values):
    return [cuda.empty((2, 3), torch.float32).fill_(value) for value in values]


def read(cuda, tensor):
    host = cuda.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    host.copy_(tensor, non_blocking=True)
    cuda.record().synchronize()
    return host.clone()


def test_it_is_compiled_once_captured_and_replayed(cuda, tmp_path):
    executable = CudaExecutable(cuda_file(), cuda, "cuda:0")
    assert (executable.reads, executable.nz_operands, executable.derived([])) == ({0, 2}, frozenset(), ())
    x, pool = on_gpu(cuda, 1, 0)
    assert executable.compile([x, None, pool], tmp_path)
    # The warm-ups added x to the pool.
    assert cuda.log == ["compile", "run", "run", "capture"]
    pool.fill_(10)
    outputs = executable([x, None, pool])
    assert [read(cuda, value).unique().tolist() for value in (*outputs, pool)] == [[11], [3], [11]]
    x.fill_(5)
    assert executable([x, None, pool]) is outputs
    assert [read(cuda, value).unique().tolist() for value in (*outputs, pool)] == [[16], [11], [16]]
    again = CudaExecutable(cuda_file(), cuda, "cuda:0")
    assert not again.compile([x, None, pool], tmp_path), "the cache has it"
    assert [file.name for file in tmp_path.iterdir()] == [f"{executable.key}.pt2"]
    assert cuda.log.count("compile") == 1


def test_the_key_is_of_graph_and_capability(cuda):
    other = FakeCuda("80")
    keys = {CudaExecutable(cuda_file(gpu.arch), gpu, "cuda:0").key for gpu in (cuda, other)}
    other.close()
    assert len(keys) == 2


def test_without_a_cache_it_is_compiled_each_time(cuda):
    x, pool = on_gpu(cuda, 1, 0)
    for _ in range(2):
        assert CudaExecutable(cuda_file(), cuda, "cuda:0").compile([x, None, pool])
    assert cuda.log.count("compile") == 2


def test_another_gpu_is_refused_with_both_capabilities(cuda):
    with pytest.raises(LoweringError, match=r"capability 8\.0, and cuda:0 \(Fake GPU\) has 9\.0; legal is .* --cuda-arch 90"):
        CudaExecutable(cuda_file("80"), cuda, "cuda:0")


def test_what_it_would_misread_is_refused(cuda, tmp_path):
    executable = CudaExecutable(cuda_file(), cuda, "cuda:0")
    x, pool, other = on_gpu(cuda, 1, 0, 2)
    with pytest.raises(LoweringError, match=r"not compiled; legal is compile\(\) before"):
        executable([x, None, pool])
    for operands, why in (
        ([x, None], "2 operands, the graph has 3"),
        ([None, None, pool], "operand inputs.x is absent"),
        ([x, None, torch.zeros(2, 3)], "operand state.pool is on cpu; legal is cuda:0"),
        ([cuda.empty((2, 3), torch.int32).zero_(), None, pool], "inputs.x is .*int32; the graph takes .*float32"),
        ([cuda.empty((3, 3), torch.float32).zero_(), None, pool], r"inputs.x is \(3, 3\)"),
    ):
        with pytest.raises(LoweringError, match=why):
            executable.compile(operands, tmp_path)
    executable.compile([x, None, pool], tmp_path)
    with pytest.raises(LoweringError, match="compiled already"):
        executable.compile([x, None, pool], tmp_path)
    with pytest.raises(LoweringError, match=r"operand state\.pool is not the one that the graph was captured with"):
        executable([x, None, other])
    cuda.refuses = True
    with pytest.raises(LoweringError, match="cuda:0 refused a step: CUDA error: an illegal memory access"):
        executable([x, None, pool])


def test_memory_that_nothing_was_written_to_fails_the_capture(cuda, tmp_path):
    (x,) = on_gpu(cuda, 1)
    with pytest.raises(LoweringError, match="which nothing was written to"):
        CudaExecutable(cuda_file(), cuda, "cuda:0").compile([x, None, cuda.empty((2, 3), torch.float32)], tmp_path)

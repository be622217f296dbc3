"""runtime/pool_memory.py: pools take the memory of what was written, never before, and give it back; graphs see plain zeros."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.residency import resident_bytes

from npucompile.graphs.types import Aval, Leaf
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.pool_memory import PoolMemory
from npucompile.runtime.steps.rows import DecodeRow, PrefillRow

PAGE = mmap.PAGESIZE


def pools(pages: int = 64, slots: int = 16) -> PoolMemory:
    """Pages of two of the machine's pages, slots of one and a half, and request slots of 16 bytes."""
    return PoolMemory(
        [
            Leaf("state.k", Aval((pages, 2, PAGE // 4), torch.float32, ("pages", None, None))),
            Leaf("state.delta", Aval((slots, 3 * PAGE // 4), torch.bfloat16, ("slots", None))),
            Leaf("state.request_slots", Aval((slots, 4), torch.int32, ("request_slots", None))),
        ]
    )


def test_nothing_is_resident_before_it_is_written() -> None:
    memory = pools(pages=2**20)
    k, delta, requests = memory.tensors
    assert [(t.shape, t.dtype) for t in memory.tensors] == [
        ((2**20, 2, PAGE // 4), torch.float32), ((16, 3 * PAGE // 4), torch.bfloat16), ((16, 4), torch.int32)
    ]  # fmt: skip
    assert all(t.is_contiguous() for t in memory.tensors)
    assert memory.nbytes == sum(t.nbytes for t in memory.tensors) > 2**33
    before = resident_bytes(memory.tensors)
    assert not k[:: 2**14].any()
    assert not delta.any()
    assert resident_bytes(memory.tensors) == before, "reading makes nothing resident"
    k[5] = 1
    assert resident_bytes(memory.tensors) == before + 2 * PAGE
    delta[3] = 1
    assert resident_bytes(memory.tensors) == before + 4 * PAGE, "one and a half pages, in two"
    requests[7] = 1
    assert resident_bytes(memory.tensors) == before + 5 * PAGE


@given(st.sets(st.integers(0, 63)), st.sets(st.integers(0, 15)))
def test_what_is_given_back_is_zero_and_the_rest_is_as_it_was(pages, slots) -> None:
    memory = pools()
    k, delta, requests = memory.tensors
    before = resident_bytes(memory.tensors)
    for tensor in memory.tensors:
        tensor.fill_(7)
    full = resident_bytes(memory.tensors)
    assert full - before == 128 * PAGE + 24 * PAGE + PAGE
    freed = memory.give_back({"pages": pages, "slots": slots})
    assert full - resident_bytes(memory.tensors) == freed
    # A slot shares a page of memory with a neighbour; only where both are given back it goes.
    assert freed >= 2 * len(pages) * PAGE + len(slots) * PAGE // 2
    assert freed <= 2 * len(pages) * PAGE + len(slots) * 3 * PAGE // 2
    assert not k[sorted(pages)].any()
    for tensor, numbers in ((k, pages), (delta, slots), (requests, set())):
        kept = sorted(set(range(len(tensor))) - numbers)
        assert (tensor[kept] == 7).all()
    k[sorted(pages)] = 3
    assert (k[sorted(pages)] == 3).all()


def test_a_pool_of_nothing_is_a_tensor_of_nothing() -> None:
    (empty,) = PoolMemory([Leaf("state.none", Aval((0, 4), torch.float32, ("slots", None)))]).tensors
    assert empty.shape == (0, 4)


@pytest.fixture(scope="module")
def executor(tiny_checkpoint, tmp_path_factory):
    """Room for 64 requests of 256 tokens."""
    out = tmp_path_factory.mktemp("roomy") / "tiny"
    sizes = {"buckets": (1, 4), "prefill": (16,), "max_num_seqs": 64, "max_model_len": 256}
    tiny.built(tiny.planned(tiny_checkpoint, **sizes), out, fresh=True)
    return CpuExecutor(Artifact.open(out))


def generated(executor, group: int, steps: int = 3) -> list[list[int]]:
    """Tokens of a request in the pages and slots of the group-th of them, from its prompt."""
    pages, slots = [1 + 2 * group, 2 + 2 * group], [1 + 4 * group + i for i in range(4)]
    prompt, tokens = list(range(3, 15)), []
    bucket = next(b for b in executor.buckets if b.kind == "prefill")
    tokens.append(tiny.run_row(executor, bucket, PrefillRow(prompt, 0, pages, slots[0], 1 + group))["tokens"][0].tolist())
    base = len(prompt)
    for _ in range(steps):
        outputs = tiny.run_row(executor, executor.buckets[0], DecodeRow(1 + group, base, pages, slots, 3))
        tokens.append(outputs["tokens"][0].tolist())
        base += int(outputs["counts"][0])
    return tokens


def test_an_executor_grows_by_request_and_shrinks_and_answers_the_same(executor) -> None:
    state = executor._state
    start = resident_bytes(state)
    first = generated(executor, 0)
    one = resident_bytes(state) - start
    assert 0 < one < executor.state_bytes / 16
    for group in range(1, 16):
        assert generated(executor, group) == first
    many = resident_bytes(state) - start
    assert one < many < executor.state_bytes / 2
    executor.give_back([{"pages": range(3, 33), "slots": range(5, 65)}])
    after = resident_bytes(state) - start
    assert after < many
    assert generated(executor, 9) == first
    assert generated(executor, 0) == first

"""lowering/native.py: the kernels in C++ mean what the primitives mean, and arrive with the executables that call them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npucompile.graphs import native as operators
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ops.paged_attention import paged_attention_reference
from npucompile.lowering import aoti, native

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def library(cache: Path) -> bytes:
    return native.compile_library(aoti.compiler()[0], aoti.instruction_set() or "native", cache)


@pytest.fixture
def attention(library: bytes) -> torch._ops.OpOverload:
    native.install(library)
    return operators.TABLE["paged_attention"].op


def operands(B: int, Q: int, H: int, G: int, D: int, P: int, starts: list[int], lengths: list[int], dtype: torch.dtype, seed: int = 0):
    """Queries, pools that are NaN wherever no live row may read, tables, starts and lengths."""
    r = torch.Generator().manual_seed(seed)
    N = max(1, -(-max(s + Q for s in starts) // P))
    order = (1 + torch.randperm(B * N + 3, generator=r)).tolist()
    table = torch.tensor(order[: B * N], dtype=torch.int32).view(B, N)
    pools = [torch.full((B * N + 4, P, G, D), float("nan"), dtype=dtype) for _ in range(2)]
    for b in range(B):
        for at in range(starts[b] + lengths[b]):
            for pool in pools:
                pool[table[b, at // P], at % P] = torch.randn(G, D, generator=r).to(dtype)
    q = torch.randn(B, Q, H, D, generator=r).to(dtype)
    return q, *pools, table, torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), D**-0.5


CASES = [
    (1, 1, 4, 2, 64, 16, [60], [1]),
    (1, 4, 4, 2, 64, 16, [60], [4]),
    (3, 1, 2, 2, 5, 4, [0, 7, 30], [1, 1, 1]),
    (4, 4, 6, 2, 18, 8, [13, 0, 3, 8], [4, 4, 2, 1]),
    (2, 8, 3, 1, 16, 2, [1, 50], [8, 3]),
    (5, 2, 8, 4, 32, 16, [500, 400, 3, 0, 16], [2, 1, 2, 2, 1]),
    (16, 4, 4, 2, 64, 16, [300 + i for i in range(16)], [4] * 16),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_the_reference_for_every_valid_query(attention, case, dtype):
    args = operands(*case, dtype)
    lengths = case[-1]
    got, want = attention(*args), paged_attention_reference(*args)
    for b, length in enumerate(lengths):
        assert torch.isfinite(got[b, :length]).all(), "nothing that nobody wrote was read"
        torch.testing.assert_close(got[b, :length], want[b, :length], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_row_says_the_same_in_every_batch(attention):
    """Bit for bit: what a request says must not depend on its neighbours, nor on how many threads there are."""
    args = operands(*CASES[-1], torch.float32)
    together, threads = attention(*args), torch.get_num_threads()
    q, k, v, table, starts, lengths, scale = args
    for b in range(0, 16, 5):
        one = slice(b, b + 1)
        assert torch.equal(attention(q[one], k, v, table[one], starts[one], lengths[one], scale)[0], together[b])
    assert torch.equal(attention(q, k, v, table, starts, lengths, scale), together)
    assert torch.get_num_threads() == threads


def test_queries_of_one_token_and_of_several_say_the_same(attention):
    """A candidate sees what it would see had it been fed alone."""
    q, k, v, table, starts, lengths, scale = operands(2, 4, 4, 2, 64, 16, [60, 3], [4, 4], torch.float32)
    together = attention(q, k, v, table, starts, lengths, scale)
    for t in range(4):
        one = attention(q[:, t : t + 1], k, v, table, starts + t, torch.ones_like(lengths), scale)
        assert torch.equal(one[:, 0], together[:, t])


def test_queries_may_lie_anywhere(attention):
    q, *rest = operands(*CASES[3], torch.float32)
    wide = torch.zeros(*q.shape[:-1], q.shape[-1] + 3)
    wide[..., : q.shape[-1]] = q
    assert torch.equal(attention(wide[..., : q.shape[-1]], *rest)[0], attention(q, *rest)[0])


def test_padding_rows_harm_nobody(attention):
    q, k, v, table, starts, lengths, scale = operands(3, 4, 4, 2, 64, 16, [60, 3, 9], [4, 4, 4], torch.float32)
    want = attention(q, k, v, table, starts, lengths, scale)
    table, starts, lengths = table.clone(), starts.clone(), lengths.clone()
    table[1], starts[1], lengths[1] = 0, 0, 0
    got = attention(q, k, v, table, starts, lengths, scale)
    assert torch.equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda a: (a[0].double(), *a[1:]), "queries of torch.float64"),
        (lambda a: (a[0], a[1].to(torch.bfloat16), *a[2:]), "keys of torch.bfloat16"),
        (lambda a: (a[0], a[1].transpose(0, 1).contiguous().transpose(0, 1), *a[2:]), "strides"),
    ],
)
def test_what_it_would_misread_is_refused(attention, change, told):
    with pytest.raises(LoweringError, match=told):
        attention(*change(operands(*CASES[0], torch.float32)))


def test_small_numbers_stay_what_they_are_in_a_process_that_loads_it(library, tmp_path):
    """Flushing them to zero would be a property of the thread that loads: seen by everyone, and by this proof only in a fresh process."""
    (tmp_path / "kernels.so").write_bytes(library)
    code = (
        "import sys; from pathlib import Path; from npucompile.lowering import native; "
        "native.install(Path(sys.argv[1]).read_bytes()); tiny = 2.0 ** -1060; assert tiny / 2 > 0, 'flushed to zero'"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "kernels.so")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_equal_sources_give_equal_bytes_and_are_compiled_once(library, cache, tmp_path, monkeypatch):
    compiler, architecture = aoti.compiler()[0], aoti.instruction_set() or "native"
    assert native.compile_library(compiler, architecture, tmp_path) == library
    monkeypatch.setattr(native.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.compile_library(compiler, architecture, cache) == library
    assert str(cache).encode() not in library


def test_a_changed_source_is_another_library(tmp_path, monkeypatch):
    before = native.digest()
    copy = tmp_path / "paged_attention.cpp"
    shutil.copy(native.SOURCES[0], copy)
    copy.write_text(copy.read_text() + "\n// changed\n")
    monkeypatch.setattr(native, "SOURCES", (copy,))
    assert native.digest() != before


def test_a_source_that_does_not_compile_says_why(tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("int main( {\n")
    monkeypatch.setattr(native, "SOURCES", (wrong,))
    with pytest.raises(LoweringError, match=r"could not compile the kernels: .*wrong\.cpp:1"):
        native.compile_library(aoti.compiler()[0], aoti.instruction_set() or "native", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_what_is_no_library_is_refused_and_the_last_one_stays(attention):
    args = operands(*CASES[0], torch.float32)
    want = attention(*args)
    with pytest.raises(LoweringError, match="7 bytes are not a library"):
        native.install(b"nothing")
    assert torch.equal(attention(*args), want)

"""Binds the native operators to the kernels in lowering/cpp, for graphs and lowerings that Python runs node by node.

Packages reach the kernels through shims of their own; here ctypes stands in for those.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from npucompile.graphs import native_ops as operators
from npucompile.lowering.backends.inductor import aoti, native

F32, I32 = torch.float32, torch.int32


_OWN = aoti.instruction_set() or "native"
LEVELS = [_OWN, "x86-64-v3"] if _OWN == "x86-64-v4" else [_OWN]
"""Architectures whose kernels this machine runs: its own first, and the one with vectors half as wide."""

_level = LEVELS[0]


@functools.cache
def library(architecture: str) -> ctypes.CDLL:
    """The kernels as a shared library; compiled once for each state of their sources, whoever asks, and kept in the temporary folder."""
    compiler = aoti.compiler()[0]
    vectors = ["-mprefer-vector-width=512"] if architecture == "x86-64-v4" else []
    flags = [*native.FLAGS, "-fvisibility=default", "-shared", f"-march={architecture}", *vectors]
    units = [path for path in native.sources() if path.suffix == ".cpp" and path.stem != native.SHIMS]
    parts = [native.digest(), *aoti.compiler(), *flags, str(os.getuid())]
    cached = Path(tempfile.gettempdir()) / f"npuc-kernels-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    if not cached.is_file():
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            fresh = Path(scratch) / cached.name
            subprocess.run([compiler, *flags, *map(str, units), "-o", str(fresh)], check=True)
            # Another worker may have made the same one meanwhile.
            fresh.replace(cached)
    return ctypes.CDLL(str(cached))


@contextmanager
def compiled_for(architecture: str) -> Iterator[None]:
    """Kernels called inside are those for an architecture of LEVELS."""
    global _level
    before, _level = _level, architecture
    try:
        yield
    finally:
        _level = before


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Kernels called inside may take so many threads."""
    openmp = library(_level)
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(count)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


def bind() -> None:
    """Makes every native operator callable in this process."""
    assert set(operators.TABLE) >= set(KERNELS)
    for name, kernel in KERNELS.items():
        operators.TABLE[name].bind(kernel)


def unbind() -> None:
    """Leaves them as they are in a process that runs packages alone."""
    for name in KERNELS:
        operators.TABLE[name].bind(None)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (M, K), N = x.shape, weight.shape[0]
    x, out = _rows(x), torch.empty(M, N)
    _call("npuc_linear", _at(x, F32), x.stride(0), _at(weight, F32, (N, K)), M, N, K, _at(out, F32))
    return out


def experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    (T, M), X, (E, _, F, _) = x.shape, ids.shape[1], gate_up.shape
    x, out = _rows(x), torch.empty(T, M)
    weights, ids = weights.contiguous(), ids.contiguous()
    chosen = _at(weights, F32, (T, X)), _at(ids, I32, (T, X))
    matrices = _at(gate_up, F32, (E, 2, F, M)), _at(down, F32, (E, M, F))
    _call("npuc_experts", _at(x, F32), x.stride(0), *chosen, *matrices, T, X, E, F, M, _at(out, F32))
    return out


def conv(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, read: torch.Tensor, write: torch.Tensor, num_computed_tokens: torch.Tensor
) -> torch.Tensor:
    (B, Q, C), taps, out = x.shape, weight.shape[1], torch.empty(x.shape)
    x, weight, read, write, num_computed_tokens = (t.contiguous() for t in (x, weight, read, write, num_computed_tokens))
    floats = _at(x, F32), _at(weight, F32, (C, taps)), _at(state, F32, (len(state), taps - 1, C))
    _call(
        "npuc_conv",
        *floats,
        _at(read, I32, (B,)),
        _at(write, I32, (B, Q)),
        _at(num_computed_tokens, I32, (B,)),
        B,
        Q,
        C,
        taps,
        _at(out, F32),
    )
    return out


def delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> torch.Tensor:
    (B, Q, Hk, Dk), (H, Dv), out = k.shape, v.shape[2:], torch.empty(v.shape)
    q, k, v, g, beta, read, write, num_computed_tokens = (t.contiguous() for t in (q, k, v, g, beta, read, write, num_computed_tokens))
    keys = _at(q, F32, (B, Q, Hk, Dk)), _at(k, F32), _at(v, F32, (B, Q, H, Dv)), _at(g, F32, (B, Q, H)), _at(beta, F32, (B, Q, H))
    slots = _at(state, F32, (len(state), H, Dv, Dk)), _at(read, I32, (B,)), _at(write, I32, (B, Q)), _at(num_computed_tokens, I32, (B,))
    _call("npuc_delta", *keys, *slots, _sizes(B, Q, Hk, H, Dk, Dv), _at(out, F32))
    return out


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    (B, Q, H, D), (pages, P, G, _), N = q.shape, k_cache.shape, page_table.shape[1]
    out, name = torch.empty(q.shape, dtype=q.dtype), {F32: "npuc_attention", torch.bfloat16: "npuc_attention_bf16"}[q.dtype]
    q, page_table, num_computed_tokens, query_lens = (t.contiguous() for t in (q, page_table, num_computed_tokens, query_lens))
    pools = (_at(pool, q.dtype, (pages, P, G, D)) for pool in (k_cache, v_cache))
    rows = _at(page_table, I32), _at(num_computed_tokens, I32, (B,)), _at(query_lens, I32, (B,))
    _call(name, _at(q, q.dtype), *pools, *rows, ctypes.c_float(scale), _sizes(B, Q, H, G, D, P, N), _at(out, q.dtype))
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    (B, Q, V), out = logits.shape, torch.empty(uniform.shape, dtype=I32)
    logits, temperature, top_k, top_p, min_p, uniform = (t.contiguous() for t in (logits, temperature, top_k, top_p, min_p, uniform))
    knobs = _at(temperature, F32, (B,)), _at(top_k, I32, (B,)), _at(top_p, F32, (B,)), _at(min_p, F32, (B,))
    _call("npuc_sample", _at(logits, F32), *knobs, _at(uniform, F32, (B, Q)), B, Q, V, _at(out, I32))
    return out


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, asked: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, Q, V = logits.shape
    chosen, ids, values = torch.empty(B, Q), torch.empty(B, Q, most, dtype=I32), torch.empty(B, Q, most)
    logits, tokens, asked = logits.contiguous(), tokens.contiguous(), asked.contiguous()
    results = _at(chosen, F32), _at(ids, I32), _at(values, F32)
    _call("npuc_logprobs", _at(logits, F32), _at(tokens, I32, (B, Q)), _at(asked, I32, (B,)), B, Q, V, most, *results)
    return chosen, ids, values


KERNELS = {
    "npuc_attention": attention,
    "npuc_conv": conv,
    "npuc_delta": delta,
    "npuc_experts": experts,
    "npuc_linear": linear,
    "npuc_logprobs": logprobs,
    "npuc_sample": sample,
}


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Rows as they lie, where their elements are neighbours."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _at(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> ctypes.c_void_p:
    """Where its elements lie; a kernel would misread any others. `shape` None: the rows of a matrix, at any distance."""
    assert tensor.dtype == dtype, f"a tensor of {tensor.dtype} where a kernel reads {dtype}"
    assert shape is None or (tuple(tensor.shape) == tuple(shape) and tensor.is_contiguous()), f"{tuple(tensor.shape)} is not {shape}"
    return ctypes.c_void_p(tensor.data_ptr())


def _sizes(*sizes: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(sizes))(*sizes)


def _call(name: str, *arguments: object) -> None:
    kernel = getattr(library(_level), name)
    kernel.restype = None
    kernel(*(ctypes.c_int64(argument) if isinstance(argument, int) else argument for argument in arguments))

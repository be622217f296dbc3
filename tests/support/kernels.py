"""The kernels of lowering/cpp through ctypes, bound to the native operators, so that Python can run graphs that call them.

Packages call the kernels through lowering/cpp/shims.cpp instead.
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
from npucompile.lowering.backends.inductor import aoti, native, packing

F32, I32, BF16, U8 = torch.float32, torch.int32, torch.bfloat16, torch.uint8

VARIANTS = (0, 1, 2)
"""Numbers of the variants of kernels (lowering/cpp/cpu.h)."""


_OWN = aoti.instruction_set() or "native"
LEVELS = [_OWN, "x86-64-v3"] if _OWN == "x86-64-v4" else [_OWN]
"""Architectures that the kernels are tested for: this machine's own, and for AVX-512 also the one with vectors half as wide."""

_level = LEVELS[0]


@functools.cache
def library(architecture: str) -> ctypes.CDLL:
    """The kernels as a shared library, compiled again only when their sources change, and cached in the temporary folder."""
    compiler = aoti.compiler()[0]
    vectors = ["-mprefer-vector-width=512"] if architecture == "x86-64-v4" else []
    flags = [*native.FLAGS, "-fvisibility=default", "-shared", f"-march={architecture}", *vectors]
    units = [path for path in native.sources() if path.suffix == ".cpp" and path.stem != native.SHIMS]
    parts = [native.digest(), *aoti.compiler(), *flags, str(os.getuid())]
    target = Path(tempfile.gettempdir()) / f"npuc-kernels-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            subprocess.run([compiler, *flags, *map(str, units), "-o", str(built)], check=True)
            # Atomic, because another pytest worker may compile the same library at the same time.
            built.replace(target)
    return ctypes.CDLL(str(target))


def keep_native(cache_dir: Path) -> Path:
    """Has a cache of the compiler share what `native` compiles with other workers and later runs: all of it goes by its sources.

    What inductor compiles stays in the cache itself, so that each run compiles it.
    """
    made_by = hashlib.sha256(Path(native.__file__).read_bytes()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"npuc-native-{os.getuid()}-{made_by}"
    kept.mkdir(exist_ok=True)
    cache_dir.mkdir(parents=True, exist_ok=True)
    if not (cache_dir / "native").exists():
        (cache_dir / "native").symlink_to(kept)
    return cache_dir


@contextmanager
def compiled_for(architecture: str) -> Iterator[None]:
    """Inside, kernels are called in their version for an architecture of LEVELS."""
    global _level
    before, _level = _level, architecture
    try:
        yield
    finally:
        _level = before


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, kernels use at most `count` threads."""
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
    """Undoes `bind`; a process that only runs packages has no native operators bound."""
    for name in KERNELS:
        operators.TABLE[name].bind(None)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Packs the weight first, which a package finds packed."""
    (M, K), N, kind = x.shape, weight.shape[0], operators.PANELS[x.dtype]
    x, out, panels = _rows(x), torch.empty(M, N, dtype=x.dtype), packed(weight, kind)
    _call(f"npuc_linear_{kind}", _at(x, x.dtype), x.stride(0), _at(panels, U8), M, N, K, _at(out, x.dtype))
    return out


def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    K, tokens, kind = table.shape[1], tokens.contiguous(), operators.PANELS[table.dtype]
    out, panels = torch.empty(len(tokens), K, dtype=table.dtype), packed(table, kind)
    wide = int(tokens.dtype == torch.int64)
    _call(f"npuc_embed_{kind}", _at(tokens, tokens.dtype), wide, _at(panels, U8), len(tokens), K, _at(out, table.dtype))
    return out


def quant_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    (M, K), N = x.shape, weight.shape[1]
    x, out, panels, scale = _rows(x), torch.empty(M, N, dtype=x.dtype), packed(weight, "int8"), scale.contiguous()
    rows = _at(x, x.dtype), int(x.dtype == BF16), x.stride(0)
    _call("npuc_quant_linear", *rows, _at(panels, U8), _at(scale, F32, (N,)), M, N, K, _at(out, x.dtype))
    return out


def static_quant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    input_scale: torch.Tensor,
    input_offset: torch.Tensor,
) -> torch.Tensor:
    (M, K), N = x.shape, weight.shape[1]
    x, out, panels = _rows(x), torch.empty(M, N, dtype=x.dtype), packed(weight, "int8")
    scale, bias, once = scale.contiguous(), bias.contiguous(), (ctypes.c_float(input_scale.item()), ctypes.c_float(input_offset.item()))
    rows = _at(x, x.dtype), int(x.dtype == BF16), x.stride(0)
    each = _at(scale, F32, (N,)), _at(bias, I32, (N,))
    _call("npuc_static_quant_linear", *rows, _at(panels, U8), *each, *once, M, N, K, _at(out, x.dtype))
    return out


def linear_int4(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    (M, K), (groups, N) = x.shape, scale.shape
    x, out, panels, scale = _rows(x), torch.empty(M, N, dtype=x.dtype), packed(weight, "int4"), scale.contiguous()
    rows = _at(x, x.dtype), int(x.dtype == BF16), x.stride(0)
    _call("npuc_linear_int4", *rows, _at(panels, U8), _at(scale, F32, (groups, N)), groups, M, N, K, _at(out, x.dtype))
    return out


def packed(weight: torch.Tensor, kind: str = "bf16") -> torch.Tensor:
    """A matrix, or several [..., rows, columns], in the panels of a kind of `packing.KINDS`."""
    N, K = weight.shape[-2:]
    weight, matrices = weight.contiguous(), weight.numel() // (N * K)
    size = getattr(library(_level), f"npuc_packed_{kind}")
    size.argtypes, size.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_int64
    out = torch.full((matrices * size(N, K),), 0xFF, dtype=U8)
    _call(f"npuc_pack_{kind}", _at(weight, packing.KINDS[kind]), matrices, N, K, _at(out, U8))
    return out


def every_variant() -> list[tuple[str, int]]:
    """The levels that packages are compiled for, each with every variant, which a machine need not have."""
    return [(level, variant) for level in LEVELS for variant in VARIANTS]


@contextmanager
def limited(variant: int) -> Iterator[int]:
    """Inside, kernels use at most a variant of lowering/cpp/cpu.h; gives the one that they use."""
    limit = library(_level).npuc_limit
    try:
        yield limit(variant)
    finally:
        limit(max(VARIANTS))


def experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    (T, M), X, (E, _, F, _) = x.shape, ids.shape[1], gate_up.shape
    x, out = _rows(x), torch.empty(T, M)
    weights, ids = weights.contiguous(), ids.contiguous()
    chosen = _at(weights, F32, (T, X)), _at(ids, I32, (T, X))
    matrices = _at(gate_up, F32, (E, 2, F, M)), _at(down, F32, (E, M, F))
    _call("npuc_experts", _at(x, F32), x.stride(0), *chosen, *matrices, T, X, E, F, M, _at(out, F32))
    return out


def experts_bf16(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Packs the weights first, which a package finds packed."""
    (T, M), X, (E, _, F, _) = x.shape, ids.shape[1], gate_up.shape
    x, out, weights, ids = _rows(x), torch.empty(T, M, dtype=x.dtype), weights.contiguous(), ids.contiguous()
    chosen, matrices = (_at(weights, F32, (T, X)), _at(ids, I32, (T, X))), (packed(gate_up), packed(down))
    rows = _at(x, BF16), x.stride(0)
    _call("npuc_experts_bf16", *rows, *chosen, *(_at(panels, U8) for panels in matrices), T, X, E, F, M, _at(out, BF16))
    return out


def grouped_int4(
    rows: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> torch.Tensor:
    (R, M), (E, F, _), G, H = rows.shape, down.shape, gate_up_scale.shape[1], down_scale.shape[1]
    rows, out, counts = _rows(rows), torch.empty(R, M, dtype=rows.dtype), counts.contiguous()
    gate_up_scale, down_scale = gate_up_scale.contiguous(), down_scale.contiguous()
    wide, narrow = packed(gate_up, "int4"), packed(down, "int4")
    given = _at(rows, rows.dtype), int(rows.dtype == BF16), rows.stride(0), _at(counts, torch.int64, (E,))
    matrices = _at(wide, U8), _at(gate_up_scale, F32, (E, G, 2 * F)), _at(narrow, U8), _at(down_scale, F32, (E, H, M))
    _call("npuc_grouped_int4", *given, *matrices, _sizes(R, E, F, M, G, H), _at(out, rows.dtype))
    return out


def grouped_int8(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    half: int,
) -> torch.Tensor:
    (R, M), (E, F, _), dtype = rows.shape, down.shape, BF16 if half else F32
    rows, row_scale, counts, out = rows.contiguous(), row_scale.contiguous(), counts.contiguous(), torch.empty(R, M, dtype=dtype)
    gate_up_scale, down_scale, wide, narrow = (
        gate_up_scale.contiguous(),
        down_scale.contiguous(),
        packed(gate_up, "int8"),
        packed(down, "int8"),
    )
    given = _at(rows, torch.int8, (R, M)), _at(row_scale, F32, (R,)), _at(counts, torch.int64, (E,))
    matrices = _at(wide, U8), _at(gate_up_scale, F32, (E, 2 * F)), _at(narrow, U8), _at(down_scale, F32, (E, M))
    _call("npuc_grouped_int8", *given, *matrices, _sizes(R, E, F, M), half, _at(out, dtype))
    return out


def conv(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, read: torch.Tensor, write: torch.Tensor, num_computed_tokens: torch.Tensor
) -> torch.Tensor:
    (B, Q, C), taps, out = x.shape, weight.shape[1], torch.empty(x.shape, dtype=x.dtype)
    x, weight, read, write, num_computed_tokens = (t.contiguous() for t in (x, weight, read, write, num_computed_tokens))
    floats = _at(x, x.dtype), _at(weight, x.dtype, (C, taps)), _at(state, x.dtype, (len(state), taps - 1, C))
    _call(
        _of("npuc_conv", x.dtype),
        *floats,
        _at(read, I32, (B,)),
        _at(write, I32, (B, Q)),
        _at(num_computed_tokens, I32, (B,)),
        B,
        Q,
        C,
        taps,
        _at(out, x.dtype),
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
    (B, Q, Hk, Dk), (H, Dv), out = k.shape, v.shape[2:], torch.empty(v.shape, dtype=v.dtype)
    q, k, v, g, beta, read, write, num_computed_tokens = (
        tensor.contiguous() for tensor in (q, k, v, g, beta, read, write, num_computed_tokens)
    )
    keys = (
        _at(q, v.dtype, (B, Q, Hk, Dk)),
        _at(k, v.dtype),
        _at(v, v.dtype, (B, Q, H, Dv)),
        _at(g, F32, (B, Q, H)),
        _at(beta, F32, (B, Q, H)),
    )
    slots = _at(state, F32, (len(state), H, Dv, Dk)), _at(read, I32, (B,)), _at(write, I32, (B, Q)), _at(num_computed_tokens, I32, (B,))
    _call(_of("npuc_delta", v.dtype), *keys, *slots, _sizes(B, Q, Hk, H, Dk, Dv), _at(out, v.dtype))
    return out


def conv_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_lens: torch.Tensor,
) -> torch.Tensor:
    (B, Q, C), taps, out = x.shape, weight.shape[1], torch.empty(x.shape)
    x, weight, *slots = (t.contiguous() for t in (x, weight, read, write, num_computed_tokens, query_lens))
    operands = _at(x, x.dtype), _at(weight, x.dtype, (C, taps)), _at(state, x.dtype, (len(state), taps - 1, C))
    _call(_of("npuc_conv_rows", x.dtype), *operands, *_row_numbers(B, slots), B, Q, C, taps, _at(out, F32))
    return out


def delta_rows(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_lens: torch.Tensor,
    eps: float,
    half: int,
) -> torch.Tensor:
    (B, Q, Hk, width), (slots, H, Dv, Dk), dtype = qkv.shape, state.shape, BF16 if half else F32
    qkv, decay, beta, *numbers = (x.contiguous() for x in (qkv, decay, beta, read, write, num_computed_tokens, query_lens))
    assert width == 2 * Dk + H // Hk * Dv
    tokens = _at(qkv, F32), _at(decay, F32, (B, Q, H)), _at(beta, F32, (B, Q, H)), _at(state, F32, (slots, H, Dv, Dk))
    out = torch.empty(B, Q, H, Dv, dtype=dtype)
    sizes = _sizes(B, Q, Hk, H, Dk, Dv)
    _call(_of("npuc_delta_rows", dtype), *tokens, *_row_numbers(B, numbers), ctypes.c_float(eps), sizes, _at(out, dtype))
    return out


def _row_numbers(B: int, numbers: Sequence[torch.Tensor]) -> list[ctypes.c_void_p]:
    """read, write, num_computed_tokens and query_lens of a step that keeps one state a row."""
    return [_at(of, I32, shape) for of, shape in zip(numbers, ((B,), (B, 1), (B,), (B,)), strict=True)]


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
    out, name = torch.empty(q.shape, dtype=q.dtype), _of("npuc_attention", q.dtype)
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
    logits, temperature, top_k, top_p, min_p, uniform = (
        tensor.contiguous() for tensor in (logits, temperature, top_k, top_p, min_p, uniform)
    )
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
    "npuc_conv_rows": conv_rows,
    "npuc_delta": delta,
    "npuc_delta_rows": delta_rows,
    "npuc_embed_bf16": embed,
    "npuc_embed_f32": embed,
    "npuc_experts": experts,
    "npuc_experts_bf16": experts_bf16,
    "npuc_grouped_int4": grouped_int4,
    "npuc_grouped_int8": grouped_int8,
    "npuc_linear_bf16": linear,
    "npuc_linear_f32": linear,
    "npuc_linear_int4": linear_int4,
    "npuc_logprobs": logprobs,
    "npuc_quant_linear": quant_linear,
    "npuc_sample": sample,
    "npuc_static_quant_linear": static_quant_linear,
}


def _of(name: str, dtype: torch.dtype) -> str:
    """A kernel's version for a dtype."""
    return {F32: name, BF16: f"{name}_bf16"}[dtype]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are contiguous, copied if need be."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _at(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> ctypes.c_void_p:
    """A tensor's data pointer, after a check of what the kernel relies on; `shape` None is for rows at any distance."""
    assert tensor.dtype == dtype, f"a tensor of {tensor.dtype} where a kernel reads {dtype}"
    assert shape is None or (tuple(tensor.shape) == tuple(shape) and tensor.is_contiguous()), f"{tuple(tensor.shape)} is not {shape}"
    return ctypes.c_void_p(tensor.data_ptr())


def _sizes(*sizes: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(sizes))(*sizes)


def _call(name: str, *arguments: object) -> None:
    kernel = getattr(library(_level), name)
    kernel.restype = None
    kernel(*(ctypes.c_int64(value) if isinstance(value, int) else value for value in arguments))

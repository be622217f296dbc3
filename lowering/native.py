"""Turns the kernels in cpp/ into a shared library, and such a library into what native operators call."""

from __future__ import annotations

import ctypes
import hashlib
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..graphs import native
from ..graphs import ops as ops
from ..graphs.errors import LoweringError

SOURCES = tuple(sorted((Path(__file__).parent / "cpp").glob("*.cpp")))

# Sums may be reordered, which is what makes loops vector loops. Not -ffast-math: a library linked with it makes the whole process
# flush small numbers to zero when it is loaded, and NaN and infinity must keep their meaning.
REORDER = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", *REORDER, "-s")

_SIZES = ctypes.c_int64 * 7
_POINTER = ctypes.c_void_p
_ENTRIES = {torch.float32: "paged_attention_f32", torch.bfloat16: "paged_attention_bf16"}

_bound: tuple[str, ctypes.CDLL] | None = None


def digest() -> str:
    """Of the sources and of how they are compiled."""
    told = [*FLAGS, *(source.read_text(encoding="utf-8") for source in SOURCES)]
    return hashlib.sha256("\0".join(told).encode()).hexdigest()


def compile_library(compiler: str, architecture: str, cache_dir: Path) -> bytes:
    """The library; compiled once for each source, compiler and architecture.

    Args:
        compiler: path of a C++ compiler.
        architecture: as `-march` takes it.
        cache_dir: keeps it between builds.

    Raises:
        LoweringError: what the compiler said.
    """
    key = hashlib.sha256(f"{digest()} {compiler} {architecture}".encode()).hexdigest()[:16]
    kept = cache_dir / "native" / f"{key}.so"
    if kept.is_file():
        return kept.read_bytes()
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        made = Path(scratch) / "native.so"
        mapped = f"-ffile-prefix-map={shlex.quote(str(SOURCES[0].parent))}=native"
        vectors = ("-mprefer-vector-width=512",) if architecture == "x86-64-v4" else ()
        command = [compiler, *FLAGS, f"-march={architecture}", *vectors, mapped, *map(str, SOURCES), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LoweringError(f"{compiler} could not compile the kernels: {(done.stderr.strip() or 'no message').splitlines()[0]}")
        # Another process may have made the same one meanwhile.
        made.replace(kept)
    return kept.read_bytes()


def install(library: bytes) -> None:
    """Loads a library and binds the native operators to it; one that is loaded already is not loaded again.

    Raises:
        LoweringError: it is no library of these kernels.
    """
    global _bound
    own = hashlib.sha256(library).hexdigest()
    if _bound is not None and _bound[0] == own:
        return
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        try:
            loaded = ctypes.CDLL(file.name)
            kernels = {dtype: getattr(loaded, name) for dtype, name in _ENTRIES.items()}
        except (OSError, AttributeError) as error:
            raise LoweringError(f"{len(library)} bytes are not a library of the kernels in {SOURCES[0].parent.name}/: {error}") from None
    for kernel in kernels.values():
        kernel.argtypes, kernel.restype = [_POINTER] * 6 + [ctypes.c_float] + [_POINTER] * 2, None
    native.TABLE["paged_attention"].bind(_paged_attention(kernels))
    _bound = own, loaded


def _paged_attention(kernels: dict[torch.dtype, Any]) -> Callable[..., torch.Tensor]:
    def run(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """As the primitive of that name; q [B, Q, H, D], pools [pages, P, G, D], f32 or bf16."""
        kernel = kernels.get(q.dtype)
        if kernel is None or k_cache.dtype != q.dtype or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            told = f"queries of {q.dtype}, keys of {k_cache.dtype} with strides {k_cache.stride()}"
            legal = f"contiguous pools of the queries' type, one of {', '.join(map(str, kernels))}"
            raise LoweringError(f"paged_attention of {told}; legal are {legal}")
        q, page_table, starts, lengths = q.contiguous(), page_table.contiguous(), starts.contiguous(), lengths.contiguous()
        (B, Q, H, D), (_, P, G, _) = q.shape, k_cache.shape
        out = torch.empty_like(q)
        pointers = [x.data_ptr() for x in (q, k_cache, v_cache, page_table, starts, lengths)]
        kernel(*pointers, scale, _SIZES(B, Q, H, G, D, P, page_table.shape[1]), out.data_ptr())
        return out

    return run

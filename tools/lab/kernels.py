"""Measures kernels of this project alone, beside torch's operators and the speed at which memory is read."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...graphs.ops.moe_experts import MoeExperts, moe_experts_static
from ...graphs.quantise import pack_w4
from ...lowering.backends.inductor import aoti, native
from ...lowering.backends.inductor.huge_pages import huge
from ...lowering.backends.inductor.packing import Layout, Packer
from ..bench import machine
from ..bench.report import Column, Table, Value
from ..bench.stats import Clock, interleave, ratio, seconds_per_call, spread
from ..progress import Progress

SHAPES = ((3072, 1024), (1024, 3072), (151936, 1024))
"""Channels and columns of measured matrices: two of a layer and the head of a model of 0.6 billion parameters."""

ROWS = (1, 4, 16, 64, 512)

WORKING_SET_BYTES = 2**30
"""Copies of one matrix, so that none is found in a cache, and what is read beside them."""

GROUP = 128
"""Weights of a channel that share a scale, in int4."""

TORCH_INT4_ROWS = 64
"""Most rows for which torch's int4 product is measured: of more it takes longer than what widens the weights before."""

TOKENS, CHOICES, EXPERTS, EXPERT = (1, 4, 16, 64), 8, {"bf16": 64, "int4": 256}, (768, 2048)
"""Tokens of a step, experts of a token, experts, and channels and columns of one: about 600 MB of either type."""

ATTENTIONS = ((1, 512, 1), (1, 4096, 1), (4, 2048, 4), (16, 512, 1), (1, 512, 512))
"""Requests, cached tokens and tokens of the step; 16 query heads, 8 key heads of 128, pages of 16 tokens."""


@dataclass(frozen=True)
class Kernels:
    """The kernels as a library of this process."""

    library: ctypes.CDLL
    packer: Packer

    @classmethod
    def compiled(cls, cache_dir: Path) -> Kernels:
        """Compiles them, for this machine's level.

        Raises:
            LoweringError: there is no C++ compiler.
        """
        compiler, level = aoti.compiler()[0], aoti.instruction_set() or "native"
        cache_dir.mkdir(parents=True, exist_ok=True)
        return cls(
            ctypes.CDLL(str(native.shared(compiler, level, cache_dir))), Packer(native.packer(compiler, level, cache_dir).read_bytes())
        )

    def call(self, name: str, *arguments: int | float | torch.Tensor | Sequence[int]) -> None:
        """Calls a kernel of lowering/cpp/kernels.h; a sequence is its `sizes`."""
        kernel = getattr(self.library, name)
        kernel.restype = None
        kernel(*map(_argument, arguments))


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int64(value) if isinstance(value, int) else (ctypes.c_int64 * len(value))(*value)


def kernels(cache_dir: Path, rounds: int, progress: Progress, clock: Clock = time.perf_counter) -> list[Table]:
    """Products and experts, attention and the gated delta rule; every candidate in turns with a read of memory.

    Raises:
        LoweringError: there is no C++ compiler.
    """
    own = Kernels.compiled(cache_dir)
    measure = _Turns(_reader(clock), rounds, clock)
    with torch.inference_mode():
        products = [row for N, K in SHAPES for row in _products(own, N, K, measure, progress)]
        experts = [*_experts(own, measure, progress), *_experts_int4(own, measure, progress)]
        states = [_attention(own, *case, measure, progress) for case in ATTENTIONS] + [
            _delta(own, B, measure, progress) for B in (1, 4, 16)
        ]
    return [
        Table("kernels", "Products with packed weights", _COLUMNS, tuple(products), _NOTES),
        Table("kernels", "Experts with packed weights", _COLUMNS, tuple(experts), _EXPERT_NOTES),
        Table("kernels", "Attention and states", _COLUMNS, tuple(states), ("bytes: keys and values, or states read and written",)),
    ]


def _reader(clock: Clock) -> machine.Reader:
    """The faster of two operators over memory in huge pages."""
    flat = huge(WORKING_SET_BYTES).view(torch.float32).fill_(1.0)
    reads: list[Callable[[], object]] = [flat.sum, lambda: torch.dot(flat, flat)]
    return machine.Reader(min(reads, key=lambda read: seconds_per_call(read, clock, calls=3)), WORKING_SET_BYTES, "memory")


_COLUMNS = (
    Column("what", "what"),
    Column("own_us", "us", 0),
    Column("other_us", "torch us", 0),
    Column("gain", "torch / own"),
    Column("gb_s", "GB/s", 1),
    Column("of_memory", "of memory's speed"),
    Column("gflop_s", "GFLOP/s", 0),
)
_NOTES = (
    "bfloat16 beside F.linear, int8 (rounding of rows included) beside the own product in bfloat16",
    f"int4 (groups of {GROUP}, rows of bfloat16) beside torch's _weight_int4pack_mm_for_cpu, which is not measured for more rows",
    "every call has another copy of the weights; of memory's speed: weight bytes a second, scales included, over those of a read of "
    "1 GiB in the same round",
)
_EXPERT_NOTES = (
    f"{CHOICES} experts a token, chosen at random in every call, of {EXPERTS['bf16']} in bfloat16 and {EXPERTS['int4']} in int4, each "
    f"2 x {EXPERT[0]} x {EXPERT[1]} and {EXPERT[1]} x {EXPERT[0]}; bytes: those of the chosen ones, each once",
    "bfloat16 beside the same in torch's operators; int4 beside nothing: torch's operators take about a second to widen what is chosen",
)


@dataclass(frozen=True)
class _Turns:
    stream: machine.Reader
    rounds: int
    clock: Clock

    def row(
        self, what: str, own: Callable[[], object], other: Callable[[], object] | None, nbytes: float, flops: int, calls: int = 8
    ) -> dict[str, Value]:
        candidates = {"own": (own, 8), "stream": (self.stream.read, 1)} | ({"other": (other, calls)} if other else {})
        timed = {name: partial(seconds_per_call, run, self.clock, calls=calls) for name, (run, calls) in candidates.items()}
        found = interleave(timed, self.rounds)
        speed = [nbytes / mine / (self.stream.nbytes / read) for mine, read in zip(found["own"], found["stream"], strict=True)]
        median = spread(found["own"]).median
        return {
            "what": what,
            "own_us": spread([1e6 * s for s in found["own"]]),
            "other_us": spread([1e6 * s for s in found["other"]]) if other else None,
            "gain": ratio(found["other"], found["own"]) if other else None,
            "gb_s": nbytes / median / 1e9,
            "of_memory": spread(speed),
            "gflop_s": flops / median / 1e9,
        }


def _copies(one: torch.Tensor, count: int) -> torch.Tensor:
    """Equal tensors [count, ...] in huge pages."""
    return huge(count * one.nbytes).view(one.dtype).view(count, *one.shape).copy_(one)


def _turning(copies: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The next copy at every call."""
    endless: Iterator[torch.Tensor] = (copy for _ in iter(int, 1) for copy in copies)
    return lambda: next(endless)


def _products(own: Kernels, N: int, K: int, measure: _Turns, progress: Progress) -> Iterator[Mapping[str, Value]]:
    count = max(2, WORKING_SET_BYTES // (2 * N * K))
    plain = _copies(torch.randn(N, K).bfloat16(), count)
    integers = _copies(torch.randint(-127, 128, (K, N), dtype=torch.int8), count)
    weights, eights = list(plain), list(integers)
    packed = own.packer.pack(weights, dict.fromkeys(range(count), Layout("bf16", 1, N, K)))
    packed8 = own.packer.pack(eights, dict.fromkeys(range(count), Layout("int8", 1, K, N)))
    next_plain, next_packed, next_packed8 = _turning(weights), _turning(list(packed.values())), _turning(list(packed8.values()))
    scale, int4 = torch.rand(N), _Int4(own, N, K)
    for M in ROWS:
        progress.say(f"product {M} x {N} x {K}")
        x, y = torch.randn(M, K).bfloat16(), torch.empty(M, N, dtype=torch.bfloat16)

        def halves(x: torch.Tensor = x, y: torch.Tensor = y, M: int = M) -> None:
            own.call("npuc_linear_bf16", x, K, next_packed(), M, N, K, y)

        def quarters(x: torch.Tensor = x, y: torch.Tensor = y, M: int = M) -> None:
            own.call("npuc_quant_linear", x, 1, K, next_packed8(), scale, M, N, K, y)

        def torchs(x: torch.Tensor = x) -> None:
            torch.nn.functional.linear(x, next_plain())

        yield measure.row(f"bf16 {M} x {N} x {K}", halves, torchs, 2 * N * K, 2 * M * N * K)
        yield measure.row(f"int8 {M} x {N} x {K}", quarters, halves, N * K, 2 * M * N * K)
        beside = int4.torchs(x) if M <= TORCH_INT4_ROWS else None
        yield measure.row(f"int4 {M} x {N} x {K}", int4.product(x, y), beside, int4.nbytes, 2 * M * N * K)


class _Int4:
    """Copies of one matrix of int4, for the own kernel and for torch's, and their products with rows of bfloat16."""

    def __init__(self, own: Kernels, N: int, K: int) -> None:
        self._own, self._N, self._K = own, N, K
        self.nbytes = N * K // 2 + 4 * N * K // GROUP
        count = max(2, WORKING_SET_BYTES // self.nbytes)
        values = torch.randint(-8, 8, (K, N), dtype=torch.int8)
        plain = list(_copies(pack_w4(values), count))
        self._next = _turning(list(own.packer.pack(plain, dict.fromkeys(range(count), Layout("int4", 1, K, N // 8))).values()))
        self._scale = torch.rand(K // GROUP, N)
        torchs = torch.ops.aten._convert_weight_to_int4pack_for_cpu((values.t() + 8).int().contiguous(), 1)
        self._next_torchs, self._both = _turning(list(_copies(torchs, count))), torch.rand(K // GROUP, N, 2).bfloat16()

    def product(self, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
        sizes = self._K // GROUP, len(x), self._N, self._K
        return lambda: self._own.call("npuc_linear_int4", x, 1, self._K, self._next(), self._scale, *sizes, y)

    def torchs(self, x: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._next_torchs(), GROUP, self._both)


def _choices(T: int, E: int) -> tuple[list[torch.Tensor], float]:
    """Different experts of each token, for each call of a round, and how many experts a call chooses on average."""
    drawn = [torch.rand(T, E).topk(min(CHOICES, E)).indices.int() for _ in range(8)]
    return drawn, sum(len(ids.unique()) for ids in drawn) / len(drawn)


def _experts(own: Kernels, measure: _Turns, progress: Progress) -> Iterator[Mapping[str, Value]]:
    E, (F, M) = EXPERTS["bf16"], EXPERT
    gate_up, down = (huge(2 * E * n * F * M).view(torch.bfloat16).normal_() for n in (2, 1))
    gate_up, down = gate_up.view(E, 2, F, M), down.view(E, M, F)
    packed = own.packer.pack([gate_up, down], {0: Layout("bf16", 2 * E, F, M), 1: Layout("bf16", E, M, F)})
    for T in TOKENS:
        progress.say(f"experts of {T} tokens")
        drawn, chosen = _choices(T, E)
        x, y, X = torch.randn(T, M).bfloat16(), torch.empty(T, M, dtype=torch.bfloat16), drawn[0].shape[1]
        share, mine, theirs = torch.rand(T, X), _turning(drawn), _turning(drawn)
        sizes = T, X, E, F, M

        def run(x: torch.Tensor = x, y: torch.Tensor = y, share: torch.Tensor = share, mine: Any = mine, sizes: Any = sizes) -> None:
            own.call("npuc_experts_bf16", x, M, share, mine(), packed[0], packed[1], *sizes, y)

        def torchs(x: torch.Tensor = x, share: torch.Tensor = share, theirs: Any = theirs) -> None:
            moe_experts_static(MoeExperts(x, share, theirs(), gate_up, down))

        yield measure.row(f"bf16 experts, {T} tokens", run, torchs, 6 * F * M * chosen, 6 * T * X * F * M, calls=2)


def _experts_int4(own: Kernels, measure: _Turns, progress: Progress) -> Iterator[Mapping[str, Value]]:
    E, (F, M) = EXPERTS["int4"], EXPERT
    gate_up, down = (torch.randint(-(2**31), 2**31, shape, dtype=torch.int32) for shape in ((E, M, 2 * F // 8), (E, F, M // 8)))
    packed = own.packer.pack([gate_up, down], {0: Layout("int4", E, M, 2 * F // 8), 1: Layout("int4", E, F, M // 8)})
    scales = torch.rand(E, M // GROUP, 2 * F), torch.rand(E, F // GROUP, M)
    for T in TOKENS:
        progress.say(f"experts of {T} tokens in int4")
        drawn, chosen = _choices(T, E)
        R = drawn[0].numel()
        rows, y, counts = (
            torch.randn(R, M).bfloat16(),
            torch.empty(R, M, dtype=torch.bfloat16),
            [ids.flatten().bincount(minlength=E) for ids in drawn],
        )
        mine = _turning(counts)

        def run(rows: torch.Tensor = rows, y: torch.Tensor = y, mine: Any = mine, R: int = R) -> None:
            weights = packed[0], scales[0], packed[1], scales[1]
            own.call("npuc_grouped_int4", rows, 1, M, mine(), *weights, (R, E, F, M, M // GROUP, F // GROUP), y)

        nbytes = (3 * F * M / 2 + 4 * 3 * F * M / GROUP) * chosen
        yield measure.row(f"int4 experts, {T} tokens", run, None, nbytes, 6 * R * F * M)


def _attention(own: Kernels, B: int, T: int, Q: int, measure: _Turns, progress: Progress) -> Mapping[str, Value]:
    H, G, D, P = 16, 8, 128, 16
    start = T if Q < T else 0
    N = -(-(start + Q) // P)
    progress.say(f"attention of {B} requests, {T} tokens")
    count = max(2, WORKING_SET_BYTES // (4 * B * N * P * G * D))
    keys, values = (_copies(torch.randn(B * N, P, G, D).bfloat16(), count) for _ in range(2))
    table = torch.randperm(B * N, dtype=torch.int32).view(B, N)
    starts, lengths = torch.full((B,), start, dtype=torch.int32), torch.full((B,), Q, dtype=torch.int32)
    q, out = torch.randn(B, Q, H, D).bfloat16(), torch.empty(B, Q, H, D, dtype=torch.bfloat16)
    next_keys, next_values = _turning(list(keys)), _turning(list(values))

    def run() -> None:
        own.call("npuc_attention_bf16", q, next_keys(), next_values(), table, starts, lengths, D**-0.5, (B, Q, H, G, D, P, N), out)

    def gathered() -> None:
        k, v = (pool().view(B, N * P, G, D)[:, : start + Q].transpose(1, 2) for pool in (next_keys, next_values))
        torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True, is_causal=start == 0)

    seen = start + (Q + 1) / 2
    flops = int(4 * B * Q * H * D * seen)
    return measure.row(f"attention, {B} requests of {T} tokens, {Q} a step", run, gathered, 4 * B * (start + Q) * G * D, flops)


def _delta(own: Kernels, B: int, measure: _Turns, progress: Progress) -> Mapping[str, Value]:
    H, D = 16, 128
    progress.say(f"delta rule of {B} requests")
    count = max(2, WORKING_SET_BYTES // (4 * B * H * D * D))
    states = _copies(torch.randn(B, H, D, D), count)
    q, k, v = (torch.nn.functional.normalize(torch.randn(B, 1, H, D), dim=-1).bfloat16() for _ in range(3))
    g, beta, out = -torch.rand(B, 1, H), torch.rand(B, 1, H), torch.empty(B, 1, H, D, dtype=torch.bfloat16)
    slots, begun, following = torch.arange(B, dtype=torch.int32), torch.ones(B, dtype=torch.int32), _turning(list(states))

    def run() -> None:
        own.call("npuc_delta_bf16", q, k, v, g, beta, following(), slots, slots, begun, (B, 1, H, H, D, D), out)

    return measure.row(f"delta rule, {B} requests, {H} states of {D} x {D}", run, None, 8 * B * H * D * D, 8 * B * H * D * D)

"""What is predicted: a model on a layout of NPUs, how it is scheduled, and its traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....lowering.machines import NPUS, Npu
from .shape import Shape


@dataclass(frozen=True)
class PlannedMachine:
    """An NPU and the time between two of them; an Atlas A3's by default.

    Attributes:
        name: of the target.
        npu: its nameplate.
        hop_s: between two NPUs of a node, which a collective takes once for each doubling of its ranks.
    """

    name: str
    npu: Npu = NPUS["ascend910_93"]
    hop_s: float = 0.7e-6


@dataclass(frozen=True)
class Scheme:
    """Bytes of a weight by class of matrix: products, experts, and those of the draft head."""

    name: str
    product: float
    expert: float
    draft: float

    @staticmethod
    def named(name: str, draft: str | None = None) -> Scheme:
        """ "w4a8", "w8a8" or "bf16"; int4 has a scale of each 64 or more, which are 0.53 bytes in all."""
        product, expert = {"w4a8": (1.0, 0.53), "w8a8": (1.0, 1.0), "w8a8-all": (1.0, 1.0), "w4a8-all": (1.0, 0.53)}.get(name, (2.0, 2.0))
        return Scheme(name, product, expert, 2.0 if draft == "bf16" else product)


@dataclass(frozen=True)
class PlannedLayout:
    """How an instance is spread over NPUs.

    Attributes:
        dp, tp: groups, and ranks of a group.
        spread: whether whole experts are spread over all ranks; else each is split over a group.
        head_in_group: whether the LM head is split over a group, not over all ranks.
        shares: whether the ranks of a group share a prompt's tokens in attention, and not its heads.
        fused: whether dispatch, experts and combine are one kernel.
        instances: how many of them there are.
    """

    dp: int
    tp: int
    spread: bool = True
    head_in_group: bool = True
    fused: bool = False
    instances: int = 1
    shares: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        text = f"dp={self.dp},tp={self.tp}"
        return f"{text} x {self.instances}" if self.instances > 1 else text


@dataclass(frozen=True)
class System:
    """One kind of instance.

    Attributes:
        drafts: k of a step.
        buckets: decode batch sizes of a group; empty where every batch size has a graph.
    """

    shape: Shape
    scheme: Scheme
    layout: PlannedLayout
    machine: PlannedMachine
    drafts: int = 0
    buckets: tuple[int, ...] = ()

    @property
    def candidates(self) -> int:
        """q: tokens that a step verifies of a request."""
        return self.drafts + 1


@dataclass(frozen=True)
class PlannedServing:
    """How steps are chosen.

    Attributes:
        policy: "npucompile" (ours: prefill and decode steps in turn), "sglang" (prompts first; groups without one decode meanwhile) or
            "vllm" (prompts in parts beside decoding).
        max_running: requests of a group.
        budget: tokens of a prefill step of a group; a prompt may exceed it alone unless `chunk` cuts it.
        chunk: most tokens of one prompt in a step; None cuts none.
        prompts: most prompts of a prefill step of a group.
        waits: whether prefill waits until every group has a prompt, or 30 steps (SGLang's SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE).
        memory_fraction: of the usable memory, for weights and pools.
        max_tokens: cap of cached tokens of a group.
        prefill_burst: prefill steps between two decode steps, of "npucompile".
        itl_target_ms: in place of that, what prefill and decode steps between two tokens of a stream should take at most
            (`runtime/scheduler/schedule.py`); None sets no such target.
        fixed_tokens: what every step costs whatever its size, in tokens, of "npucompile"; None where nobody knows (`Policy.fixed_tokens`).
        early_first_s: a first token is counted so many seconds after its request was sent though its prompt still waits, as the published
            rows of an EAGLE-3 head and several mixed groups do: all first tokens within 7 s, then gaps of 34 and 41 s. None counts none.
    """

    policy: str = "sglang"
    max_running: int = 256
    budget: int = 16384
    chunk: int | None = None
    prompts: int = 1024
    waits: bool = False
    memory_fraction: float = 0.8
    max_tokens: int | None = None
    prefill_burst: int = 1
    itl_target_ms: float | None = None
    fixed_tokens: float | None = None
    early_first_s: float | None = None


@dataclass(frozen=True)
class Workload:
    """Traffic: each request's lengths and when it wants to start, and how many may be in flight.

    Attributes:
        inputs, outputs: tokens of each request.
        concurrency: requests in flight at most; clients send the next when one ends.
        arrivals: seconds at which each may be sent at the earliest.
        cached: leading tokens that all prompts share, computed once.
        priorities: of each request, lower first; empty where all are alike.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    concurrency: int
    arrivals: tuple[float, ...] = ()
    cached: int = 0
    priorities: tuple[int, ...] = ()

    @staticmethod
    def uniform(input_len: int, output_len: int, concurrency: int, requests: int, rate: float | None = None, cached: int = 0) -> Workload:
        """Requests of the same lengths; with `rate`, requests/s that arrive evenly."""
        arrivals = tuple(i / rate for i in range(requests)) if rate else ()
        return Workload((input_len,) * requests, (output_len,) * requests, concurrency, arrivals, cached)

    @property
    def requests(self) -> int:
        return len(self.inputs)

    @property
    def mean_input(self) -> float:
        return sum(self.inputs) / len(self.inputs)

    @property
    def mean_output(self) -> float:
        return sum(self.outputs) / len(self.outputs)


@dataclass(frozen=True)
class LoadCase:
    """Everything of a prediction.

    Attributes:
        decode: the instance that decodes; it prefills too where `prefill` is None.
        serving, prefill_serving: of each.
        accepted, spread: tokens a step on average over requests, and their coefficient of variation.
        assumed: what was assumed because it is not known.
    """

    decode: System
    serving: PlannedServing
    workload: Workload
    accepted: float = 1.0
    spread: float = 0.0
    prefill: System | None = None
    prefill_serving: PlannedServing | None = None
    assumed: tuple[str, ...] = field(default=())

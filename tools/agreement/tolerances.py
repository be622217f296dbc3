"""How far two runs may differ, by dtype and by kind of result, and why; verify, bring-up and the emulated run read this table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from ...graphs.types import Signature
from .pools import rounds_caches

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Values (a, b) of two runs in parts, of which each has room in a cache of the processor."""

Measure = Callable[[Pairs], float]


def difference(pairs: Pairs) -> float:
    """Largest absolute difference over the larger of 1 and the largest |a|; infinite where either holds a NaN."""
    apart, size = _norms(pairs, torch.inf)
    return _finite(apart.amax() / size.amax().clamp(min=1.0))


def deviation(pairs: Pairs) -> float:
    """Root mean square of the difference over that of a; infinite where either holds a NaN."""
    pairs = list(pairs)
    apart, size = (torch.linalg.vector_norm(norms) for norms in _norms(pairs, 2))
    return _finite(apart / size.clamp(min=1e-12 * max(1, sum(a.numel() for a, _ in pairs)) ** 0.5))


WORST_ROW = 0.3
"""What counts of the deviation of the worst row. A router that is undecided moves a row by more than is legal of most: of a model of 4
layers and 8 experts with random weights most rows were off by 0.05, some by 0.35 and one by 0.48. A wrong row is off by 1 or more."""


def together(measure: Measure, errors: Sequence[float]) -> float:
    """The measure of rows that were measured each: of `difference` the largest; of `deviation` the median, or a share of the worst."""
    worst = max(errors, default=0.0)
    return worst if measure is difference or not errors else max(WORST_ROW * worst, median(errors))


def _norms(pairs: Pairs, order: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each pair the norm of the difference and that of a, from 0."""
    found = [(torch.zeros(()), torch.zeros(()))]
    for a, b in pairs:
        if a.numel():
            a, b = a.float(), b.float()
            found.append((torch.linalg.vector_norm(a - b, order), torch.linalg.vector_norm(a, order)))
    apart, size = zip(*found, strict=True)
    return torch.stack(apart), torch.stack(size)


def _finite(measure: torch.Tensor) -> float:
    """A measure, which is NaN where a value is NaN: infinite then; 0 where nothing was measured."""
    return float(measure.nan_to_num(nan=float("inf")))


# --- two executables of one step ---


@dataclass(frozen=True)
class Tolerance:
    """Largest differences allowed between two executables.

    Attributes:
        logits, state: bound on the measure of the logits and of each state pool.
        tokens: whether greedy tokens must be equal.
        measure: `difference` or `deviation`.
    """

    logits: float
    state: float
    tokens: bool
    measure: Measure


TOLERANCES = {
    # State is allowed STATE_SHARE times what logits are: the draft head's keys accumulate the rounding of all layers. Longer and more
    # sums than those of small models are allowed more (`summing`).
    torch.float32: Tolerance(1e-5, 4e-5, True, difference),
    # A router that rounds the other way sends a token to another expert, so that single values differ by several percent: in bfloat16
    # only an average can show that a kernel is right. A wrong kernel is off by the size of the values, a leak gives NaN.
    torch.bfloat16: Tolerance(0.2, 0.2, False, deviation),
}
"""Allowed differences by computing dtype."""

ROUNDED = Tolerance(0.02, 0.02, False, difference)
"""Allowed in float32 where caches are int8: a value between two integers may be rounded the other way, one part in 127."""

ROUNDED_ACTIVATIONS = Tolerance(0.5, 0.5, False, deviation)
"""Allowed in bfloat16 where products read activations in int8: what the last bit of a bfloat16 changes, rounding to 127 steps makes
larger. A model of 24 layers with random weights is off by 0.12 to 0.37, and by 0.05 to 0.09 without int8."""

SUMMED = Tolerance(1e-4, 1e-4, True, difference)
"""Allowed in float32 between one device and several ranks, which add in another order."""


STATE_SHARE = 4
ROUNDING = 2.0**-24
"""Largest relative error of one operation in float32."""
ORDERS = 2.0
"""Both runs are off, in different ways; and it is the worst of many values that is measured."""


def summing(signature: Signature) -> float:
    """How far two orders of adding may put the logits of a float32 graph apart, over their size.

    A sum of n terms in float32 is off by about sqrt(n) roundings of its size (Higham and Mary, "A new approach to probabilistic rounding
    error analysis", SIAM J. Sci. Comput. 41, 2019), and errors of sums behind each other add up as their squares do. Each weight matrix
    [.., n] is a sum of n terms, and each norm one. A term that is left out, or taken twice, is an error of 1 / sqrt(n).
    """
    terms = sum(leaf.aval.shape[-1] for leaf in signature.params if leaf.aval.shape)
    return float(ORDERS * ROUNDING * terms**0.5)


def tolerance_of(dtype: torch.dtype, signature: Signature, ranks: int = 1) -> Tolerance:
    """Allowed differences of a graph that computes in a dtype on so many ranks."""
    if dtype == torch.float32 and rounds_caches(signature.state):
        return ROUNDED
    if dtype == torch.float32:
        least, logits = TOLERANCES[dtype] if ranks == 1 else SUMMED, summing(signature)
        return replace(least, logits=max(least.logits, logits), state=max(least.state, STATE_SHARE * logits))
    # Only weights that meet activations in int8 are int8: those of W4A16 are packed into int32.
    return ROUNDED_ACTIVATIONS if any(leaf.aval.dtype == torch.int8 for leaf in signature.params) else TOLERANCES[dtype]


# --- an emulated run of all ranks, against one device ---


@dataclass(frozen=True)
class AllowedDifferences:
    """Largest legal differences from the trace, each over the larger of 1 and the largest value compared.

    Attributes:
        typical: of the median of a rank's logits of decode steps, or of all groups' where the rank has few results.
        rounding: the same of chunks of prompts, of the median row of a pool, and of drafts, whose logits are not compared: what one value
            explains that is rounded the other way.
        worst: of any logit.
        state: of a pool's live values: root mean square of the difference over that of the values.
        drafts: share of the drafts that had to be equal which may differ: a draft head chooses experts and keys of its own.
    """

    typical: float
    rounding: float
    worst: float
    state: float
    drafts: float = 0.0


FLOAT = AllowedDifferences(typical=1e-4, rounding=1e-4, worst=5e-3, state=1e-2)
"""For float32 graphs without integers. Ranks add in another order than one device: over ten seeds with 16 ranks the median of the
differences of logits was below 3e-6 and the largest 1e-4. A router that is undecided between two experts within that noise, about once in
1e4 tokens, would change one token of a prompt by more; `worst` leaves room for its effect on the step's other tokens."""

QUANTISED = AllowedDifferences(typical=1e-3, rounding=3e-2, worst=0.25, state=0.25, drafts=0.02)
"""For float32 graphs with int8 activations. A sum in another order moves a value across a rounding step in every second chunk of 64 tokens,
and in few decode steps, as each starts from the trace's state. Of qwen3.5-tiny over 4 ranks, in W8A8 and W4A8 with six seeds each, the
median of decode steps was 2e-7; logits of chunks were off by up to 2e-2, the median row of a pool by 9e-3, and its values by 0.09. A
rounding step may also change the choice of an expert, and with it a token by the weight of that expert: `worst` allows single logits a
quarter. Scales of one product that were 1 % off moved the median of decode steps by 1e-2 and more. Of the drafts of a small DeepSeek-R1
over 32 ranks, 6 of 456 differed."""

QUANTISED_LATENTS = replace(QUANTISED, drafts=0.1)
"""The same where latents are cached as int8 too, so that every row that is moved across a rounding step moves all that read it. One device
whose norms were off by 3e-7 drafted otherwise in up to five of eight steps, with logits that were right to 1e-6. Over eight seeds the ranks
of a mesh did so in 4 of 540 drafts, and in 2 of the 54 of one seed; with a draft head that read other pages, in half of them."""

SETTLED = 2e-5
"""Difference of logits up to which a sampled token must be the same. A random number that close to the border between two tokens occurs
about once in 1e4 tokens."""


# --- a device, against the CPU kernels of its operators ---

RELATIVE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-11}
"""Largest difference of a float over the sum of its own size and that of the largest value of its row (last dimension).

Four roundings of bfloat16 and float16. float32 products may be computed in fewer bits on a matrix unit, so it is allowed 2**-11."""
INT8_STEPS = 1
"""Quantised values may round the other way where sums are added in another order."""

DEVIATION = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.02}
"""Largest root mean square of the differences over that of the values, of several operators after each other: single values differ more,
where a router or a rounding step that is undecided goes the other way."""
INTEGERS = 0.05
"""Largest share of integers that differ: tokens and drafts, where two logits are as good as equal."""

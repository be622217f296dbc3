"""How an operator is tried alone on a device: the operands that its documentation allows, and the risk that it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from .call import GeOp

Tensors = Mapping[str, torch.Tensor]
LARGE = 64.0
"""Size of large floats: their products still fit float16."""
Indices = Callable[[GeOp, torch.Tensor, Tensors, torch.Generator], torch.Tensor]
"""Legal values of an integer input: from its recorded value and the recorded inputs of the operator."""
Corner = tuple[str, dict[str, torch.Tensor]]
"""What is special about a set of operands, and the inputs that are changed for it."""
LAST = 99


@dataclass(frozen=True)
class Trial:
    """A trial of one operator.

    Attributes:
        order: operators run in this order, those of most risk first.
        wrong: the assumption of docs/on-hardware.md, by its short name, that a wrong result refutes.
        refused: the one that a refusal of the device refutes. A build checks operators that have their own against its tables.
        layer: the one that is wrong where a layer with this operator is, although each of its operators is right alone.
        distinct: its integer results depend on the order of floats, of which a device may choose any among equal ones.
        any_integers: it takes any integers as data, besides sizes and axes, which are constants.
        positive: inputs above zero: divisors, and operands of logarithms and roots.
        floats: changes random floats of an input so that the operator's documentation allows them.
        indices: legal values of integer inputs.
        corners: sets of operands at the border of what is legal.
    """

    order: int = LAST
    wrong: str = "kernels"
    refused: str = "compiles"
    layer: str = ""
    distinct: bool = False
    any_integers: bool = False
    positive: tuple[str, ...] = ()
    floats: Callable[[str, torch.Tensor], torch.Tensor] = lambda slot, drawn: drawn
    indices: Mapping[str, Indices] = field(default_factory=dict)
    corners: Callable[[GeOp, Tensors], Iterator[Corner]] = lambda op, recorded: iter(())


PLAIN = Trial()
ANY_INTEGERS = Trial(any_integers=True)
DISTINCT = Trial(distinct=True)
POSITIVE = Trial(positive=("x",))


def gather_index(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Indices within the gathered axis."""
    axis = int(recorded["axis"].flatten()[0]) if "axis" in recorded else int(op.attrs.get("dim", 0))
    return torch.randint(0, recorded["x"].shape[axis], tuple(value.shape), generator=generator)


def pool_rows(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Different rows of the pool, by as many indices each as `var` is written by: writing one twice is undefined."""
    pool, depth = (recorded["var"], value.shape[-1]) if "var" in recorded else (recorded["key_cache"].flatten(0, 1), 1)
    if (count := value.numel() // depth) > pool.shape[:depth].numel():
        return value
    flat = torch.randperm(pool.shape[:depth].numel(), generator=generator)[:count]
    return torch.stack(torch.unravel_index(flat, pool.shape[:depth]), -1).reshape(value.shape)


def _expert_range(op: GeOp) -> tuple[int, int]:
    first, last = op.attrs.get("active_expert_range") or (0, op.attrs.get("expert_num", 1))
    return int(first), int(last)


def experts(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Different experts for the choices of a token."""
    first, last = _expert_range(op)
    if last - first < value.shape[1]:
        return value
    return torch.stack([first + torch.randperm(last - first, generator=generator)[: value.shape[1]] for _ in range(value.shape[0])])


def expert_corners(op: GeOp, recorded: Tensors) -> Iterator[Corner]:
    """All tokens to the same experts, and none to an expert of this rank."""
    ids, (first, last) = recorded["expert_idx"], _expert_range(op)
    choices = torch.arange(ids.shape[1], dtype=ids.dtype)
    yield "all tokens to the same experts", {"expert_idx": (first + choices % max(1, last - first)).expand(ids.shape).contiguous()}
    if int(op.attrs.get("expert_num", last)) > last:
        yield "no token to an expert of this rank", {"expert_idx": torch.full_like(ids, last)}


def routed_rows(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Each row once."""
    return torch.randperm(value.numel(), generator=generator)


def groups(op: GeOp, value: torch.Tensor, recorded: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Three quarters of the rows, spread over all groups."""
    counts = torch.randint(0, len(value), (_grouped_rows(recorded) * 3 // 4,), generator=generator).bincount(minlength=len(value))
    return counts.cumsum(0) if _are_running(op) else counts


def group_corners(op: GeOp, recorded: Tensors) -> Iterator[Corner]:
    """No rows at all, and all of them in the last group."""
    if "group_list" in recorded:
        groups = recorded["group_list"]
        empty = [0] * (len(groups) - 1)
        for name, counts in (("no rows", [0, *empty]), ("one group has all", [*empty, _grouped_rows(recorded)])):
            values = torch.tensor(counts, dtype=groups.dtype)
            yield name, {"group_list": values.cumsum(0) if _are_running(op) else values}


def _grouped_rows(recorded: Tensors) -> int:
    return (recorded["x0"] if "x0" in recorded else recorded["x"]).shape[0]


def _are_running(op: GeOp) -> bool:
    """Whether a list of groups has running sums of their rows instead of their numbers."""
    return bool(op.attrs.get("group_list_type", 0) == 0)


def padded_rows(op: GeOp, recorded: Tensors) -> Iterator[Corner]:
    """One live row."""
    if (lengths := recorded.get("actual_seq_lengths_kv")) is not None:
        yield "every row but the first is padding", {"actual_seq_lengths_kv": torch.cat([lengths[:1], torch.zeros_like(lengths[1:])])}


def first_tokens(op: GeOp, recorded: Tensors) -> Iterator[Corner]:
    """Rows that go on from the first token of the step before."""
    if (accepted := recorded.get("num_accepted_tokens")) is not None:
        yield "every row goes on from its first token", {"num_accepted_tokens": torch.ones_like(accepted)}


def delta_rule_floats(slot: str, drawn: torch.Tensor) -> torch.Tensor:
    """Queries and keys are normalised, gates are logarithms of decays, beta is a sigmoid; anything else diverges on any machine."""
    allowed = {"g": -drawn.abs(), "beta": drawn.sigmoid(), "state": 0.3 * drawn, "initial_state": 0.3 * drawn}
    return allowed.get(slot, torch.nn.functional.normalize(drawn, dim=-1))

"""Rotary position embedding: the angles of positions, and queries or keys rotated by them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class RopeAngles(NamedTuple):
    """Operands of `rope_angles`."""

    positions: Tensor  # [T] integers
    width: int  # rotated dimensions, even
    theta: float


class ScaledRopeAngles(NamedTuple):
    """Operands of `scaled_rope_angles`; frequencies are indexed 0 to width / 2 - 1, the fastest first."""

    positions: Tensor  # [T] integers
    width: int  # rotated dimensions, even
    theta: float
    factor: float  # divides frequencies
    low: float  # those up to this index are kept
    high: float  # those from this index on are divided; between the two the share of the divided one grows linearly
    magnitude: float  # multiplies both results
    by_frequency: bool  # whether `low` and `high` are frequencies, the former the larger, and the share grows with these


class Rope(NamedTuple):
    """Operands of `rope`."""

    x: Tensor  # [T, H, D] with an even D
    cos: Tensor  # [T, R/2] f32 with R <= D, even
    sin: Tensor  # [T, R/2] f32


rope_angles = Primitive("rope_angles", RopeAngles, factors="t -> t _, t _")
scaled_rope_angles = Primitive("scaled_rope_angles", ScaledRopeAngles, factors="t -> t _, t _")
rope = Primitive("rope", Rope, factors="t h _, t _, t _ -> t h _", like="x")


def _angles_abstract(args: RopeAngles | ScaledRopeAngles) -> tuple[Tensor, Tensor]:
    shape, device = (args.positions.shape[0], args.width // 2), args.positions.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.float32, device=device)


rope_angles.abstract(_angles_abstract)
scaled_rope_angles.abstract(_angles_abstract)


@rope_angles.reference
def rope_angles_reference(args: RopeAngles) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `position * theta^(-2i/width)` (arXiv:2104.09864).

    Text positions are equal on all axes of an interleaved multi-axis rope, so this serves mrope models too.

    Returns:
        cos and sin, each [T, width / 2] f32.
    """
    angles = args.positions.float()[:, None] * _frequencies(args)
    return angles.cos(), angles.sin()


@scaled_rope_angles.reference
def scaled_rope_angles_reference(args: ScaledRopeAngles) -> tuple[Tensor, Tensor]:
    """The same with frequencies divided for a longer context, all of them or the slow ones: by index as in YaRN (arXiv:2309.00071), or by
    frequency as in Llama 3.1.

    Returns:
        `magnitude` times cos and sin, each [T, width / 2] f32.
    """
    frequencies = _frequencies(args)
    place = frequencies if args.by_frequency else torch.arange(args.width // 2, dtype=torch.float32, device=frequencies.device)
    divided, kept = ((place - a) / (b - a) for a, b in ((args.low, args.high), (args.high, args.low)))
    frequencies = frequencies / args.factor * divided.clamp(0, 1) + frequencies * kept.clamp(0, 1)
    angles = args.positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if args.magnitude == 1 else (cos * args.magnitude, sin * args.magnitude)


def _frequencies(args: RopeAngles | ScaledRopeAngles) -> Tensor:
    exponent = torch.arange(0, args.width, 2, dtype=torch.float32, device=args.positions.device) / args.width
    return 1.0 / args.theta**exponent


rope_angles.lowering("npu")(rope_angles_reference)
scaled_rope_angles.lowering("npu")(scaled_rope_angles_reference)


def _angles_cost(args: RopeAngles | ScaledRopeAngles) -> Cost:
    values = args.positions.shape[0] * args.width // 2
    return Cost(3 * values, nbytes(args.positions), 8 * values)


rope_angles.cost(_angles_cost)
scaled_rope_angles.cost(_angles_cost)


@rope.reference
def rope_reference(args: Rope) -> Tensor:
    """Rotates channel i < R/2 of each head with channel i + D/2; the rest pass through.

    Returns:
        [T, H, D], dtype of x.
    """
    x, cos, sin = args
    rotated, half = cos.shape[1], x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    low, high = x[..., :rotated].float(), x[..., half : half + rotated].float()
    parts = [(low * cos - high * sin).to(x.dtype), x[..., rotated:half], (high * cos + low * sin).to(x.dtype), x[..., half + rotated :]]
    return torch.cat(parts, -1)


@rope.lowering("npu")
def _rope_npu(args: Rope) -> Any:
    """One kernel over whole heads, whose angles are as wide as its operand and of its dtype: channels that pass through turn by 0."""
    x, cos, sin = args
    angles = (_wide(part, rest, x).to(x.dtype)[None, :, None, :] for part, rest in ((cos, 1.0), (sin, 0.0)))
    return torch.ops.npu.npu_rotary_mul(x[None], *angles).squeeze(0)


def _wide(part: Tensor, rest: float, x: Tensor) -> Tensor:
    """[T, D] from [T, R/2]: each half of a head begins with `part` and ends with `rest`."""
    half = x.shape[-1] // 2
    if half == part.shape[1]:
        return torch.cat([part, part], -1)
    tail = torch.full((part.shape[0], half - part.shape[1]), rest, dtype=part.dtype, device=part.device)
    return torch.cat([part, tail, part, tail], -1)


@rope.cost
def _rope_cost(args: Rope) -> Cost:
    x, cos, _ = args
    return Cost(6 * x.shape[0] * x.shape[1] * cos.shape[1], nbytes(*args), nbytes(x))

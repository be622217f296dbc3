"""Rotary position embeddings as configurations describe them: width, base and how frequencies are scaled to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs import ops
from ..graphs.errors import ConfigError
from ..graphs.steps.inputs import AXES
from .config import Fields

# "mrope" has several axes, on all of which a text token has the same position: its angles are those of one axis, unless there are pictures.
KINDS = ("default", "mrope", "linear", "yarn", "llama3")

SECTIONS = (11, 11, 10)
"""Of a file that names none (transformers 5.23, Qwen3_5TextRotaryEmbedding)."""

_FIELDS = {
    "apply_yarn_scaling", "attention_factor", "attn_factor", "beta_fast", "beta_slow", "extrapolation_factor", "factor",
    "high_freq_factor", "low_freq_factor",
    "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_theta", "rope_type", "truncate", "type",
}  # fmt: skip
"""Fields that a rotation may have; some kinds do not read all of them, as in transformers."""


@dataclass(frozen=True)
class Scaling:
    """Frequencies divided by `factor`: all of them ("linear"), or those that turn too slowly to be known from training ("yarn", "llama3").

    Attributes:
        low, high: index of the last frequency that is kept, and of the first that is divided wholly; between them the share of the
            divided one grows linearly.
        by_frequency: whether those are the frequencies themselves, and the share grows linearly with these ("llama3").
        magnitude: multiplies cosine and sine.
        softmax: multiplies the scale of attention's scores where a family follows `mscale_all_dim`.
    """

    factor: float
    low: float
    high: float
    magnitude: float = 1.0
    softmax: float = 1.0
    by_frequency: bool = False


@dataclass(frozen=True)
class Rotary:
    """The rotation of one family's queries and keys.

    Attributes:
        dim: rotated channels of a head, even.
        theta: base; channel pair i turns by `theta^(-2i/dim)` a token.
        scaling: None for the frequencies of training.
        positions: most tokens that the scaling is meant for; 0 where it names none.
        sections: of three axes of positions, how many frequencies turn by each; empty where the file names none.
    """

    dim: int
    theta: float
    scaling: Scaling | None = None
    positions: int = 0
    sections: tuple[int, ...] = ()

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each position [T], or [T, 3] in time, row and column, each [T, dim / 2] f32."""
        if positions.dim() == 2:
            cosines, sines = zip(*(self.angles(positions[:, axis].contiguous()) for axis in range(AXES)), strict=True)
            return self._interleaved(*cosines), self._interleaved(*sines)
        if self.scaling is None:
            cos, sin = ops.rope_angles(positions, self.dim, self.theta)
        else:
            scaling = self.scaling
            edges = scaling.factor, scaling.low, scaling.high, scaling.magnitude, scaling.by_frequency
            cos, sin = ops.scaled_rope_angles(positions, self.dim, self.theta, *edges)
        return cos, sin

    def _interleaved(self, time: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Every third frequency is a row's, and every third a column's, as far as their sections go; all others are of the time."""
        _, rows, columns = self.sections or SECTIONS
        index = torch.arange(self.dim // 2, dtype=torch.int32, device=time.device)
        of_row = torch.where((index % AXES == 1) & (index < AXES * rows), row, time)
        return torch.where((index % AXES == 2) & (index < AXES * columns), column, of_row)

    def longest(self, stated: int) -> int:
        """Most tokens of a context whose configuration states `max_position_embeddings`, which people leave when they add a scaling."""
        return max(stated, self.positions)


def rotary_fields(fields: Fields, width: int, read: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The rotation of heads of that width, and the longest context with it; options are those of `read_rotary`."""
    rotary = read_rotary(fields, width, **options)
    return {"rotary": rotary, "max_position_embeddings": rotary.longest(read["max_position_embeddings"])}


def read_rotary(text: Fields, width: int, *, partial: float = 1.0, base: float | None = None) -> Rotary:
    """Reads the rotation of heads of `width` channels from a config.json.

    Files of transformers 5 have `rope_parameters`; older ones have `rope_theta`, and `rope_scaling` where frequencies are scaled, which
    users also add to newer files: as in transformers it wins.

    Args:
        text: fields of the text model.
        partial: share of the channels that are rotated where no field says it.
        base: `rope_theta` where no field says it; None where one must.

    Raises:
        ConfigError: naming the field that is missing, malformed or of an unknown kind.
    """
    parameters, older = text.sub("rope_parameters"), text.sub("rope_scaling")
    scaling = older if older.values else parameters
    for fields in (parameters, older):
        fields.refuse_others(_FIELDS)
        for name in ("rope_type", "type"):
            fields.only(name, *KINDS)
    share = text.get(float, "partial_rotary_factor", default=partial)
    dim = int(width * scaling.get(float, "partial_rotary_factor", default=parameters.get(float, "partial_rotary_factor", default=share)))
    if not 0 < dim <= width or dim % 2:
        raise ConfigError(f"{text.where}: head_dim * partial_rotary_factor is {dim}; expected an even number of at most {width}")
    theta = next((fields for fields in [fields for fields in (scaling, parameters, text) if fields.has("rope_theta")]), scaling)
    sections = next((_sections(fields) for fields in (scaling, parameters) if fields.has("mrope_section")), ())
    given = {} if base is None else {"default": base}
    rotary = Rotary(dim, theta.get(float, "rope_theta", minimum=1, **given), sections=sections)
    kind = scaling.get(str, "rope_type", default=scaling.get(str, "type", default="default"))
    if kind == "linear":
        factor, all_dim = scaling.get(float, "factor", minimum=1), scaling.get(float, "mscale_all_dim", default=0.0, minimum=0)
        # Beyond `high` at every index: all frequencies are divided.
        return replace(rotary, scaling=Scaling(factor, -1.0, 0.0, softmax=_softmax(factor, all_dim)))
    if kind == "llama3":
        return replace(rotary, scaling=_by_frequency(scaling))
    return _yarn(rotary, scaling, text) if kind == "yarn" else rotary


def _by_frequency(fields: Fields) -> Scaling:
    """Llama 3.1's: keeps frequencies that turn more than `high_freq_factor` times in the context of training, and divides those that turn
    fewer than `low_freq_factor` times (transformers 5.23, modeling_rope_utils.py)."""
    context = fields.get(int, "original_max_position_embeddings", minimum=1)
    factor = fields.get(float, "factor", minimum=1)
    low, high = (fields.get(float, f"{edge}_freq_factor", minimum=2**-10) for edge in ("low", "high"))
    if low >= high:
        raise ConfigError(f"{fields.where}: low_freq_factor is {low} and high_freq_factor {high}; expected a lower one below the higher")
    return Scaling(factor, 2 * math.pi * high / context, 2 * math.pi * low / context, by_frequency=True)


def _sections(fields: Fields) -> tuple[int, ...]:
    value = fields.values["mrope_section"]
    if not isinstance(value, list | tuple) or len(value) != AXES or not all(type(count) is int and count >= 0 for count in value):
        raise ConfigError(f"{fields.where}: mrope_section is {value!r}; expected {AXES} numbers of frequencies")
    return tuple(value)


def _yarn(rotary: Rotary, fields: Fields, text: Fields) -> Rotary:
    """YaRN (arXiv:2309.00071): divides frequencies that turn fewer than `beta_slow` times in the context of training, and keeps those that
    turn more than `beta_fast` times."""
    stated = text.get(int, "max_position_embeddings", minimum=1)
    original = fields.get(int, "original_max_position_embeddings", default=stated, minimum=1)
    given = fields.has("factor") or not fields.has("original_max_position_embeddings")
    factor = fields.get(float, "factor", minimum=1) if given else max(1.0, stated / original)
    fast, slow = (fields.get(float, name, default=turns, minimum=2**-10) for name, turns in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if slow > fast or rotary.theta == 1:
        raise ConfigError(
            f"{fields.where}: beta_fast is {fast}, beta_slow {slow} and rope_theta {rotary.theta}; expected beta_fast >= beta_slow, "
            "and rope_theta above 1"
        )
    mscale = fields.get(float, "mscale", default=0.0, minimum=0)
    all_dim = fields.get(float, "mscale_all_dim", default=0.0, minimum=0)
    inferred = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    if not fields.has("attention_factor"):
        # vLLM's field (rotary_embedding/yarn_scaling_rope.py), which published files have and transformers passes over.
        inferred *= fields.get(float, "attn_factor", default=1.0, minimum=0)
    else:
        fields.only("attn_factor", 1, 1.0)
    fields.only("extrapolation_factor", 1, 1.0)
    fields.only("apply_yarn_scaling", True)
    low, high = _turning(rotary, original, fast), _turning(rotary, original, slow)
    if fields.get(bool, "truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    scaling = Scaling(
        factor,
        float(low),
        float(high) if high != low else high + 0.001,
        fields.get(float, "attention_factor", default=inferred, minimum=0),
        _softmax(factor, all_dim),
    )
    return replace(rotary, scaling=scaling, positions=int(original * factor))


def _turning(rotary: Rotary, context: int, turns: float) -> float:
    """Index of the frequency that turns so many times in a context."""
    return rotary.dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))


def _softmax(factor: float, all_dim: float) -> float:
    return _mscale(factor, all_dim) ** 2 if all_dim else 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

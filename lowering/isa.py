"""The instruction sets of x86 that code is compiled, chosen and proved for: one record each, and which of them is in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile

from .. import ISA as ISA
from ..graphs.errors import SpecError

SWITCH = "NPUCOMPILE_ISA"
"""The variable that names the most of `LEVELS` that may be used; lowering/cpp/cpu.cpp reads it too."""


@dataclass(frozen=True)
class Level:
    """One instruction set, with all that is before it in `LEVELS`.

    Attributes:
        march: what a compiler is told.
        torch: value of torch's variable ATEN_CPU_CAPABILITY.
        onednn: value of oneDNN's variable ONEDNN_MAX_CPU_ISA.
        features: that it adds, by their names in `torch.cpu.get_capabilities()`.
    """

    march: str
    torch: str
    onednn: str
    features: tuple[str, ...]


LEVELS: Mapping[str, Level] = {
    "default": Level("x86-64", "default", "SSE41", ()),
    "avx2": Level("x86-64-v3", "avx2", "AVX2", ("avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt")),
    "avx512": Level("x86-64-v4", "avx512", "AVX512_CORE", ("avx512_bw", "avx512_cd", "avx512_dq", "avx512_f", "avx512_vl")),
    "avx512_bf16": Level("x86-64-v4", "avx512", "AVX512_CORE_BF16", ("avx512_bf16", "avx512_vnni")),
    "amx": Level("x86-64-v4", "avx512", "AVX512_CORE_AMX", ("amx_bf16", "amx_int8", "amx_tile")),
}

_NAMES = tuple(LEVELS)
_HIDEABLE = ("avx512", "avx10", "amx")


def variables() -> dict[str, str]:
    """Those that hide from torch and oneDNN what is beyond the level of `SWITCH`; none where it is not set.

    Raises:
        SpecError: there is no such level.
    """
    if not ISA:
        return {}
    if ISA not in LEVELS:
        raise SpecError(f"{SWITCH}={ISA} is no instruction set; legal are {', '.join(LEVELS)}")
    return {"ATEN_CPU_CAPABILITY": LEVELS[ISA].torch, "ONEDNN_MAX_CPU_ISA": LEVELS[ISA].onednn}


def in_use() -> str | None:
    """The name of the most that this processor, torch and `SWITCH` allow; None on architectures without levels.

    Raises:
        SpecError: the level of `SWITCH` does not exist, or the processor does not have it.
    """
    import torch

    variables()
    known, capability = torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability().lower()
    if known.get("architecture") != "x86_64":
        if ISA:
            raise SpecError(f"{SWITCH}={ISA}: levels are of x86-64, and this is {known.get('architecture')}; legal is none")
        return None
    present = list(takewhile(lambda name: all(known.get(feature) for feature in LEVELS[name].features), LEVELS))
    if ISA and ISA not in present:
        lacking = [feature for name in _upto(ISA) for feature in LEVELS[name].features if not known.get(feature)]
        raise SpecError(f"{SWITCH}={ISA}: this processor lacks {', '.join(lacking)}; legal here are {', '.join(present)}")
    compiled = [name for name in LEVELS if LEVELS[name].torch == capability]
    if not compiled:
        return None
    return min(present[-1], compiled[-1], ISA or present[-1], key=_NAMES.index)


def described() -> str:
    """The level in use, or torch's word where there are no levels."""
    import torch

    return in_use() or torch.backends.cpu.get_cpu_capability().lower()


def has(level: str) -> bool:
    """Whether a level is in use, or one beyond it."""
    used = in_use()
    return used is not None and _NAMES.index(used) >= _NAMES.index(level)


def compiled_features() -> tuple[str, ...]:
    """Features that code compiled for `march` of the level in use needs, without the variants beyond it; none where there are no levels."""
    used = in_use()
    if used is None:
        return ()
    least = next(name for name in LEVELS if LEVELS[name].march == LEVELS[used].march)
    return tuple(feature for name in _upto(least) for feature in LEVELS[name].features)


def level_of(needed: Collection[str]) -> str:
    """The least level that has all of some features; "default" for those of no level."""
    ordered = {feature: name for name, level in LEVELS.items() for feature in level.features}
    return max((ordered[feature] for feature in needed if feature in ordered), key=_NAMES.index, default=_NAMES[0])


def features() -> frozenset[str]:
    """Features of this processor that code may use, by torch's names; where `SWITCH` is set, none beyond its level."""
    import torch

    known = frozenset(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    if not ISA:
        return known
    allowed = {feature for name in _upto(ISA) for feature in LEVELS[name].features}
    beyond = {feature for level in LEVELS.values() for feature in level.features} - allowed
    return frozenset(name for name in known - beyond if name in allowed or not name.startswith(_HIDEABLE))


def _upto(name: str) -> tuple[str, ...]:
    return _NAMES[: _NAMES.index(name) + 1]

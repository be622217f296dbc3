"""Turns this process into the record of what executables built here depend on."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping

import torch

from .. import __version__


def toolchain() -> dict[str, str]:
    """Versions and machine, by name."""
    return {
        "npucompile": __version__,
        "torch": str(torch.__version__),
        "machine": platform.machine(),
    }


def differences(built: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(field, built, running) of everything that keeps what was built from running here."""
    running = toolchain()
    changed = []
    for name in sorted({*built, *running}):
        old, new = built.get(name, "not recorded"), running.get(name) or _installed(name)
        if old != new:
            changed.append((name, old, new))
    return changed


def _installed(name: str) -> str:
    """Version of a distribution that only some backends build with."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def missing_features(needed: Iterable[str]) -> list[str]:
    """CPU features, by torch's names, that executables need and this machine lacks."""
    here = torch.cpu.get_capabilities()
    return sorted(name for name in needed if not here.get(name))

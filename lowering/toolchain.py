"""The versions and the machine that executables depend on, and how those of a build differ from this process."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Collection, Iterable, Mapping

import torch

from .. import __version__
from . import isa


def toolchain() -> dict[str, str]:
    """Versions and machine, by name."""
    return {
        "npucompile": __version__,
        "torch": str(torch.__version__),
        "machine": platform.machine(),
    }


def required(versions: Mapping[str, str], *, host_bound: bool = True, build_only: Collection[str] = ()) -> dict[str, str]:
    """Those of a toolchain's versions that must be equal where an executable is opened.

    Args:
        host_bound: whether executables hold code of the processor that they were built on (`Backend.host_bound`). Of others the machine
            does not count, nor a label such as "+cpu" of torch's version, which wheels of one release have on some processors only.
        build_only: names that decide what is built and not what can be opened (`Backend.build_only`).
    """
    kept = {name: version for name, version in versions.items() if name not in build_only}
    if not host_bound:
        kept.pop("machine", None)
        kept = {name: version.partition("+")[0] for name, version in kept.items()}
    return kept


def differences(built: Mapping[str, str], *, host_bound: bool = True, build_only: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """(field, built, running) of every required version that differs; executables of another toolchain must not run here."""
    built = required(built, host_bound=host_bound, build_only=build_only)
    here = {**dict.fromkeys(built, ""), **toolchain()}
    running = required({name: version or _installed(name) for name, version in here.items()}, host_bound=host_bound, build_only=build_only)
    changed = []
    for name in sorted(running):
        old, new = built.get(name, "not recorded"), running[name]
        if old != new:
            changed.append((name, old, new))
    return changed


def _installed(name: str) -> str:
    """Version of a distribution that only some backends use."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def missing_features(needed: Iterable[str]) -> list[str]:
    """CPU features, by torch's names, that executables need and this machine lacks, or hides."""
    return sorted(set(needed) - isa.features())

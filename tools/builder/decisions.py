"""Who decided each setting of a build: a flag, the row of a published deployment, the checkpoint, the plan, or a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...graphs.errors import SpecError
from .settings.record import DECIDERS, FLAG, PLAN
from .settings.table import EXPLAINED

Decided = tuple[tuple[str, str], ...]
"""Pairs of a setting and who decided it, in the order of `explain`."""


def decided(plan: Any, *, quantised: bool) -> Decided:
    """Who decided the settings of a `planned.Plan`.

    Args:
        quantised: whether the checkpoint's own description says how its matrices are stored.
    """
    options = plan.options
    repeated = read_decided(options.decided_by) if options.decided_by else {}
    flags = {name for name, setting in EXPLAINED.items() if getattr(options, setting.name) not in (None, "auto", ())}
    return tuple(
        (name, repeated.get(name) or (FLAG if name in flags else setting.by(plan, quantised))) for name, setting in EXPLAINED.items()
    )


def changed(pairs: Decided, *names: str) -> Decided:
    """The same where the plan decided settings after all."""
    return tuple((setting, PLAN if setting in names else who) for setting, who in pairs)


def format_decided(pairs: Decided) -> str:
    """Pairs as the value of `--decided-by`, without those that flags decided; read_decided reads it back."""
    return ",".join(f"{name}={who}" for name, who in pairs if who != FLAG)


def read_decided(text: str) -> Mapping[str, str]:
    """Reads `--decided-by`; a setting that it leaves out was decided by a flag.

    Raises:
        SpecError: naming the setting or the decider that there is not.
    """
    given = {}
    for part in filter(None, text.split(",")):
        name, _, who = part.partition("=")
        if name not in EXPLAINED or who not in DECIDERS:
            raise SpecError(f"--decided-by {part}: legal are {', '.join(EXPLAINED)}, each = one of {', '.join(DECIDERS)}")
        given[name] = who
    return {name: given.get(name, FLAG) for name in EXPLAINED}

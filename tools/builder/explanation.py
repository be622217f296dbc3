"""Says in plain sentences what a build decided, who decided it, and what would change it."""

from __future__ import annotations

from dataclasses import dataclass

from ...lowering.artifact.manifest import Manifest
from .settings.record import CHECKPOINT, DEFAULT, FLAG, PLAN, ROW, Setting
from .settings.recorded import Recorded
from .settings.table import EXPLAINED


@dataclass(frozen=True)
class Explained:
    """A setting of an artifact.

    Attributes:
        name: the option of `npucompile build` that sets it.
        value: as that option takes it; "" for none.
        by: who decided it: one of `settings.record.DECIDERS`, or "" where the artifact does not say.
        what, why, change: sentences.
    """

    name: str
    value: str
    by: str
    what: str
    why: str
    change: str


def explanation(manifest: Manifest) -> list[Explained]:
    """All settings of an artifact that has them, in the order of `settings.table.EXPLAINED`."""
    recorded, explained = Recorded(manifest), []
    for name, setting in EXPLAINED.items():
        value = setting.recorded(recorded) if setting.recorded else None
        if value is None:
            continue
        by = manifest.decided_by.get(name, "")
        why, change = setting.unchosen(by, recorded) or (_why(setting, by, manifest), _change(setting, by))
        explained.append(Explained(name, str(value), by, setting.what(str(value), recorded), why, change))
    return explained


def _why(setting: Setting, by: str, manifest: Manifest) -> str:
    sentences = {
        FLAG: f"The build was told so with --{setting.option}.",
        ROW: f"The published deployment {manifest.deployment} says so.",
        CHECKPOINT: "The checkpoint says so.",
        PLAN: manifest.reasons.get(setting.option, setting.planned),
        DEFAULT: "It is the default.",
    }
    return sentences.get(by, "The artifact does not record who decided it; a new build does.")


def _change(setting: Setting, by: str) -> str:
    row = f" It goes before what --deployment says of --{setting.option}." if by == ROW else ""
    return f"--{setting.option} changes it{f': {setting.change}' if setting.change else ''}.{row}"

"""The config.json fields of published models by name, so that graphs can be built without a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one preset and what another says in their place, objects field by field."""
    inner = {key: _over(base[key], value) for key, value in own.items() if isinstance(value, dict) and isinstance(base.get(key), dict)}
    return {**base, **own, **inner}


def _presets(directory: Path) -> dict[str, dict[str, Any]]:
    """The presets of a directory's files; one with `as` has the config and the tower of that one above it, but for what it says itself."""
    presets: dict[str, dict[str, Any]] = {}
    for file in sorted(directory.glob("*.json")):
        for name, own in json.loads(file.read_text(encoding="utf-8")).items():
            base = presets[own.pop("as")] if "as" in own else {}
            presets[name] = _over({key: base[key] for key in ("config", "tower") if key in base}, own)
    return presets


_PUBLISHED = _presets(Path(__file__).parent / "published")

PRESETS: Mapping[str, Mapping[str, Any]] = {name: preset["config"] for name, preset in _PUBLISHED.items()}
"""Text fields of the published config.json files, by preset name; a file a family in `published/` beside this one."""

TOWERS: Mapping[str, Mapping[str, Any]] = {name: preset["tower"] for name, preset in _PUBLISHED.items() if "tower" in preset}
"""What those files have of vision towers, beside `text_config`; of qwen3.5-0.8b, whose file nobody here has seen, nothing."""

SOURCES: Mapping[str, str] = {name: preset["source"] for name, preset in _PUBLISHED.items()}
"""Where the fields of each preset were read."""

PARAMETERS: Mapping[str, int] = {name: preset["parameters"] for name, preset in _PUBLISHED.items()} | {"qwen3.5-tiny": 4_151_384}
"""Parameters of each model without its draft head, bundled ones included: a listing need not load torch to count them."""

NAMES: Mapping[str, tuple[str, ...]] = {name: tuple(preset["names"]) for name, preset in _PUBLISHED.items() if "names" in preset}
"""Names by which other checkpoints with exactly those fields are published, beside the preset's own."""

DRAFT_PRESETS: Mapping[str, Mapping[str, Any]] = _presets(Path(__file__).parent / "published" / "drafts")
"""Presets of draft models: `config` (fields of the published config.json), `parts` (`DraftSource.parts`), `target` (the preset of the model
that it drafts for) and `source`."""

BUNDLED = ("qwen3.5-tiny",)
"""Presets whose checkpoint is part of the package, in `bundled/<name>` beside this file."""

"""What two artifacts differ in: every field of their manifests, and operators, launches, options and cost of each bucket's graph."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import Leaf
from ...lowering.artifact.artifact import Artifact, GraphEntry, Manifest
from ...lowering.artifact.manifest import plain_value
from ...lowering.ascend.shipped import shipped_graph
from . import cost, views

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")

Pair = list[Any]
"""What the first artifact has, and the second; None where one has nothing of that name."""

_APART = {"graphs", "references", "files"}
"""Fields whose differences are shown by bucket, or are digests of what is shown."""
_DIGESTS = {"stamp", "digest", "eager", "stages", "compiled", "bucket", "census", "collectives"}
"""Fields of a bucket that are digests and paths, or are shown in another form."""


def differences(a: Artifact, b: Artifact, bucket: str | None = None) -> dict[str, Any]:
    """The differences as plain values; empty sections are left out.

    Args:
        bucket: name of the only bucket to compare; None is all.

    Returns:
        `equal`; `fields`: name -> [a, b], by field of the manifest; `buckets`: by name, `only` ("a" or "b") or the differences of its
        graph: `totals` (operators, launches, bytes of the file), `operators` by type, `cost`, `options`, `collectives`, other fields.

    Raises:
        SpecError: neither artifact has the bucket.
    """
    entries = [{entry.bucket.name: entry for entry in artifact.manifest.graphs} for artifact in (a, b)]
    if bucket is not None:
        entries = [{name: entry for name, entry in mine.items() if views.is_named(entry, bucket)} for mine in entries]
        if not any(entries):
            names = dict.fromkeys(entry.bucket.name for artifact in (a, b) for entry in artifact.manifest.graphs)
            raise SpecError(f"neither artifact has bucket {bucket!r}; they have {', '.join(names)}")
    sections = _sections(a.manifest, b.manifest)
    buckets = {}
    for name in dict.fromkeys((*entries[0], *entries[1])):
        if name not in entries[0] or name not in entries[1]:
            buckets[name] = {"only": "a" if name in entries[0] else "b"}
        elif changed := _graph(a, entries[0][name], b, entries[1][name], aside=bool(sections)):
            buckets[name] = changed
    return {"a": str(a.path), "b": str(b.path), "equal": not sections and not buckets, "fields": sections, "buckets": buckets}


def _sections(a: Manifest, b: Manifest) -> dict[str, dict[str, Pair]]:
    sections = {}
    for field in fields(Manifest):
        if field.name not in _APART and (changed := _changed(_named(getattr(a, field.name)), _named(getattr(b, field.name)))):
            sections[field.name] = changed
    return sections


def _named(value: Any) -> Mapping[str, Any]:
    """A field as values by name: leaves by their own, a model's configuration by its keys, a single value by ""."""
    if isinstance(value, tuple) and value and isinstance(value[0], Leaf):
        return {leaf.name: str(leaf.aval) for leaf in value}
    plain = plain_value(value)
    if isinstance(plain, dict) and isinstance(plain.get("config"), str):
        plain["config"] = json.loads(plain["config"])
    return _flat(plain)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Values by dotted names; of a list of named records each has its own name."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        value = {item["name"]: {key: inner for key, inner in item.items() if key != "name"} for item in value}
    if not isinstance(value, Mapping) or not value:
        return {} if isinstance(value, Mapping) else {name: value}
    flat = {}
    for key, inner in value.items():
        flat.update(_flat(inner, f"{name}.{key}" if name else str(key)))
    return flat


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    return {name: [a.get(name), b.get(name)] for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)}


def _graph(a: Artifact, mine: GraphEntry, b: Artifact, theirs: GraphEntry, *, aside: bool) -> dict[str, Any]:
    """Differences of one bucket.

    Args:
        aside: the artifacts differ in more than this bucket, so that equal graphs may cost differently.
    """
    same = _file(a, mine)[0] == _file(b, theirs)[0]
    own = {name: getattr(mine, name) for name in mine.__dataclass_fields__ if name not in _DIGESTS}
    other = {name: getattr(theirs, name) for name in theirs.__dataclass_fields__ if name not in _DIGESTS}
    parts: dict[str, Mapping[str, Pair]] = {"operators": _changed(mine.census, theirs.census)}
    parts |= {name: _changed(_named(own[name]), _named(other[name])) for name in own}
    parts["traced_cost"] = parts.pop("cost")
    parts["collectives"] = _changed(*(Counter(map(" ".join, entry.collectives)) for entry in (mine, theirs)))
    totals: dict[str, Pair] = {
        "operators": [sum(mine.census.values()), sum(theirs.census.values())],
        "bytes": [_file(a, mine)[1], _file(b, theirs)[1]],
    }
    if not same or aside:
        facts = [cost.bucket_facts(artifact, entry) for artifact, entry in ((a, mine), (b, theirs))]
        totals["launches"] = [each.get("launches") for each in facts]
        parts["cost"] = _changed(*(_flat(_rounded(each.get("cost", {}))) for each in facts))
        parts |= _options(a, mine, b, theirs)
    parts["totals"] = {name: pair for name, pair in totals.items() if pair[0] != pair[1]}
    parts["graph"] = {} if same else {"sha256": [_file(a, mine)[0], _file(b, theirs)[0]]}
    order = ("totals", "cost", "operators", "options", "engine")
    shown = {name: dict(pairs) for name, pairs in parts.items() if pairs}
    return {name: shown[name] for name in sorted(shown, key=lambda name: order.index(name) if name in order else len(order))}


def _file(artifact: Artifact, entry: GraphEntry) -> tuple[str | None, int | None]:
    """Digest and size of a bucket's executable."""
    if entry.compiled is None:
        return None, None
    record = artifact.manifest.files[entry.compiled.file]
    return record.sha256, record.size_bytes


def _rounded(value: Any) -> Any:
    """Floats with six significant digits: the sums of an estimate depend on its order."""
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _options(a: Artifact, mine: GraphEntry, b: Artifact, theirs: GraphEntry) -> dict[str, Mapping[str, Pair]]:
    files = [shipped_graph(artifact, entry) for artifact, entry in ((a, mine), (b, theirs))]
    return {
        "options": _changed(*(dict(file.options) if file else {} for file in files)),
        "engine": _changed(*(dict(file.engine) if file else {} for file in files)),
    }


def lines(told: Mapping[str, Any]) -> list[str]:
    """The differences as text."""
    if told["equal"]:
        return [f"equal: {told['a']} and {told['b']}"]
    shown = [f"a: {told['a']}", f"b: {told['b']}"]
    for name, parts in told["buckets"].items():
        if "only" in parts:
            shown += ["", f"{name}: only in {parts['only']}"]
            continue
        shown += ["", name]
        for part, pairs in parts.items():
            shown += [f"  {part}", *(f"  {line}" for line in _pairs(pairs))]
    for name, pairs in told["fields"].items():
        shown += ["", name, *_pairs(pairs)]
    return shown


def _pairs(pairs: Mapping[str, Pair]) -> list[str]:
    """A line a difference; equal differences of numbered things, such as layers, share one."""
    folded: dict[tuple[str, str], list[str]] = {}
    for name, (a, b) in pairs.items():
        folded.setdefault((_LAYER.sub("*", name), f"{_text(a)} -> {_text(b)}{_change(a, b)}"), []).append(name)
    rows = [(names[0] if len(names) == 1 else f"{name} x {len(names)}", text) for (name, text), names in folded.items()]
    width = min(max(len(name) for name, _ in rows), 60)
    return [f"  {name:<{width}} {text}" for name, text in rows]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        text = str(value)
    elif isinstance(value, int | float):
        text = f"{value:,}"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _change(a: Any, b: Any) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return f"  ({b - a:+,.6g})" if numbers and isinstance(a + b, float) else f"  ({b - a:+,})" if numbers else ""

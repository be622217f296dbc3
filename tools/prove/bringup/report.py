"""The report of a bring-up: one JSON file, and one HTML file that needs nothing else, to send back."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....lowering.artifact.artifact import Artifact
from .results import RUNGS, RungResult

HTML_NAME, JSON_NAME = "bringup.html", "bringup.json"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse; margin: .6em 0 1.4em } th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: left }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums } code, pre { font: 13px/1.4 ui-monospace, monospace }
pre { white-space: pre-wrap; background: #f5f5f5; padding: .6em } .passed { color: #06632a } .failed { color: #a3100a; font-weight: 600 }
"""


def as_dict(artifact: Artifact, device: str, results: Sequence[RungResult]) -> dict[str, Any]:
    """Everything that was found, as plain values.

    `rungs` has those that ran, each with `name`, `passed` and `seconds`; `not_run` the names of the others.
    """
    manifest, ran = artifact.manifest, {result.name for result in results}
    return {
        "artifact": artifact.digest,
        "model": manifest.model["name"],
        "target": manifest.target,
        "mesh": manifest.mesh,
        "quantization": manifest.quantization,
        "device": device,
        "passed": all(result.passed for result in results),
        "rungs": [{**result.as_dict(), "explained_by": result.explained_by(results)} for result in results],
        "not_run": [name for name in RUNGS if name not in ran],
    }


def write(directory: Path, findings: Mapping[str, Any]) -> tuple[Path, Path]:
    """Writes both files; returns their paths, HTML first."""
    directory.mkdir(parents=True, exist_ok=True)
    page, data = directory / HTML_NAME, directory / JSON_NAME
    data.write_text(json.dumps(findings, indent=1) + "\n")
    page.write_text(as_html(findings))
    return page, data


def as_html(findings: Mapping[str, Any]) -> str:
    """One page with its style inside."""
    title = f"Bring-up of {findings['model']} on {findings['device']}"
    facts = {key: findings[key] for key in ("artifact", "target", "mesh", "quantization", "device")}
    parts = [f"<h1>{_text(title)}</h1>", _table(("", ""), list(facts.items())), _summary(findings)]
    parts += [_rung(rung) for rung in findings["rungs"]]
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(title)}</title><style>{_STYLE}</style>{''.join(parts)}</html>\n"


def _summary(findings: Mapping[str, Any]) -> str:
    rows = [(rung["name"], "passed" if rung["passed"] else "failed", f"{rung['seconds']:.1f}") for rung in findings["rungs"]]
    rows += [(name, "not run", "") for name in findings["not_run"]]
    return _table(("rung", "", "seconds"), rows)


def _rung(rung: Mapping[str, Any]) -> str:
    outcome = "passed" if rung["passed"] else "failed"
    parts = [f"<h2>{_text(rung['name'])}: <span class={outcome}>{outcome}</span></h2>"]
    if rung["explained_by"]:
        parts.append(f"<p>May follow from what failed in: {_text(', '.join(rung['explained_by']))}</p>")
    if not rung["finished"]:
        parts.append("<p>Not all of it was run.</p>")
    for failure in rung["failures"]:
        assumption = f"{failure['heading']} ({failure['assumption']} in docs/on-hardware.md)"
        what = f"{failure['what']} ({failure['code']})" if failure["code"] else failure["what"]
        parts.append(f"<p>{_text(what)}. Wrong assumption: <b>{_text(assumption)}</b></p><pre>{_text(failure['message'])}</pre>")
    parts.append(_table(("", ""), [(key, json.dumps(value)) for key, value in rung["facts"].items()]))
    if rung["timings"]:
        rows = [
            (
                t["what"],
                t["shapes"],
                _microseconds(t["seconds"]),
                _microseconds(t["estimate_s"]),
                f"{t['seconds'] / t['estimate_s']:.1f}" if t["estimate_s"] else "",
            )
            for t in sorted(rung["timings"], key=lambda t: -t["seconds"])
        ]
        parts.append(_table(("", "shapes", "measured, us", "estimate, us", "ratio"), rows))
        parts.append(
            "<p>Measured from the launch until the device had finished, as the host sees it; estimates are those of inspect --cost.</p>"
        )
    if rung["left_out"]:
        listed = "\n".join(rung["left_out"])
        parts.append(f"<details><summary>left out: {len(rung['left_out'])}</summary><pre>{_text(listed)}</pre></details>")
    return "".join(parts)


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{_text(heading)}</th>" for heading in headings) if any(headings) else ""
    body = "".join("<tr>" + "".join(f"<td{_class(cell)}>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _class(cell: object) -> str:
    text = str(cell)
    return " class=number" if text and text.replace(".", "").replace(",", "").isdigit() else ""


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"


def _text(value: object) -> str:
    return html.escape(str(value))

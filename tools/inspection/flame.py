"""Pictures of where the time of a step goes: nested rectangles, and streams beside each other, in one HTML file without external
resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ...lowering.ascend.cost.estimate import Lasting, OperatorCost, StepCost
from ...lowering.ascend.cost.timing import CAUSES
from ...lowering.ascend.launches import kind_of

_HEIGHT = 28
"""Pixels of a row."""
_COLOURS = {  # of a cause, in light and dark
    "launch": ("#f2b8a0", "#8a4b33"),
    "memory": ("#a9c7ee", "#2f5688"),
    "matrix": ("#b5ddb0", "#35662f"),
    "vector": ("#e3d494", "#6d5f1c"),
    "collectives": ("#d3b6e6", "#5f3c7a"),
    "waiting": ("#cfcfcf", "#4d4d4d"),
}


@dataclass(frozen=True)
class Box:
    """A rectangle and those inside it, in order; what they leave of its width is empty.

    Attributes:
        note: what is shown beside its name when the pointer is over it.
        cause: decides its colour; "" for none.
    """

    name: str
    ms: float
    note: str = ""
    cause: str = ""
    inside: tuple[Box, ...] = ()

    @property
    def depth(self) -> int:
        return 1 + max((box.depth for box in self.inside), default=0)


def page(title: str, steps: Mapping[str, StepCost], timelines: Mapping[str, Sequence[Lasting]] | None = None) -> str:
    """The HTML of the steps of several buckets, one picture below the other.

    Args:
        timelines: of buckets; below a step whose launches are on several streams one body of each kind that has some is drawn.
    """
    body = "\n".join(_picture(boxes(bucket, cost)) + streams((timelines or {}).get(bucket, ())) for bucket, cost in steps.items())
    legend = " ".join(f'<span class="{cause}">{cause}</span>' for cause in CAUSES)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style()}</style>\n<h1>{escape(title)}</h1>\n"
        f"<p>Estimated, not measured. Width is time; a rectangle's parts lie below it. {legend}</p>\n{body}\n</html>\n"
    )


def boxes(bucket: str, cost: StepCost) -> Box:
    """Step, kinds of bodies, types of operators, causes."""
    kinds = [_kind(kind, cost.bodies[kind], operators) for kind, operators in cost.kinds.items()]
    if cost.parts_ms["waiting"] > 0:
        kinds.append(Box("waiting", cost.parts_ms["waiting"], "nothing runs", "waiting"))
    note = f"{cost.launches:,} launches, {cost.hbm_bytes / 1e9:.2f} GB of HBM, {cost.context} cached tokens, {cost.chip}"
    return Box(bucket, cost.step_ms, note, "", _sorted(kinds))


def streams(launches: Sequence[Lasting]) -> str:
    """Of each kind of body with launches on several streams the one in the middle of the step, a row a stream."""
    bodies: dict[str, list[Lasting]] = {}
    for launch in launches:
        bodies.setdefault(launch.body, []).append(launch)
    kinds: dict[str, list[list[Lasting]]] = {}
    for body, own in bodies.items():
        if len({launch.stream for launch in own}) > 1:
            kinds.setdefault(kind_of(body), []).append(own)
    return "".join(_lanes(kind, each[len(each) // 2]) for kind, each in kinds.items())


def _lanes(kind: str, launches: Sequence[Lasting]) -> str:
    begin, end = min(launch.start_ms for launch in launches), max(launch.end_ms for launch in launches)
    share = 100 / (end - begin)
    rows = {label: row for row, label in enumerate(sorted({launch.stream for launch in launches}))}
    drawn = "\n".join(
        _rectangle(
            launch.cause,
            f"left:{share * (launch.start_ms - begin):.4f}%;width:{share * (launch.end_ms - launch.start_ms):.4f}%",
            rows[launch.stream],
            f"{launch.type} on {launch.stream or 'main'}: {launch.start_ms - begin:.3f} to {launch.end_ms - begin:.3f} ms",
            launch.type,
        )
        for launch in launches
    )
    names = ", ".join(label or "main" for label in rows)
    return (
        f"\n<p>One {escape(kind)}, {end - begin:.3f} ms, on streams {escape(names)}:</p>\n"
        f'<div class="flame" style="height:{len(rows) * _HEIGHT}px">\n{drawn}\n</div>'
    )


def _rectangle(cause: str, place: str, row: int, title: str, text: str) -> str:
    kind = f' class="{cause}"' if cause else ""
    return f'<div{kind} style="{place};top:{row * _HEIGHT}px" title="{escape(title)}">{escape(text)}</div>'


def _kind(kind: str, bodies: int, operators: Sequence[OperatorCost]) -> Box:
    inside = _sorted([_operator(operator) for operator in operators])
    note = f"{bodies} bodies, {sum(operator.launches for operator in operators):,} launches"
    return Box(kind, sum(box.ms for box in inside), note, "", inside)


def _operator(operator: OperatorCost) -> Box:
    causes = [Box(cause, ms, f"of {operator.type}", cause) for cause, ms in operator.parts_ms.items() if ms > 0]
    note = f"{operator.launches:,} launches, {operator.hbm_bytes / 1e6:,.1f} MB of HBM, {operator.sent_bytes / 1e6:,.1f} MB received"
    most = max(causes, key=lambda box: box.ms, default=None)
    return Box(operator.type, operator.total_ms, note, most.cause if most else "", _sorted(causes))


def _sorted(inside: list[Box]) -> tuple[Box, ...]:
    return tuple(sorted(inside, key=lambda box: -box.ms))


def _picture(root: Box) -> str:
    rectangles = "\n".join(_rectangles(root, 0.0, 0, root.ms))
    return f'<div class="flame" style="height:{root.depth * _HEIGHT}px">\n{rectangles}\n</div>'


def _rectangles(box: Box, left_ms: float, row: int, step_ms: float) -> Iterator[str]:
    share = box.ms / step_ms if step_ms else 0.0
    text = f"{box.name}: {box.ms:.3f} ms, {share:.1%} of the step" + (f"\n{box.note}" if box.note else "")
    place = f"left:{100 * left_ms / step_ms if step_ms else 0:.4f}%;width:{100 * share:.4f}%"
    yield _rectangle(box.cause, place, row, text, f"{box.name} {box.ms:.2f}")
    for part in box.inside:
        yield from _rectangles(part, left_ms, row + 1, step_ms)
        left_ms += part.ms


def _style() -> str:
    light = "".join(f"--{cause}:{colours[0]};" for cause, colours in _COLOURS.items())
    dark = "".join(f"--{cause}:{colours[1]};" for cause, colours in _COLOURS.items())
    causes = "".join(f".flame .{cause},span.{cause}{{background:var(--{cause})}}\n" for cause in _COLOURS)
    return (
        f":root{{color-scheme:light dark;--page:#fff;--text:#1c1c1c;--box:#ececec;--edge:#fff;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{--page:#161616;--text:#eee;--box:#333;--edge:#161616;{dark}}}}}\n"
        "body{background:var(--page);color:var(--text);font:13px system-ui,sans-serif;margin:16px}\n"
        "h1{font-size:17px}\nspan{padding:2px 6px}\n.flame{position:relative;margin:16px 0}\n"
        f".flame div{{position:absolute;height:{_HEIGHT}px;line-height:{_HEIGHT}px;overflow:hidden;"
        "white-space:nowrap;text-indent:4px;background:var(--box);box-shadow:inset -1px -1px var(--edge)}\n"
        ".flame div:hover{filter:brightness(1.15)}\n"
        f"{causes}"
    )

"""The charts of docs/reference/speed.md, drawn with what docs/diagrams.py draws with: they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from docs.diagrams import DRAWN, Drawing

CHARTS: Final = DRAWN.with_name("charts")
WIDTH: Final = 720
BAR, GAP, GROUP = 22, 6, 30
LEFT, RIGHT = 110, 150


def ratios(bars: Mapping[str, Mapping[str, float]], goals: Mapping[str, float]) -> str:
    """Draw a group of bars for each outcome: the processor time of each application, as a multiple of by hand."""
    drawing = Drawing("ratios", "Processor time of each outcome, as a multiple of by hand")
    most = max([1.0, *goals.values(), *(ratio for group in bars.values() for ratio in group.values())])
    scale, y = (WIDTH - LEFT - RIGHT) / most, 40.0
    for outcome, group in bars.items():
        drawing.parts.append(drawing.lines(LEFT - 12, y + 16, [outcome], anchor="end"))
        for number, (name, ratio) in enumerate(group.items()):
            kind = "work" if number == 0 else "lease"
            bar = f'<rect class="{kind}" x="{LEFT}" y="{y:g}" width="{ratio * scale:.1f}" height="{BAR}"/>'
            # The goal is ours, so it crosses our bar alone. A label stands behind both.
            end = max(ratio, goals.get(outcome, 0.0)) if number == 0 else ratio
            drawing.parts.append(
                bar + drawing.lines(LEFT + end * scale + 14, y + 16, [f"{name} {ratio:.2f}"], anchor="start")
            )
            drawing.told.append(f"{outcome}: {name} {ratio:.2f}.")
            if number == 0 and outcome in goals:
                x = LEFT + goals[outcome] * scale
                drawing.parts.append(f'<g class="call"><path d="M{x:.1f} {y - 4:g}V{y + BAR + 4:g}"/></g>')
                drawing.told.append(f"Goal {goals[outcome]:.2f}.")
            y += BAR + GAP
        y += GROUP - GAP
    base = LEFT + scale
    drawing.under.append(f'<line class="lane" x1="{base:.1f}" x2="{base:.1f}" y1="30" y2="{y:g}"/>')
    drawing.parts.append(drawing.lines(round(base), 22, ["by hand = 1"]))
    drawing.parts.append(drawing.lines(LEFT, y + 14, ["A line across a bar is the goal."], anchor="start"))
    return drawing.svg(WIDTH, y + 28)


def growth(levels: Sequence[tuple[int, float, float]]) -> str:
    """Draw the median and the 99th percentile of a claim in µs, by the number of live keys."""
    drawing = Drawing("growth", "Time of a claim by the number of live keys")
    top, bottom, most = 40.0, 300.0, _round_up(max(p99 for _, _, p99 in levels))
    step = (WIDTH - LEFT - RIGHT) / max(1, len(levels) - 1)

    def height(value: float) -> float:
        return bottom - (bottom - top) * value / most

    for part in range(5):
        value = most * part / 4
        drawing.under.append(
            f'<line class="lane" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height(value):g}" y2="{height(value):g}"/>'
        )
        drawing.parts.append(drawing.lines(LEFT - 12, height(value) + 5, [f"{value:,.0f} µs"], anchor="end"))
    for number, (keys, p50, p99) in enumerate(levels):
        drawing.parts.append(drawing.lines(round(LEFT + number * step), bottom + 24, [short(keys)]))
        drawing.told.append(f"{keys:,} keys: median {p50:,.0f} µs, 99th percentile {p99:,.0f} µs.")
    for kind, name, values in (
        ("call", "median", [p50 for _, p50, _ in levels]),
        ("reply", "99th percentile", [p99 for _, _, p99 in levels]),
    ):
        points = [(LEFT + number * step, height(value)) for number, value in enumerate(values)]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        label = drawing.lines(WIDTH - RIGHT + 14, round(points[-1][1] + 5), [name], anchor="start")
        drawing.parts.append(f'<g class="{kind}"><path d="M{line}"/>{label}</g>')
    drawing.parts.append(drawing.lines(round((LEFT + WIDTH - RIGHT) / 2), bottom + 48, ["live keys of one tenant"]))
    return drawing.svg(WIDTH, bottom + 62)


def short(keys: int) -> str:
    """Return a number of keys as a label."""
    for unit, sign in ((1_000_000, " M"), (1_000, "k")):
        if keys >= unit:
            return f"{keys / unit:g}{sign}"
    return str(keys)


def _round_up(value: float) -> float:
    """Return the next number with one digit that divides by four, so that the axis has round labels."""
    unit: float = 10 ** math.floor(math.log10(value))
    return next(unit * factor for factor in (1, 2, 4, 6, 8, 10, 12) if unit * factor >= value)


def write(name: str, drawn: str) -> Path:
    """Write a chart to the folder of the docs."""
    CHARTS.mkdir(parents=True, exist_ok=True)
    path = CHARTS / f"{name}.svg"
    path.write_text(drawn, encoding="utf-8")
    return path

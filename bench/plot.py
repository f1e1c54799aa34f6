"""Draw a result file as small multiples: python -m bench.plot bench/results/hopper.json bench/results/hopper.svg

Time over heads, topk or tokens on logarithmic axes: ours, the best peer, and the floor, which is the time at the rates that the
card reached in the same run (bytes or arithmetic). Written by hand as SVG: readable in light and dark, nothing to install.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from bench.rows import Row
from bench.run import SUITES

COLUMNS = 4
WIDTH, HEIGHT = 326, 224  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 40, 40  # of its plot area, from the panel's edges
HEAD, MARGIN = 84, 16

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
.bg { fill: #ffffff; } .h { font-size: 18px; font-weight: 600; } .t { font-weight: 600; } .dim { fill: #59636e; }
.tick { font-size: 10px; fill: #59636e; } .grid { stroke: #d1d9e0; stroke-width: 1; } .frame { stroke: #818b98; fill: none; }
.ours { stroke: #0969da; } .peer { stroke: #bc4c00; } .floor { stroke: #59636e; }
.line { fill: none; stroke-width: 2; } .floor.line { stroke-dasharray: 5 4; stroke-width: 1.5; } .mark { stroke-width: 1.6; }
.ours.mark { fill: #0969da; } .peer.mark { fill: #bc4c00; } .mark.hollow { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .bg { fill: #0d1117; } .dim, .tick { fill: #9198a1; } .grid { stroke: #2a313c; } .frame { stroke: #656c76; }
.ours { stroke: #58a6ff; } .peer { stroke: #f0883e; } .floor { stroke: #9198a1; }
.ours.mark { fill: #58a6ff; } .peer.mark { fill: #f0883e; } .mark.hollow { fill: #0d1117; }
}
"""


@dataclass(frozen=True)
class Point:
    """A result row at a place of a panel. µs of the peer, of a peer timed in another run, and of the floor, where known."""

    row: str
    x: int
    s_q: int
    ours: float
    peer: float | None
    reference: float | None
    floor: float | None
    met: bool | None
    words: str

    def times(self) -> list[float]:
        return [us for us in (self.ours, self.peer, self.reference, self.floor) if us]


@dataclass
class Panel:
    title: str
    axis: str
    points: list[Point] = field(default_factory=list)


def places_of(row: Row) -> list[tuple[str, str, int]]:
    """(title of the panel, its axis, x) of every place where a row is drawn."""
    spec = row.spec
    wide = f"{spec.topk}+{spec.extra_topk}" if spec.dual else str(spec.topk)
    if row.section == "A":
        pool = f", s_kv {row.pool_rows}" if row.pool_rows else ""
        return [(f"A  bf16 prefill d576, topk {wide}{pool}", "heads", spec.heads)]
    if row.section == "B":
        features = ", sink + lengths" if row.lengths else ""
        return [(f"B  bf16 prefill d512, {spec.heads} heads{features}", "topk", spec.topk)]
    kind = {"C": "fp8 decode V3.2", "D": "fp8 decode V4", "E": "bf16 decode d576"}[row.section]
    place = [(f"{row.section}  {kind}, {spec.heads} heads, topk {wide}", "tokens", row.tokens)]
    if row.section != "D":
        return place
    usual = (spec.heads, spec.extra_topk) in ((64, 512), (128, 1024))
    if row.tokens == 128 and row.s_q == 1:
        over_topk = (f"D  {kind}, {spec.heads} heads, 128 tokens", "topk", spec.keys_per_token)
        return [*place, over_topk] if usual else [over_topk]
    return place


def panels_of(found: dict[str, Any]) -> tuple[list[Panel], list[tuple[str, str]]]:
    """Panels in the order of the suite, and (row, why) of those without a time."""
    known = {row.name: row for suite in SUITES.values() for row in suite}
    panels: dict[str, Panel] = {}
    missing = []
    for result in found["rows"]:
        name = result["row"]
        why = result.get("failed") or result.get("not_run")
        if why or name not in known:
            missing.append((name, why or "not a row of a suite"))
            continue
        row = known[name]
        for title, axis, x in places_of(row):
            panels.setdefault(title, Panel(title, axis)).points.append(_point(result, row, x))
    return list(panels.values()), missing


def _point(result: dict[str, Any], row: Row, x: int) -> Point:
    reference = result.get("reference_us") if "another run" in (result.get("judged_against") or "") else None
    floor = result.get("ceiling_us") or result.get("floor_us")
    words = [f"{row.name}: {result['ours_us']:g} µs"]
    if result.get("best_peer"):
        words.append(f"{result['best_peer']} {result['best_peer_us']:g} µs")
    if reference:
        words.append(f"{result['reference_peer']} {reference:g} µs in another run")
    if result.get("ratio") is not None:
        words.append(f"ratio {result['ratio']:g}")
    if floor:
        words.append(f"floor {floor:g} µs")
    if "goal" in result:
        met = {True: "met", False: "missed", None: "not judged"}[result["goal_met"]]
        words.append(f"goal {result['goal']} {met}")
    return Point(
        row.name, x, row.s_q, result["ours_us"], result.get("best_peer_us"), reference, floor, result.get("goal_met"),
        ", ".join(words),
    )  # fmt: skip


class Scale:
    """A logarithmic axis: value -> pixel."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._span = math.log(low), math.log(high / low) or 1.0
        self._first, self._pixels = first, last - first

    def __call__(self, value: float) -> float:
        return round(self._first + (math.log(value) - self._low) / self._span * self._pixels, 1)


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten inside the range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    values = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    return [value for value in values if low <= value <= high]


def draw_panel(panel: Panel, x0: float, y0: float) -> list[str]:
    left, right, top, bottom = x0 + LEFT, x0 + WIDTH - RIGHT, y0 + TOP, y0 + HEIGHT - BOTTOM
    xs = sorted({point.x for point in panel.points})
    times = [us for point in panel.points for us in point.times()]
    low, high = min(times) / 1.25, max(times) * 1.25
    pad = 1.25 if xs[0] != xs[-1] else 2.0
    across, up = Scale(xs[0] / pad, xs[-1] * pad, left, right), Scale(low, high, bottom, top)
    judged = [point for point in panel.points if point.met is not None]
    met = f"{sum(point.met is True for point in judged)} of {len(judged)} goals met" if judged else "no goal judged"
    parts = [
        f'<text class="t" x="{x0 + 8}" y="{y0 + 18}">{escape(panel.title)}</text>',
        f'<text class="tick" x="{x0 + 8}" y="{y0 + 32}">{met}</text>',
    ]
    for value in ticks(low, high):
        y = up(value)
        parts.append(f'<path class="grid" d="M{left} {y}H{right}"/>')
        parts.append(f'<text class="tick" x="{left - 5}" y="{y + 3.5}" text-anchor="end">{value:g}</text>')
    for value in xs:
        x = across(value)
        parts.append(f'<path class="grid" d="M{x} {bottom}v4"/>')
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 15}" text-anchor="middle">{value}</text>')
    parts.append(f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>')
    parts.append(
        f'<text class="tick" x="{(left + right) / 2}" y="{bottom + 29}" text-anchor="middle">µs over {panel.axis}</text>'
    )
    plain = sorted((point for point in panel.points if point.s_q == 1), key=lambda point: point.x)
    for name in ("floor", "peer", "ours"):
        line = [(across(p.x), up(us)) for p in plain if (us := getattr(p, name))]
        if len(line) > 1:
            parts.append(f'<polyline class="{name} line" points="{" ".join(f"{x},{y}" for x, y in line)}"/>')
    for point in panel.points:
        parts += draw_point(point, across(point.x) + (6 if point.s_q > 1 else 0), up)
    return parts


def draw_point(point: Point, x: float, up: Scale) -> list[str]:
    """Marks of one row. Ours: a circle, for several positions per request a triangle; hollow where the goal is missed."""
    parts = [f"<g data-row={quoteattr(point.row)}><title>{escape(point.words)}</title>"]
    if point.floor:
        parts.append(f'<path class="floor mark" d="M{x - 4} {up(point.floor)}h8"/>')
    if point.peer:
        parts.append(_square(x, up(point.peer)))
    if point.reference:
        parts.append(_diamond(x, up(point.reference)))
    shape = _circle if point.s_q == 1 else _triangle
    parts.append(shape(x, up(point.ours), point.met is not False))
    return [*parts, "</g>"]


def _full(full: bool) -> str:
    return "" if full else " hollow"


def _circle(x: float, y: float, full: bool = True) -> str:
    return f'<circle class="ours mark{_full(full)}" cx="{x}" cy="{y}" r="4"/>'


def _triangle(x: float, y: float, full: bool = True) -> str:
    return f'<path class="ours mark{_full(full)}" d="M{x - 4.5} {y + 3.5}h9l-4.5 -8z"/>'


def _square(x: float, y: float) -> str:
    return f'<rect class="peer mark" x="{x - 3}" y="{round(y - 3, 1)}" width="6" height="6"/>'


def _diamond(x: float, y: float) -> str:
    return f'<path class="peer mark hollow" d="M{x} {round(y - 5, 1)}l5 5l-5 5l-5 -5z"/>'


def legend(x: float, y: float) -> list[str]:
    """The marks and what they say, in one line."""
    items = (
        (_circle(0, 0), "ours, goal met"),
        (_circle(0, 0, False), "ours, goal missed"),
        (_triangle(0, 0), "ours, two positions per request"),
        (_square(0, 0), "best peer, side by side"),
        (_diamond(0, 0), "faster peer, another run"),
        ('<path class="floor line" d="M-11 0h22"/>', "floor: rates of the card in this run"),
    )
    parts = []
    for mark, words in items:
        parts.append(
            f'<g transform="translate({x + 10} {y})">{mark}<text class="dim" x="15" y="4">{escape(words)}</text></g>'
        )
        x += 40 + 6.3 * len(words)
    return parts


def describe(found: dict[str, Any]) -> str:
    """The environment and the ceilings in one line."""
    environment, ceilings = found.get("environment", {}), found.get("ceilings", {})
    words = [str(environment.get("gpu", "unknown GPU"))]
    words += [f"{name} {environment[name]}" for name in ("driver", "torch", "triton") if name in environment]
    rate = ceilings.get("matmul_sustained_tflops") or ceilings.get("matmul_tflops")
    if rate:
        words.append(f"bf16 product {rate:g} TFLOP/s")
    for gather in ceilings.get("gather", []):
        place = "L2" if gather["in_l2"] else "memory"
        words.append(f"{gather['row_bytes']} B rows from {place} {gather['gbps'] / 1e3:.2f} TB/s")
    return ", ".join(words)


def wrapped(words: Iterable[str], width: int) -> list[str]:
    """Words joined by commas, in lines of at most `width` characters where a word allows it."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 2 <= width:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines


def draw(found: dict[str, Any]) -> str:
    """The SVG of a result file."""
    panels, missing = panels_of(found)
    rows = -(-len(panels) // COLUMNS)
    width = 2 * MARGIN + COLUMNS * WIDTH
    notes = [("dim", text) for text in wrapped(describe(found).split(", "), 200)]
    notes += [("missing", f"{name}: {why}") for name, why in missing]
    height = HEAD + rows * HEIGHT + MARGIN + 18 * len(notes) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        "<title>Sparse-MLA attention: ours, the best peer and the floor</title>",
        f"<style>{escape(STYLE)}</style>",
        f'<rect class="bg" width="{width}" height="{height}"/>',
        f'<text class="h" x="{MARGIN + 8}" y="36">Time of a call: ours, the best peer and the floor</text>',
        *legend(MARGIN + 8, 62),
    ]
    for number, panel in enumerate(panels):
        parts += draw_panel(panel, MARGIN + number % COLUMNS * WIDTH, HEAD + number // COLUMNS * HEIGHT)
    y = HEAD + rows * HEIGHT + MARGIN
    for number, (kind, text) in enumerate(notes):
        tag = f" data-row={quoteattr(missing[number - len(notes) + len(missing)][0])}" if kind == "missing" else ""
        parts.append(f'<text class="dim"{tag} x="{MARGIN + 8}" y="{y + 18 * number}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON of bench.run")
    parser.add_argument("svg", type=Path)
    args = parser.parse_args(argv)
    args.svg.write_text(draw(json.loads(args.results.read_text())))


if __name__ == "__main__":
    main()

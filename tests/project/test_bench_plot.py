"""The picture of a benchmark: well-formed, every row in it, marks where the numbers are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.hopper import HOPPER, SGL
from bench.judge import judge
from bench.plot import Scale, draw, main, panels_of, ticks

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).resolve().parents[2]


def results(skip: tuple[int, ...] = ()) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(HOPPER):
        if number in skip:
            rows.append({"row": row.name, "not_run": "the budget of 1 s was spent & <more>"})
            continue
        us = row.reference.us if row.reference else 2000.0
        ours = us * (0.5 if number % 2 else 1.5)
        rows.append(
            {"row": row.name, "ours_us": ours, "ceiling_us": us / 3} | judge(row, ours, {SGL: us * 1.2}, us / 3)
        )
    gather = {"row_bytes": 656, "in_l2": False, "gbps": 4000}
    ceilings = {"matmul_sustained_tflops": 700.0, "gather": [gather]}
    return {"environment": {"gpu": "NVIDIA H200", "torch": "2.11.0"}, "ceilings": ceilings, "rows": rows}


def test_every_row_is_drawn() -> None:
    root = ElementTree.fromstring(draw(results(skip=(3, 30))))
    assert root.tag == f"{SVG}svg" and root.get("viewBox")
    named = {element.get("data-row") for element in root.iter() if element.get("data-row")}
    assert named == {row.name for row in HOPPER}
    text = " ".join("".join(element.itertext()) for element in root.iter(f"{SVG}text"))
    assert f"{HOPPER[3].name}: the budget of 1 s was spent & <more>" in text
    assert "700 TFLOP/s" in text and "656 B rows from memory 4.00 TB/s" in text


def test_panels() -> None:
    panels, missing = panels_of(results())
    assert not missing and len(panels) == 16
    assert {panel.axis for panel in panels} == {"heads", "topk", "tokens"}
    points = [point for panel in panels for point in panel.points]
    assert {point.row for point in points} == {row.name for row in HOPPER}
    assert len(points) == len(HOPPER) + 2  # two rows of D stand on both axes
    by_title = {panel.title: panel for panel in panels}
    assert [p.x for p in by_title["B  bf16 prefill d512, 64 heads, sink + lengths"].points] == [512, 1024, 2048]
    assert sorted(p.x for p in by_title["D  fp8 decode V4, 64 heads, 128 tokens"].points) == [640, 1152]


def test_marks_and_series() -> None:
    root = ElementTree.fromstring(draw(results()))
    groups = [element for element in root.iter(f"{SVG}g") if element.get("data-row")]
    for group in groups:
        classes = [element.get("class", "") for element in group]
        for kind in ("ours", "peer", "floor"):
            assert any(kind in each.split() for each in classes), (group.get("data-row"), kind)
        title = group.find(f"{SVG}title")
        assert title is not None and title.text and title.text.startswith(str(group.get("data-row")))
    missed = [group for group in groups if "missed" in str(group.find(f"{SVG}title").text)]  # type: ignore[union-attr]
    assert missed and all("hollow" in str(group[-1].get("class")) for group in missed)
    lines = [str(element.get("class")) for element in root.iter(f"{SVG}polyline")]
    assert {line.split()[0] for line in lines} == {"ours", "peer", "floor"} and len(lines) == 3 * 16


def test_light_and_dark() -> None:
    text = draw(results())
    assert "prefers-color-scheme: dark" in text
    light, dark = text.split("@media")[0], text.split("@media")[1].split("</style>")[0]
    for name in (".ours", ".peer", ".floor", ".bg", ".grid", "text", ".mark.hollow"):
        assert name in light and name in dark


def test_a_point_is_where_its_number_is() -> None:
    scale = Scale(1.0, 100.0, 200.0, 100.0)
    assert [scale(value) for value in (1.0, 10.0, 100.0)] == [200.0, 150.0, 100.0]
    assert Scale(5.0, 5.0, 0.0, 10.0)(5.0) == 0.0
    assert ticks(0.9, 60.0) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]


@pytest.mark.parametrize("name", ["portable.json", "hopper.json"])
def test_stored_results_can_be_drawn(name: str, tmp_path: Path) -> None:
    stored = ROOT / "bench" / "results" / name
    out = tmp_path / "drawn.svg"
    main([str(stored), str(out)])
    root = ElementTree.fromstring(out.read_text())
    named = {element.get("data-row") for element in root.iter() if element.get("data-row")}
    assert named == {row["row"] for row in json.loads(stored.read_text())["rows"]}

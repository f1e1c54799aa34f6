"""docs/contracts.md is held to the layers that lint-imports checks and to the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def layers() -> dict[str, int]:
    """Module -> number of its layer, from the top."""
    text = (ROOT / "pyproject.toml").read_text().split("\nlayers = [\n")[1].split("\n]")[0]
    lines = re.findall(r'"([^"]+)"', text)
    return {name.strip(): depth for depth, line in enumerate(lines) for name in line.split("|")}


def rows() -> list[tuple[list[str], list[str]]]:
    """(modules, public names) of every row."""
    lines = [line for line in (ROOT / "docs/contracts.md").read_text().splitlines() if line.startswith("| `")]
    cells = [line.strip("|").split(" | ") for line in lines]
    return [(re.findall(r"`(\w+)`", row[0]), re.findall(r"`(\w+)`", row[-1])) for row in cells]


def test_rows_stand_in_the_order_that_is_checked() -> None:
    depth = layers()
    listed = [name for modules, _ in rows() for name in modules]
    assert len(listed) == len(set(listed)) and set(listed) == set(depth) - {"__main__"}
    assert [depth[name] for name in listed] == sorted(depth[name] for name in listed)


def test_public_names_exist() -> None:
    for modules, names in rows():
        loaded = [importlib.import_module(f"kgen.{name}") for name in modules]
        for name in names:
            assert any(hasattr(module, name) for module in loaded), (modules, name)

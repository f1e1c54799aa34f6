"""What the README states about the code is read from the code."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.archs import all_archs
from kgen.cli.common import FOUND, INTERRUPTED, MACHINE, OK, USAGE, app
from kgen.environment import _CHANGES_CODE, _FORBIDDEN
from kgen.runtime.layouts import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """The text under `## title`, up to the next heading."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")][1:]


def variables_read(source: str) -> set[str]:
    """Names of environment variables that a module asks for: `environ.get("X")`, `environ["X"]`, `getenv("X")`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        name: ast.expr | None = None
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called.endswith(("environ.get", "getenv")) or called in ("_root", "_is_set"):
                name = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            name = node.slice
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            found.add(name.value)
    return found


def test_variables_are_found_however_they_are_read() -> None:
    text = 'os.environ.get("A", "1"), os.environ["B"], os.getenv("C"), environ.get("D"), _root("E", "x"), d.get("F")'
    assert variables_read(text) == set("ABCDE")


def test_the_table_of_environment_variables_is_what_the_code_reads() -> None:
    sources = [path.read_text() for path in sorted((ROOT / "kgen").rglob("*.py"))]
    read = set().union(*(variables_read(source) for source in sources)) | set(_FORBIDDEN) | set(_CHANGES_CODE)
    listed = [name for row in rows(section("Environment variables")) for name in re.findall(r"`([A-Z0-9_]+)`", row[0])]
    assert len(listed) == len(set(listed))
    assert set(listed) == read - {"PATH"}  # handed on to the demo's child, with no meaning of ours
    # nothing of kgen's own that the scan above would miss
    mentioned = {name for source in sources for name in re.findall(r'"(KGEN_[A-Z_]+)"', source)}
    assert mentioned <= read


def test_exit_codes() -> None:
    text = " ".join(README.split())
    sentence = text.split("Exit codes: ")[1].split(" interrupted")[0]
    assert [int(code) for code in re.findall(r"(?:^|; )(\d+) ", sentence + " ")] == [
        OK,
        FOUND,
        USAGE,
        MACHINE,
        INTERRUPTED,
    ]


def test_every_command_named_exists() -> None:
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    blocks = "".join(README.split("```")[1::2])
    named = set(re.findall(r"^kgen +([a-z]+)", blocks, re.MULTILINE)) | set(re.findall(r"`kgen ([a-z]+)", README))
    assert {"tune", "emit", "explain", "inspect", "doctor"} <= named <= known


def test_the_example_runs_as_printed() -> None:
    """On the CPU, with the one word that it says to change."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert example.count('device = "cuda"') == 1
    checks = "assert out.shape == (2, 16, 512) and lse.shape == (2, 16) and out.isfinite().all()"
    code = example.replace('device = "cuda"', 'device = "cpu"') + checks
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "entry " in done.stdout, done.stderr


def test_support_matrix_is_what_the_tables_hold() -> None:
    """A layout is "measured" on sm90 and "static" elsewhere; the tables of the emitted package say the same."""
    table = rows(section("What is there").split("\n\n")[0])
    words = {word: row for row in table for word in re.findall(r"`(v\w+)`", row[0]) or ["bf16"]}
    assert set(words) == {layout.kv_layout for layout in LAYOUTS.values()}
    for arch in all_archs():
        entries = importlib.import_module(f"generated.{arch}.table").ENTRIES
        for layout in LAYOUTS.values():
            sources = {entry.provenance.source for entry in entries if entry.layout == layout.name}
            assert sources, f"{arch} serves no {layout.name}"
            says = words[layout.kv_layout][2 if arch == "sm90" else 3]
            assert says == ("measured" if "measured" in sources else "static"), (arch, layout.name)


def test_widths_of_the_support_matrix() -> None:
    for row in rows(section("What is there").split("\n\n")[0]):
        words = re.findall(r"`(v\w+)`", row[0]) or ["bf16"]
        widths = {layout.d_qk for layout in LAYOUTS.values() if layout.kv_layout in words}
        assert widths == {int(width) for width in row[1].split(", ")}
        for size in re.findall(r"(\d+) B", row[0]):
            assert {layout.token_bytes for layout in LAYOUTS.values() if layout.kv_layout in words} == {int(size)}


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md", "docs/verification.md", "docs/design.md"])
def test_result_files_named_exist(page: str) -> None:
    for name in re.findall(r"`((?:bench|kgen|configs|tests)/[\w/.-]+\.\w+)`", (ROOT / page).read_text()):
        assert (ROOT / name).is_file(), name

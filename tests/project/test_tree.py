"""The shape of the tree: no machine in the text, files that can be read in one sitting, a CI script that runs."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
MACHINE = re.compile(
    r"(?<![\w.~/<])/(?:work|root|home|Users|opt|tmp|mnt)/\w"  # a place on somebody's machine
    r"|\b(?:files\.)?pythonhosted\.org|\bpypi\.org|\bindex-url +\S|\b\d{1,3}(?:\.\d{1,3}){3}\b"  # a registry, an address
)


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_pattern_sees_what_it_is_for() -> None:
    for text in ("see /home/ann/x", "in /work/ann", "(/root/y)", "192.0.2.1", "https://pypi.org/simple"):
        assert MACHINE.search(text), text
    for text in (
        "https://a.example/home/x",
        "~/.cache/kgen",
        "driver 580.159.04",
        "/path/to/python",
        "kgen/work/x",
        "a/b",
    ):
        assert not MACHINE.search(text), text


def test_no_machine_paths_or_registries_in_tracked_text() -> None:
    """tests/ is left out: it holds invented paths on purpose, to see that records drop them."""
    found = []
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("tests/"):
            continue
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert found == []


def test_modules_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "kgen").rglob("*.py")}
    assert len(lengths) > 50
    assert {path.relative_to(ROOT).as_posix(): n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_ci_runs_lint_emit_check_and_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    steps = re.search(r"for step in ([a-z -]+);", text)
    assert steps is not None and steps[1].split() == ["lint", "emit-check", "test"]  # pytest's line comes last


def test_make_names_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "lint", "emit-check", "clean"):
        assert re.search(rf"^{target}:", text, re.MULTILINE), target
    assert re.search(r"^TORCH \?= torch==[\d.]+$", text, re.MULTILINE), "unpinned, torch brings CUDA's libraries"

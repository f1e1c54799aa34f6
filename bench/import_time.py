"""Time `import generated.dispatch` over torch and triton: python -m bench.import_time --out bench/results/import_time.json

Every sample is a fresh process that imports a byte-compiled copy of `generated/`, as after an installation. Processes with
and without the import take turns, so that a busy machine moves both. `import_ms` is read inside the process around the
import and `cpu_ms` is its processor time, which other processes hardly lengthen; `wall_ms` is the difference of whole
processes, which is mostly the noise of torch's own import on a busy machine. `without_triton_ms`:
with torch loaded, but not triton.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOAL_MS = 50.0  # over torch + triton

TIMED = """
import sys, time
sys.path.insert(0, {root!r})
{before}
start, cpu = time.perf_counter(), time.process_time()
{timed}
print((time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3)
"""
RUNS = {
    "base": ("import torch, triton", "pass"),
    "over_torch_and_triton": ("import torch, triton", "import generated.dispatch"),
    "over_torch": ("import torch", "import generated.dispatch"),
}


def sample(folder: str, before: str, timed: str) -> tuple[float, float, float]:
    """ms of the import (elapsed, processor) inside the process, and ms of the whole process."""
    code = TIMED.format(root=folder, before=before, timed=timed)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    wall = (time.perf_counter() - start) * 1e3
    elapsed, cpu = map(float, done.stdout.split())
    return elapsed, cpu, wall


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    middle = statistics.median(ordered)
    return {"median": round(middle, 2), "min": round(ordered[0], 2), "max": round(ordered[-1], 2)}


def measure(rounds: int) -> dict[str, Any]:
    """Samples of every run in turns, after one round that nobody counts."""
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory(prefix="kgen-import-") as folder:
        copy = shutil.copytree(ROOT / "generated", Path(folder) / "generated", ignore=shutil.ignore_patterns("*.pyc"))
        compileall.compile_dir(copy, quiet=2)
        for number in range(rounds + 1):
            for name, (before, timed) in RUNS.items():
                taken = sample(folder, before, timed)
                if number:
                    samples[name].append(taken)
    ours, base = samples["over_torch_and_triton"], samples["base"]
    import_ms = spread([elapsed for elapsed, _, _ in ours])
    return {
        "import_ms": import_ms,
        "cpu_ms": spread([cpu for _, cpu, _ in ours]),
        "wall_ms": spread([a[2] - b[2] for a, b in zip(ours, base, strict=True)]),
        "without_triton_ms": spread([elapsed for elapsed, _, _ in samples["over_torch"]]),
        "torch_and_triton_process_ms": spread([wall for _, _, wall in base]),
        "goal_ms": GOAL_MS,
        "goal_met": import_ms["median"] <= GOAL_MS,
        "rounds": rounds,
        "load_per_core": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": version("triton"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="samples of each run (default 9)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    text = json.dumps(measure(max(1, options.rounds)), indent=1, sort_keys=True)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

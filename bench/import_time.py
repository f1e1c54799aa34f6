"""Time `import generated.dispatch` over torch and triton: python -m bench.import_time --out bench/results/import_time.json

Every sample is a fresh process. Processes with and without the import take turns, so that a busy machine moves both:
`import_ms` is read inside the process around the import, `wall_ms` is the difference of whole processes. Byte code is
compiled beforehand, as after an installation. `dispatch_alone_ms`: with torch loaded, but not triton.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
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
start = time.perf_counter()
{timed}
print((time.perf_counter() - start) * 1e3)
"""
RUNS = {
    "base": ("import torch, triton", "pass"),
    "over_torch_and_triton": ("import torch, triton", "import generated.dispatch"),
    "over_torch": ("import torch", "import generated.dispatch"),
}


def sample(before: str, timed: str) -> tuple[float, float]:
    """(ms of the import inside the process, ms of the whole process)."""
    code = TIMED.format(root=str(ROOT), before=before, timed=timed)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout), (time.perf_counter() - start) * 1e3


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    middle = statistics.median(ordered)
    return {"median": round(middle, 2), "min": round(ordered[0], 2), "max": round(ordered[-1], 2)}


def measure(rounds: int) -> dict[str, Any]:
    """Samples of every run in turns, after one round that nobody counts."""
    inside: dict[str, list[float]] = {name: [] for name in RUNS}
    whole: dict[str, list[float]] = {name: [] for name in RUNS}
    for number in range(rounds + 1):
        for name, (before, timed) in RUNS.items():
            ms, wall = sample(before, timed)
            if number:
                inside[name].append(ms)
                whole[name].append(wall)
    walls = [a - b for a, b in zip(whole["over_torch_and_triton"], whole["base"], strict=True)]
    import_ms = spread(inside["over_torch_and_triton"])
    return {
        "import_ms": import_ms,
        "wall_ms": spread(walls),
        "dispatch_alone_ms": spread(inside["over_torch"]),
        "torch_and_triton_process_ms": spread(whole["base"]),
        "goal_ms": GOAL_MS,
        "goal_met": import_ms["median"] <= GOAL_MS,
        "rounds": rounds,
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

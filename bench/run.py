"""Time `generated.dispatch` and the peers side by side: python -m bench.run --suite hopper --out bench/results/hopper.json

Every output is checked against the float64 reference on sampled rows before it is timed. Decode: CUDA-graph replays that
rotate over input sets of more than twice the L2; prefill: event-timed calls, the L2 overwritten before each. Ours and the
peer's are sampled in turns, so that clocks and heat move both: `ours_us` and the ratio. `ours_solo_us` is ours alone, back to
back, as in tuning; `ours_burst_us` the first samples after a pause. A goal without a peer is judged on the solo time, a goal
against the best peer as bench/judge.py says. TFLOP/s and GB/s count true heads and true lengths. `floor_us` is at data-sheet
rates, `ceiling_us` at the rates measured in this run (`ceilings`).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.hopper import HOPPER
from bench.rows import PORTABLE, Row

SUITES = {"portable": PORTABLE, "hopper": HOPPER}
HUNG = 4
"""Exit code after a row that hung."""
NO_GPU = "bench.run times on a GPU and none is visible here."
STATED = (2.0**-9, 2.0**-5)
"""Group scales of N(0, 1) rows lie in here; only --dry-run assumes it, a run reads the caches."""


def select(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Rows whose name matches a pattern (with wildcards) or holds it; all of them without a pattern."""
    return [row for row in rows if not patterns or any(fnmatch.fnmatch(row.name, f"*{p}*") for p in patterns)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--suite", choices=sorted(SUITES), default="portable")
    made.add_argument("--out", type=Path, help="JSON file to write, after every row")
    made.add_argument("--flash-mla", metavar="DIR", help="folder that holds the unpacked package flash_mla")
    made.add_argument("--rows", action="append", default=[], metavar="PATTERN", help="only rows whose name matches")
    made.add_argument("--budget", type=float, metavar="S", help="seconds after which no row is started")
    made.add_argument(
        "--row-limit", type=float, default=90.0, metavar="S", help="seconds of a row that hangs (default 90)"
    )
    made.add_argument("--rounds", type=int, default=11, help="samples of each in turns (default 11)")
    made.add_argument("--seconds", type=float, default=0.15, help="of sampling ours alone per row (default 0.15)")
    made.add_argument("--jobs", type=int, default=0, metavar="N", help="compile with N processes before timing")
    made.add_argument("--dry-run", action="store_true", help="print the rows and what serves them; needs no GPU")
    made.add_argument("--compile-only", metavar="i/N", help=argparse.SUPPRESS)
    return made


def dry_run(rows: Sequence[Row]) -> None:
    """Rows, goals and entries, without a tensor."""
    from bench.ours import served_by, shape_of_row
    from bench.row_run import sets_of
    from kgen.archs import load_arch

    device_class = load_arch("sm90").device("h200")
    assert device_class is not None
    for row in rows:
        goal = f"{row.goal[1]:g} {row.goal[0]}" if row.goal else "-"
        reference = f"{row.reference.us:g} µs {row.reference.peer}" if row.reference else "-"
        by = served_by(shape_of_row(row, STATED), arch="sm90", device_class="h200")
        print(
            f"{row.name:42s} sets {sets_of(row, device_class.l2_bytes):3d}  goal {goal:12s} reference {reference:44s} "
            f"{by['module']} ({by['source']}) {by['config']}"
        )
    print(f"{len(rows)} rows")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    os.environ.setdefault("KGEN_CONFIGS", "configs")
    rows = select(SUITES[args.suite], args.rows)
    if args.dry_run:
        dry_run(rows)
        return 0
    import torch

    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 3
    from bench import precompile

    if args.compile_only:
        part, parts = map(int, args.compile_only.split("/"))
        precompile.compile_part(rows, part, parts)
        return 0
    began = time.perf_counter()
    if args.jobs:
        for sentence in precompile.in_processes(args.jobs, args.suite, args.rows):
            print(sentence)
        print(f"compiled ahead by {args.jobs} processes: {time.perf_counter() - began:.0f} s", flush=True)
    return timed(rows, args, began)


def timed(rows: Sequence[Row], args: argparse.Namespace, began: float) -> int:
    """Run the rows on the GPU; the result file holds what is done so far."""
    import torch

    from bench.ceilings import measure_ceilings
    from bench.ours import module_hash, verification
    from bench.peers import available
    from bench.row_run import RowRun
    from kgen.environment import current_environment
    from kgen.verify_child import subject_of

    peers, absent = available(args.flash_mla)
    for sentence in absent:
        print(sentence)
    environment: dict[str, Any] = asdict(current_environment("sm90", "h200"))
    environment |= verification(subject_of("generated", environment)) | {
        "modules": {"combine": module_hash("sm90", "combine")}
    }
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    ceilings = measure_ceilings(rows, l2_bytes)
    print(json.dumps(ceilings), flush=True)
    found: dict[str, Any] = {
        "environment": environment, "method": __doc__, "suite": args.suite, "absent": absent, "ceilings": ceilings,
        "elapsed_s": 0.0, "rows": [],
    }  # fmt: skip
    runner = RowRun(peers, ceilings, l2_bytes, args.rounds, args.seconds)
    for number, row in enumerate(rows):
        elapsed = time.perf_counter() - began
        if args.budget is not None and elapsed > args.budget:
            result = {"row": row.name, "not_run": f"the budget of {args.budget:g} s was spent"}
        else:
            guard = threading.Timer(args.row_limit, give_up, (found, rows[number:], args.row_limit, args.out))
            guard.daemon = True
            guard.start()
            try:
                result = runner.run(row)
                environment["modules"][result["module"]] = module_hash("sm90", result["module"])
            except Exception as error:  # one row's failure is that row's result
                result = {"row": row.name, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            guard.cancel()
            torch.cuda.empty_cache()
        found["rows"].append(result)
        found["elapsed_s"] = round(time.perf_counter() - began, 1)
        print(f"{found['elapsed_s']:6.1f} s  {line(result)}", flush=True)
        if args.out:
            write(args.out, found)
    print(summary(found))
    return 0


def give_up(found: dict[str, Any], left: Sequence[Row], limit_s: float, out: Path | None) -> None:
    """A kernel that hangs cannot be stopped from inside its process: record what there is and end it."""
    hung, *others = left
    found["rows"] = [
        *found["rows"],
        {"row": hung.name, "failed": f"no result within {limit_s:g} s"},
        *({"row": row.name, "not_run": f"{hung.name} had hung"} for row in others),
    ]
    print(line(found["rows"][-len(left)]), flush=True)
    if out:
        write(out, found)
    os._exit(HUNG)


def write(path: Path, found: dict[str, Any]) -> None:
    """Whole or not at all: a run may be ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


def line(result: dict[str, Any]) -> str:
    """One readable line of a result row."""
    if "failed" in result:
        return f"{result['row']:42s} FAILED {result['failed']}"
    if "not_run" in result:
        return f"{result['row']:42s} not run: {result['not_run']}"
    peer = f"peer {result['best_peer_us']:8.1f}" if result["best_peer"] else "no peer"
    ratio = "" if result["ratio"] is None else f" ratio {result['ratio']:.2f}"
    goal = ""
    if "goal" in result:
        met = {True: f"met by {result.get('met_by') or 'time'}", False: "MISSED", None: "not judged"}
        goal = f"  goal {result['goal']}: {met[result['goal_met']]}"
    return (
        f"{result['row']:42s} {result['ours_us']:8.1f} µs {result['tflops']:6.1f} TFLOP/s {result['gbps']:5d} GB/s (solo "
        f"{result['ours_solo_us']:8.1f}, burst {result['ours_burst_us']:8.1f}) err {result['ours_error']:.1e}  {peer}{ratio}{goal}"
    )


def summary(found: dict[str, Any]) -> str:
    """Counts of goals, by section where rows have them."""
    rows = found["rows"]
    judged = [row for row in rows if "goal_met" in row]
    parts = [
        f"{len(rows)} rows in {found['elapsed_s']:.0f} s",
        f"goals met {sum(r['goal_met'] is True for r in judged)}",
    ]
    parts.append(f"missed {sum(row['goal_met'] is False for row in judged)}")
    parts += [f"{word} {n}" for word in ("failed", "not_run") if (n := sum(word in row for row in rows))]
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())

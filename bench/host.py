"""What kgen costs on the host: python -m bench.host --out bench/results/host.json

Time of a call of `sparse_mla` up to the launch, of a call of a form that was never seen before, and on a GPU of whole calls;
enumeration of a search space, and loading of compile results (the import is bench/import_time.py, whole calls without a GPU
bench/host_call.py). Times of the host depend on what else runs there: `load_per_core` is the load when it was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from bench.host_call import on_gpu

PROBE_LINES = 40_000


def validation_us(rounds: int, new_form: bool = False) -> float:
    """Microseconds of validating a dual-cache call and looking up its entry, without a launch (CPU tensors). `new_form`:
    nothing is remembered of the calls before.

    The least of many short samples: one of a few ms often runs between the turns of other processes.
    """
    from generated import forms
    from generated.lookup import serving_of
    from generated.target import Target
    from generated.validate import build_call
    from kgen.check import CaseSpec, make_case

    case = CaseSpec(layout="v4", heads=64, topk=128, page=64, tokens=4, extra_topk=512, extra_page=64, extra_slots=1024)
    kwargs, target = make_case(case).kwargs(), Target("sm90", "h200", "NVIDIA H200")
    times = []
    for _ in range(10 * rounds):
        start = time.perf_counter()
        for _ in range(20):
            if new_form:
                forms._known.clear()
            serving_of(build_call(**kwargs), target)
        times.append((time.perf_counter() - start) / 20 * 1e6)
    return round(min(times), 1)


def enumeration_s() -> float:
    """CPU seconds of listing the feasible candidates of the largest anchor of dsv32 on SM90."""
    from kgen.archs import load_arch
    from kgen.models import anchor_specs, load_model
    from kgen.space import load_space

    arch, space = load_arch("sm90"), load_space("portable")
    spec = max(anchor_specs(load_model("dsv32"), "sm90"), key=lambda s: (-s.tokens, s.heads, s.kv.fp8))
    start = time.process_time()
    sum(1 for _ in space.feasible(spec, arch))
    return round(time.process_time() - start, 2)


def probe_load_s(rounds: int, lines: int = PROBE_LINES) -> float:
    """CPU seconds of loading a file of `lines` compile results, every fifth of them a failure."""
    from kgen.probe_records import ProbeRecord, ProbeStore
    from kgen.types import Failure, ResourceUse

    use = ResourceUse(83968, 168, 0, 0, "wgmma", 40000)
    failed = Failure("compile", "CompilationError: at 3:4: no.")
    with tempfile.TemporaryDirectory(prefix="kgen-probes-") as folder:
        store = ProbeStore(Path(folder) / "compile-sm90.jsonl")
        store.append([ProbeRecord(f"{number:032x}", use if number % 5 else failed) for number in range(lines)])
        times = []
        for _ in range(rounds):
            start = time.process_time()
            load = store.load()
            times.append(time.process_time() - start)
    if len(load.results) != lines or load.set_aside:
        raise RuntimeError(f"{len(load.results)} of {lines} compile results were loaded")
    return round(min(times), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    import torch
    import triton

    load = round(os.getloadavg()[0] / (os.cpu_count() or 1), 1)
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "validate_and_look_up_us": validation_us(args.rounds),
        "validate_and_look_up_new_form_us": validation_us(args.rounds, new_form=True),
        "call_on_gpu_us": on_gpu() if torch.cuda.is_available() else None,
        "enumerate_candidates_cpu_s": enumeration_s(),
        "load_probe_records_cpu_s": probe_load_s(max(1, args.rounds)),
        "probe_records": PROBE_LINES,
        "load_per_core": load,
    }
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What kgen costs on the host: python -m bench.host --out bench/results/host.json

Time of a call of `sparse_mla` up to the launch and enumeration of a search space (the import is bench/import_time.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path


def validation_us(rounds: int) -> float:
    """Microseconds of validating a dual-cache call and looking up its entry, without a launch (CPU tensors)."""
    from generated.launch import call_shape
    from generated.lookup import serve
    from generated.validate import build_call
    from kgen.check import CaseSpec, make_case

    case = CaseSpec(layout="v4", heads=64, topk=128, page=64, tokens=4, extra_topk=512, extra_page=64, extra_slots=1024)
    kwargs = make_case(case).kwargs()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(100):
            call = build_call(**kwargs)
            serve("sm90", "h200", call_shape(call))
        times.append((time.perf_counter() - start) / 100 * 1e6)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    import torch
    import triton

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "validate_and_look_up_us": validation_us(args.rounds),
        "enumerate_candidates_cpu_s": enumeration_s(),
    }
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

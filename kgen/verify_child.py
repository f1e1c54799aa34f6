"""`python -m kgen.verify_child`: verify the emitted package in a process of its own.

A CUDA error ends every further call of its process, so whoever starts this starts it again with the same --resume file
when it ends with RESTART or by a signal; `kgen verify` does. The exit code says what was found: 0 nothing, 1 failed
cases, 4 the budget is spent and cases are left, 75 go on in a new process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

FAILED, UNFINISHED, RESTART = 1, 4, 75


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m kgen.verify_child", description=__doc__)
    made.add_argument("--suite", choices=("core", "full", "sanitizer"), default="core")
    made.add_argument("--resume", type=Path, metavar="FILE", help="results file; what it holds is not run again")
    made.add_argument("--budget", type=float, metavar="S", help="seconds after which no case is started")
    made.add_argument("--repeat", type=int, default=1, metavar="N", help="run every case N times; bits must agree")
    made.add_argument("--shard", default="0/1", metavar="i/N", help="every N-th case, from the i-th on (from 0)")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    made.add_argument("--package", default="generated", help="the emitted package")
    made.add_argument("--limit", type=int, metavar="N", help="only the first N cases")
    made.add_argument("--json", type=Path, metavar="OUT", help="write the summary there")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    import torch

    from kgen.verify import CaseResult, shard_of, shipped_attention, verify
    from kgen.verify_cases import cases_of

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    part, parts = (int(number) for number in args.shard.split("/"))
    cases = shard_of(cases_of(args.suite, device), part, parts)[: args.limit]

    def tell(result: CaseResult) -> None:
        if not result.ok:
            print(f"FAILED {result.slug} ({result.kind}): {result.sentence}", file=sys.stderr, flush=True)

    summary = verify(
        cases,
        shipped_attention(args.package),
        device,
        resume_file=args.resume,
        budget_s=args.budget,
        repeat=args.repeat,
        on_result=tell,
    )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary.to_json(), indent=1) + "\n")
    for line in summary.lines():
        print(line)
    if summary.poisoned:
        return RESTART
    return FAILED if summary.failures else UNFINISHED if summary.left else 0


if __name__ == "__main__":
    sys.exit(main())

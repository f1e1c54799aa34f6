"""Time `generated.dispatch` and the peers side by side: python -m bench.run --suite portable --out bench/results/portable.json

Every output is checked against the float64 reference on sampled rows before it is timed. Decode: CUDA-graph replays that
rotate over input sets of more than twice the L2; prefill: event-timed calls, the L2 overwritten before each. Ours and the
peer's are sampled in turns, so that clocks and heat move both: `ours_us` and the ratio. `ours_solo_us` is ours alone, back to
back, as in tuning; `ours_burst_us` the first samples after a pause. A goal without a peer is judged on the solo time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.peers import available
from bench.rows import SUITES, Row
from kgen.archs import load_arch
from kgen.check import Inputs, attention_reference
from kgen.check.tuning import tuning_inputs
from kgen.environment import current_environment
from kgen.evaluate import sets_for, timer_for
from kgen.measure import Budget, Finalist, interleaved, measure
from kgen.select import floor_us
from kgen.types import Measurement

MAX_ERROR = 4e-3  # relative, of the sampled rows: bf16 output rounding alone is 1.7e-3


class _Buffers:
    """Outputs and scratch of the shipped entry, passed in as an engine does: one set for all calls of a stream."""

    def __init__(self, inputs: Inputs) -> None:
        from generated.dispatch import Shape, workspace_size

        lead, device = inputs.q.shape[:-1], inputs.q.device
        flat = inputs.kv_layout == "bf16"
        extra = inputs.extra_indices
        shape = Shape(
            layout=f"bf16_d{inputs.d_qk}" if flat else inputs.kv_layout, heads=inputs.heads,
            topk=inputs.indices.shape[-1], page=0 if flat else inputs.kv.shape[1], tokens=inputs.tokens,
            extra_topk=0 if extra is None else extra.shape[-1],
            extra_page=0 if inputs.extra_kv is None else inputs.extra_kv.shape[1],
        )  # fmt: skip
        self.out = torch.full((*lead, 512), float("nan"), dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(lead, dtype=torch.float32, device=device)
        self.workspace = torch.empty(max(workspace_size(shape), 16), dtype=torch.uint8, device=device)

    def bind(self, inputs: Inputs) -> Callable[[], Any]:
        from generated.dispatch import sparse_mla

        kwargs = inputs.kwargs()
        return lambda: sparse_mla(**kwargs, out=self.out, lse=self.lse, workspace=self.workspace)


def error_of(out: torch.Tensor, inputs: Inputs) -> float:
    """Relative error of sampled rows; infinite when anything is NaN or infinite."""
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    rows = torch.linspace(0, inputs.tokens - 1, min(inputs.tokens, 16), dtype=torch.long).tolist()
    truth = attention_reference(inputs, rows=rows).out
    got = out.reshape(inputs.tokens, -1, 512)[rows].double()
    return float((got - truth).norm() / truth.norm())


def run_row(row: Row, peers: list[Any], rounds: int) -> dict[str, Any]:
    """One result row: ours and every peer that serves it."""
    spec, tokens = row.spec, row.tokens
    device = load_arch("sm90").device("h200")
    sets = tuning_inputs(spec, tokens, "cuda", sets_for(spec, tokens), sink=row.sink, lengths=row.lengths)
    result: dict[str, Any] = {"row": row.name, "spec": spec.slug, "tokens": tokens, "sets": len(sets)}
    buffers = _Buffers(sets[0])
    runs: dict[str, list[Callable[[], Any]]] = {"ours": [buffers.bind(inputs) for inputs in sets]}
    result["ours_error"] = error_of(runs["ours"][0](), sets[0])
    for peer in peers:
        why = peer.refusal(sets[0])
        if why is not None:
            result.setdefault("refused", {})[peer.name] = why
            continue
        calls = [peer.bind(inputs) for inputs in sets]
        error = error_of(peer.output(calls[0](), sets[0]), sets[0])
        result.setdefault("peer_errors", {})[peer.name] = error
        if error <= MAX_ERROR:
            runs[peer.name] = calls
    clock, budget = timer_for(spec), Budget(seconds=0.25, warmup_s=0.05)
    time.sleep(0.5)
    burst = measure(
        _indexed(runs["ours"]), len(sets), clock=clock, budget=Budget(seconds=0.03, warmup_s=0.0, max_samples=5)
    )
    solo = measure(_indexed(runs["ours"]), len(sets), clock=clock, budget=budget)
    times = interleaved(
        {n: Finalist(_indexed(c), len(sets)) for n, c in runs.items()}, rounds, clock=clock, budget=budget
    )
    return result | _numbers(row, times, solo, burst, floor_us(spec, load_arch("sm90"), device) * tokens / spec.tokens)


def _indexed(calls: list[Callable[[], Any]]) -> Callable[[int], Any]:
    return lambda index: calls[index]()


def _numbers(
    row: Row, times: dict[str, Measurement], solo: Measurement, burst: Measurement, floor: float
) -> dict[str, Any]:
    mine = times["ours"]
    peers = {name: m.median_us for name, m in times.items() if name != "ours"}
    best = min(peers, key=lambda name: peers[name]) if peers else None
    tflops = row.spec.flop(row.tokens) / mine.median_us / 1e6
    found: dict[str, Any] = {
        "ours_us": round(mine.median_us, 2), "ours_solo_us": round(solo.median_us, 2), "ours_burst_us": round(burst.median_us, 2),
        "tflops": round(tflops, 1), "tflops_solo": round(row.spec.flop(row.tokens) / solo.median_us / 1e6, 1),
        "gbps": round(row.spec.gathered_bytes(row.tokens) / mine.median_us / 1e3), "floor_us": round(floor, 2),
        "best_peer": best, "best_peer_us": round(peers[best], 2) if best else None,
        "ratio": round(mine.median_us / peers[best], 3) if best else None,
        "measurements": {name: asdict(m) for name, m in times.items()},
    }  # fmt: skip
    if row.goal is not None:
        kind, number = row.goal
        met = found["tflops_solo"] >= number if kind == "tflops" else solo.median_us <= number
        found |= {"goal": f"{'>=' if kind == 'tflops' else '<='} {number} {kind}", "goal_met": met}
    return found


def ceilings() -> dict[str, float]:
    """What the card does in this run: a bf16 product and a copy, the two rates that bound everything."""
    from triton.testing import do_bench

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul_ms = do_bench(lambda: a @ b, return_mode="median")
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    return {
        "matmul_tflops": round(2 * 8192**3 / matmul_ms / 1e9, 1),
        "copy_gbps": round(8 * source.numel() / copy_ms / 1e6),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), default="portable")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--flash-mla", help="folder that holds the unpacked package flash_mla")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.run times on a GPU and none is visible here.", file=sys.stderr)
        return 3
    os.environ.setdefault("KGEN_CONFIGS", "configs")
    peers, absent = available(args.flash_mla)
    for sentence in absent:
        print(sentence)
    environment = asdict(current_environment("sm90", "h200"))
    found: dict[str, Any] = {
        "environment": environment,
        "method": __doc__,
        "absent": absent,
        "ceilings": ceilings(),
        "rows": [],
    }
    for row in SUITES[args.suite]:
        try:
            result = run_row(row, peers, args.rounds)
        except Exception as error:  # one row's failure is that row's result
            result = {"row": row.name, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        found["rows"].append(result)
        print(line(result), flush=True)
        torch.cuda.empty_cache()
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def line(result: dict[str, Any]) -> str:
    """One readable line of a result row."""
    if "failed" in result:
        return f"{result['row']:44s} FAILED {result['failed']}"
    peer = f"peer {result['best_peer_us']:9.1f} ratio {result['ratio']:.2f}" if result["best_peer"] else "no peer"
    goal = f"  goal {result['goal']} {'met' if result['goal_met'] else 'MISSED'}" if "goal" in result else ""
    return (
        f"{result['row']:44s} {result['ours_us']:9.1f} µs {result['tflops']:6.1f} TFLOP/s (solo {result['ours_solo_us']:9.1f}, "
        f"{result['tflops_solo']:6.1f}; burst {result['ours_burst_us']:9.1f}) {result['gbps']:5d} GB/s "
        f"err {result['ours_error']:.1e}  {peer}{goal}"
    )


if __name__ == "__main__":
    sys.exit(main())

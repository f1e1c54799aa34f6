"""One row on the GPU: inputs, check of every output, times of ours and of the peers, and the judge's word."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bench.ceilings import ceiling_us, data_sheet_us, in_l2, pool_of
from bench.inputs import Pools, keys_of
from bench.judge import MAX_ERROR, judge, judge_alone
from bench.ours import Ours, served_by
from bench.peers import padded_heads
from bench.rows import Row
from kgen.archs import load_arch
from kgen.check import Inputs, attention_reference
from kgen.check.tuning import tuning_inputs
from kgen.evaluate import sets_for, timer_for
from kgen.measure import Budget, Finalist, interleaved, measure
from kgen.types import Measurement

PAUSE_S = 0.2
MOST_SETS = 400
WARM_SETS = 8
"""Sets of the peers' rotation where it stayed in the L2; ours is timed like that beside them, for information."""

Calls = list[Callable[[], Any]]


class RowRun:
    """What rows share: caches, peers, ceilings and how long to measure."""

    def __init__(
        self,
        peers: list[Any],
        ceilings: dict[str, Any],
        l2_bytes: int,
        rounds: int,
        seconds: float,
        device: str = "cuda",
    ) -> None:
        self.peers, self.ceilings, self.l2_bytes, self.rounds = peers, ceilings, l2_bytes, rounds
        self.budget = Budget(seconds=seconds, warmup_s=0.04)
        self.burst = Budget(seconds=0.03, warmup_s=0.0, max_samples=5)
        self.pools = Pools(device)
        device_class = load_arch("sm90").device("h200")
        assert device_class is not None
        self.device_class = device_class

    def run(self, row: Row) -> dict[str, Any]:
        """One result row: ours and every peer that serves it. What ours raises comes through."""
        sets = self._inputs(row)
        scale_range = self.pools.scale_range(row) if row.pool_rows and row.spec.kv.fp8 else None
        ours = Ours(row, sets[0], scale_range)
        result: dict[str, Any] = {
            "row": row.name, "spec": row.spec.slug, "tokens": row.tokens, "s_q": row.s_q, "heads": row.spec.heads,
            "topk": row.spec.topk, "extra_topk": row.spec.extra_topk, "sets": len(sets), "scale_range": scale_range,
            "rotation_mb": round(len(sets) * row.spec.gathered_bytes(row.tokens) / 1e6),
        }  # fmt: skip
        result |= served_by(ours.shape)
        runs: dict[str, Calls] = {"ours": [ours.bind(inputs) for inputs in sets]}
        truth = Truth(sets[0])
        before = time.perf_counter()
        runs["ours"][0]()
        result["ours_error"] = truth.error(ours.out)  # waits for the call
        result["first_call_s"] = round(time.perf_counter() - before, 2)
        runs |= self._peer_calls(row, sets, truth, result)
        times, solo, bursts = self._times(row, runs, len(sets))
        keys = round(sum(keys_of(inputs) for inputs in sets) / len(sets))
        result |= self._numbers(row, keys, times, solo, bursts, result["ours_error"])
        if row.reference is not None and row.reference.l2_warm and len(sets) > WARM_SETS:
            warm = measure(_indexed(runs["ours"]), WARM_SETS, clock=timer_for(row.spec), budget=self.budget)
            result["ours_l2_warm_us"] = round(warm.median_us, 2)
            result["ratio_l2_warm"] = round(warm.median_us / row.reference.us, 3)
        return result

    def _inputs(self, row: Row) -> list[Inputs]:
        count = sets_of(row, self.l2_bytes)
        if row.pool_rows:
            return self.pools.inputs(row, count)
        return tuning_inputs(row.spec, row.tokens, self.pools.gen.device, count, sink=row.sink, lengths=row.lengths)

    def _peer_calls(self, row: Row, sets: list[Inputs], truth: Truth, result: dict[str, Any]) -> dict[str, Calls]:
        """Calls of every peer that serves the row and computes it; the others are named in `result`."""
        found: dict[str, Calls] = {}
        for peer in self.peers:
            why = peer.refusal(sets[0])
            if why is not None:
                result.setdefault("refused", {})[peer.name] = why
                continue
            try:
                calls = [peer.bind(inputs) for inputs in sets]
                error = truth.error(peer.output(calls[0](), sets[0]))
            except RuntimeError as problem:  # ours is still timed
                result.setdefault("refused", {})[peer.name] = " ".join(str(problem).split())[:200]
                continue
            result.setdefault("peer_errors", {})[peer.name] = error
            if padded_heads(row.spec.heads) != row.spec.heads:
                result["peer_heads"] = padded_heads(row.spec.heads)
            if error <= MAX_ERROR:
                found[peer.name] = calls
        return found

    def _times(
        self, row: Row, runs: dict[str, Calls], sets: int
    ) -> tuple[dict[str, Measurement], Measurement, dict[str, float]]:
        """Sampled in turns; ours alone; and µs of each after a pause."""
        clock = timer_for(row.spec)
        bursts = {}
        for name, calls in runs.items():
            time.sleep(PAUSE_S)
            bursts[name] = measure(_indexed(calls), sets, clock=clock, budget=self.burst).median_us
        solo = measure(_indexed(runs["ours"]), sets, clock=clock, budget=self.budget)
        finalists = {name: Finalist(_indexed(calls), sets) for name, calls in runs.items()}
        return interleaved(finalists, self.rounds, clock=clock, budget=self.budget), solo, bursts

    def _numbers(
        self,
        row: Row,
        keys: int,
        times: dict[str, Measurement],
        solo: Measurement,
        bursts: dict[str, float],
        error: float,
    ) -> dict[str, Any]:
        mine = times["ours"].median_us
        peers = {name: m.median_us for name, m in times.items() if name != "ours"}
        ceiling = ceiling_us(row, keys, self.ceilings)
        flop = row.flop(keys)
        tflops_solo = flop / solo.median_us / 1e6
        found: dict[str, Any] = {
            "ours_us": round(mine, 2), "ours_solo_us": round(solo.median_us, 2), "ours_burst_us": round(bursts["ours"], 2),
            "tflops": round(flop / mine / 1e6, 1), "tflops_solo": round(tflops_solo, 1),
            "gbps": round(keys * row.row_bytes / mine / 1e3), "keys": keys,
            "floor_us": round(data_sheet_us(row, keys, self.device_class, self.l2_bytes), 2),
            "ceiling_us": None if ceiling is None else round(ceiling, 2),
        }  # fmt: skip
        found |= judge(row, mine, peers, ceiling, error) | judge_alone(row, solo.median_us, tflops_solo)
        best = found["best_peer"]
        found["best_peer_burst_us"] = round(bursts[best], 2) if best else None
        found["ratio_burst"] = round(bursts["ours"] / bursts[best], 3) if best else None
        return found | {"measurements": {name: asdict(m) for name, m in times.items()}}


def sets_of(row: Row, l2_bytes: int) -> int:
    """The tuner's sets, or more: so many that they gather twice the L2 (decision 21), where the pool is larger at all."""
    count = sets_for(row.spec, row.tokens)
    if not row.pool_rows or in_l2(pool_of(row), l2_bytes):
        return count
    return max(count, min(MOST_SETS, -(-2 * l2_bytes // row.spec.gathered_bytes(row.tokens))))


class Truth:
    """The float64 reference of sampled rows of a call."""

    def __init__(self, inputs: Inputs) -> None:
        self.tokens = inputs.tokens
        self.rows = torch.linspace(0, self.tokens - 1, min(self.tokens, 16), dtype=torch.long).tolist()
        self.out = attention_reference(inputs, rows=self.rows).out

    def error(self, out: Tensor) -> float:
        """Relative error of the sampled rows; infinite when anything at all is NaN or infinite."""
        if not bool(torch.isfinite(out).all()):
            return float("inf")
        got = out.reshape(self.tokens, -1, 512)[self.rows].double()
        return float((got - self.out).norm() / self.out.norm())


def _indexed(calls: Calls) -> Callable[[int], Any]:
    return lambda index: calls[index]()

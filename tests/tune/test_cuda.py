"""The real timers and a really lost CUDA context; runs where there is a GPU."""

from __future__ import annotations

import pytest

from kgen.jobs import Outcome, TuneJob
from kgen.measure import Budget, CudaEventTimer, CudaGraphTimer, Finalist, interleaved, measure
from kgen.worker import WorkerPool

from .samples import make_candidate, make_measurement, make_spec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def matmul(size: int, sets: int) -> Finalist:
    inputs = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    out = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
    return Finalist(lambda index: torch.matmul(inputs[index], inputs[index], out=out), sets)


def test_graph_and_event_timers_agree_on_a_long_kernel() -> None:
    work = matmul(4096, 8)  # 8 × 32 MiB: larger than any L2
    graph = measure(work.run, work.sets, clock=CudaGraphTimer(), budget=Budget(seconds=1.0))
    event = measure(work.run, work.sets, clock=CudaEventTimer(), budget=Budget(seconds=1.0))
    assert graph.method == "cuda-graph" and event.method == "cuda-event"
    assert graph.median_us == pytest.approx(event.median_us, rel=0.15)
    assert 2 * 4096**3 / graph.median_us * 1e-6 < 4000  # TFLOP/s of no card so far
    assert graph.spread < 0.2
    assert graph.sm_clock_mhz is None or 300 < graph.sm_clock_mhz < 4000


def test_graph_replays_hide_the_launch_cost_of_short_kernels() -> None:
    work = matmul(128, 4)
    result = measure(work.run, work.sets, clock=CudaGraphTimer())
    assert 0.5 < result.median_us < 20 and result.calls_per_sample >= 8


def test_interleaved_tells_sizes_apart() -> None:
    results = interleaved({"small": matmul(1024, 4), "large": matmul(2048, 4)}, 9, clock=CudaGraphTimer())
    assert results["large"].median_us > 2 * results["small"].median_us


def evaluate(job: TuneJob) -> Outcome:
    """Reads out of bounds on the device when asked to, which loses the context."""
    values = torch.arange(8, device="cuda")
    index = torch.tensor([10**6 if job.candidate["mode"] == "bad" else 3], device="cuda")
    return Outcome(make_measurement(1.0 + float(values[index].sum().item())))


def test_a_lost_context_costs_one_candidate() -> None:
    with WorkerPool([0], f"{__name__}:evaluate", timeout_s=60) as pool:
        bad = pool.evaluate(TuneJob(make_spec(), make_candidate(mode="bad"), 16))
        assert isinstance(bad, Outcome) and bad.failure is not None and bad.failure.kind == "crash"
        assert pool.replaced == 1
        good = pool.evaluate(TuneJob(make_spec(), make_candidate(mode="ok"), 16))
        assert isinstance(good, Outcome) and good.measurement is not None and good.measurement.median_us == 4.0

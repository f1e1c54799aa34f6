"""The clocks behind `kgen.measure`: CUDA graphs, CUDA events, and a fake device for its tests. torch is imported on
use.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[int], object]
"""Launches one call on the input set of that number, without synchronising."""
Sampler = Callable[[], float]
"""Runs a sample; gives the mean device time of one call, in µs."""

FLUSH_BYTES = 256 << 20
"""What is overwritten before each event-timed call: triton.testing.do_bench's size, above every L2 so far."""

_HEAD_START_CYCLES = 1_000_000
"""About 0.5 ms of waiting on the device before an event-timed call: more than the host needs to enqueue one."""


class CudaGraphTimer:
    """Replays of a CUDA graph of several calls: launch costs of the host do not count. For decode.

    The input sets must together be larger than twice the L2 (decision 21), since nothing is flushed between calls.
    """

    method = "cuda-graph"
    min_calls = 8
    whole_rounds = True

    def now(self) -> float:
        return time.perf_counter()

    def prepare(self, run: Run, sets: int, calls: int) -> Sampler:
        import torch

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for index in range(sets):  # compiles, loads modules, fills allocator caches: not allowed in a capture
                run(index)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                run(call % sets)
        start, end = _event(), _event()

        def sample() -> float:
            graph.replay()  # keeps the device busy while the timed replay is enqueued
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3 / calls

        return sample

    def state(self) -> tuple[int | None, int | None]:
        return _nvml_state()


class CudaEventTimer:
    """Events around single calls, the L2 overwritten before each, as triton.testing.do_bench does. For prefill."""

    method = "cuda-event"
    min_calls = 1
    whole_rounds = False

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        self._flush_bytes = flush_bytes
        self._scratch: Any = None

    def now(self) -> float:
        return time.perf_counter()

    def prepare(self, run: Run, sets: int, calls: int) -> Sampler:
        import torch

        if self._scratch is None:
            self._scratch = torch.empty(self._flush_bytes // 4, dtype=torch.int32, device="cuda")
        scratch = self._scratch
        run(0)
        torch.cuda.synchronize()
        turn = itertools.count()
        events = [(_event(), _event()) for _ in range(calls)]

        def sample() -> float:
            for start, end in events:
                torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # the host gets ahead, so that no launch latency is timed
                scratch.zero_()
                start.record()
                run(next(turn) % sets)
                end.record()
            torch.cuda.synchronize()
            return statistics.mean(float(start.elapsed_time(end)) for start, end in events) * 1e3

        return sample

    def state(self) -> tuple[int | None, int | None]:
        return _nvml_state()


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _nvml_state() -> tuple[int | None, int | None]:
    """SM clock (MHz) and temperature (°C) of the current device, asked of the driver's library in microseconds."""
    try:
        import torch

        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        handle, clock, celsius = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None, None
        sm_clock, gpu_sensor = 1, 0
        no_clock = nvml.nvmlDeviceGetClockInfo(handle, sm_clock, ctypes.byref(clock))
        no_heat = nvml.nvmlDeviceGetTemperature(handle, gpu_sensor, ctypes.byref(celsius))
    except (OSError, ImportError, RuntimeError, AssertionError, AttributeError):
        return None, None
    return None if no_clock else clock.value, None if no_heat else celsius.value


class FakeTimer:
    """A device on a virtual clock, for tests: `run` calls `spend(us)` instead of launching.

    A cold device is `1 + cold` times slower and warms up with time constant `tau_s` of work; `heat` is how much slower
    it gets for every second of work. `overhead_us` is host time of each sample and `flush_us` of each call, which no
    sample contains; `noise` is the relative standard deviation of a sample.
    """

    method = "fake"

    def __init__(
        self,
        *,
        cold: float = 0.0,
        tau_s: float = 0.02,
        heat: float = 0.0,
        noise: float = 0.0,
        overhead_us: float = 0.0,
        flush_us: float = 0.0,
        prepare_us: float = 0.0,
        min_calls: int = 8,
        whole_rounds: bool = True,
        seed: int = 0,
    ) -> None:
        self.min_calls = min_calls
        self.whole_rounds = whole_rounds
        self.seconds = 0.0
        self.worked = 0.0
        self.visits: list[int] = []
        self._cold, self._tau, self._heat, self._noise = cold, tau_s, heat, noise
        self._overhead_us, self._flush_us, self._prepare_us = overhead_us, flush_us, prepare_us
        self._random = random.Random(seed)

    def spend(self, us: float) -> None:
        """The work of one call: `us` on a warm, cool device."""
        slow = 1 + self._cold * 2.718281828 ** (-self.worked / self._tau) + self._heat * self.worked
        self.worked += us * slow * 1e-6
        self.seconds += us * slow * 1e-6

    def now(self) -> float:
        return self.seconds

    def prepare(self, run: Run, sets: int, calls: int) -> Sampler:
        self.seconds += self._prepare_us * 1e-6
        turn = itertools.count()

        def sample() -> float:
            before = self.worked
            for _ in range(calls):
                index = next(turn) % sets
                self.visits.append(index)
                run(index)
                self.seconds += self._flush_us * 1e-6
            self.seconds += self._overhead_us * 1e-6
            return (self.worked - before) * 1e6 / calls * (1 + self._random.gauss(0, self._noise))

        return sample

    def state(self) -> tuple[int | None, int | None]:
        return None, None

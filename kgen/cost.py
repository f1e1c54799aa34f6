"""Cost model: the time of a compiled kernel from first principles, for ranking candidates where nothing can be measured.

A kernel is `tokens x head blocks x splits` equal programs; a program is a prologue, `steps` key tiles and an epilogue. A
step takes the longer of its own chain of dependences (loads, dequantisation, MMA, softmax, MMA) and of what the busiest
unit of the SM needs for all resident programs. The few numbers that no data sheet states are `Coefficients`, fitted to
1755 kernels of 124 specs on an H200 (2251 timings, one counts per kernel; `python -m kgen.honesty --fit`); all are per SM
and per clock, so that they carry over to other archs through the SMs, clocks, bandwidths and limits of `configs/archs/`.

What the fit does not tell: 12 of the 22 coefficients ended at a bound of `kgen.honesty.BOUNDS`, so that they rank kernels
together and mean little one by one. Times are off by 22 % in the median. Known blind spot: mma.sync with 16 heads and 8
warps comes out 1.5 x too fast on a bf16 prefill, and the pick there is 1.9 x the best (tests/static/test_trials.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from kgen.archs import ArchSpec, DeviceClass
from kgen.types import Candidate, KernelSpec, ResourceUse

D_V = 512
LANES = 128
"""fp32 lanes of an SM, of every arch here."""
SMEM_BYTES_PER_CLOCK = 128
SMEM_RESERVED = 1024
"""Bytes of shared memory that an SM keeps per block (NVIDIA tuning guides)."""


@dataclass(frozen=True)
class Coefficients:
    """What the model fits. Cycles are SM clocks; shares are of a data-sheet rate."""

    launch_us: float = 1.5  # one kernel launch in a CUDA graph, with its first loads
    combine_us: float = 1.5  # the second launch of a split
    prologue: float = 1450.0  # cycles of a program before its first step and after its last
    step: float = 3000.0  # cycles of a step that no work accounts for: barriers, index loads, softmax reductions
    load_latency: float = 5000.0  # cycles from a gather's issue to its data, when nothing hides it
    hidden: float = 0.95  # share of that latency which each further pipeline stage hides
    index_latency: float = 910.0  # cycles of an index load that is not one step ahead
    chunk: float = 113.0  # cycles per chunk of K and step
    mma_share: float = 0.85  # share of the peak that wgmma and tcgen05 reach
    mma_sync_rate: float = 799.0  # FLOP per clock and SM that mma.sync reaches at most
    dequantise: float = 19.4  # instructions per fp8 element: convert, scale, round, store
    score_scales: float = 1.0  # share of them that remains with scales at the scores
    softmax: float = 3.0  # instructions per score
    rescale: float = 0.7  # instructions per output element and step
    warps_to_fill: float = 8.01  # warps that keep the lanes of an SM busy
    spill: float = 2.59  # cycles per spilled byte, warp and step
    l2_bytes: float = 42.0  # bytes per clock and SM of gathers that hit the L2
    dram_share: float = 0.95  # share of the DRAM bandwidth that gathers reach
    special: float = 0.93  # time of a kernel with the shape as constants, relative to the generic form
    swap: float = 1.16  # time of the chain of a step with swapped operands, relative
    smem: float = 1.6  # cycles per shared-memory cycle of MMA operands
    contention: float = 0.317  # share of the other programs' chains that a program waits for


FITTED = Coefficients()


@dataclass(frozen=True)
class Estimate:
    """A time in µs, and what it is made of.

    terms: launch, compute, dram and merge in µs, where compute and dram overlap; `resident` programs per SM and `rounds`
    of them; step_cycles, and what one program's step needs of it in SM clocks (waits, mma, operands, dequantise, softmax,
    rescale, gather, spill), which overlap, too. assumed: facts of the arch's YAML that nobody has stated, so that the
    time rests on what the YAML assumes for them.
    """

    us: float
    terms: tuple[tuple[str, float], ...]
    assumed: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return dict(self.terms)[name]


@dataclass(frozen=True)
class Work:
    """What the model reads of a kernel: counts and raw cycles, before any coefficient."""

    programs: int
    steps: int
    resident: int  # programs that fit an SM
    warps: int
    stages: int
    chunks: int
    prefetch: bool
    special: bool
    swap: bool
    score_scales: bool
    wgmma: bool
    flop: float  # of one step, padding included
    mma_peak: float  # FLOP per clock and SM
    operand_bytes: float  # of K read from shared memory by a step's MMAs
    fp8: float  # elements dequantised in a step
    scores: float
    outputs: float  # output elements of a program
    spills: int
    row_bytes: float  # gathered in a step
    dram_bytes: float  # of the whole call
    split_bytes: float  # partial outputs written and read
    sms: int
    clock_mhz: float
    dram_gbps: float


def estimate_us(
    spec: KernelSpec,
    candidate: Candidate,
    use: ResourceUse | None,
    arch: ArchSpec,
    device: DeviceClass,
    tokens: int | None = None,
    coefficients: Coefficients = FITTED,
) -> Estimate:
    """Time of `candidate` for `spec` on `device`; `use` None takes a guess of the resources, for pre-ranking only.

    `tokens` other than the bucket's keep the candidate's split count.
    """
    found = use or guess_resources(spec, candidate, arch)
    estimate = predict(work_of(spec, candidate, found, arch, device, tokens), coefficients)
    return Estimate(estimate.us, estimate.terms, assumed_facts(arch, device))


def assumed_facts(arch: ArchSpec, device: DeviceClass) -> tuple[str, ...]:
    """Names of the hardware facts for which the model takes the assumption of the arch's YAML."""
    return tuple(fact.name for fact in (*arch.facts, *device.facts) if fact.value is None)


def work_of(
    spec: KernelSpec,
    candidate: Candidate,
    use: ResourceUse,
    arch: ArchSpec,
    device: DeviceClass,
    tokens: int | None = None,
) -> Work:
    """Counts and raw cycles of a compiled candidate."""
    values = dict(candidate.tunables)
    block_h, block_k = int(values["block_h"] or 0), int(values["block_k"] or 0)
    count, launch = tokens or spec.tokens, candidate.launch
    blocks = -(-spec.topk // block_k) + -(-spec.extra_topk // block_k)
    splits = max(1, min(int(values["splits"] or 1), blocks))
    wgmma = use.mma in ("wgmma", "tcgen05")
    # the warps of mma.sync along the heads each read all of K; a warpgroup reads it once
    readers = max(1, launch.num_warps // 4) if wgmma else min(launch.num_warps, max(1, block_h // 16))
    rows = count * spec.keys_per_token * spec.kv.token_bytes
    part = 2 if values["partial"] == "bf16" else 4
    return Work(
        programs=count * -(-spec.heads // block_h) * splits,
        steps=-(-blocks // splits),
        resident=resident_programs(use, launch.num_warps, arch),
        warps=launch.num_warps,
        stages=launch.num_stages,
        chunks=-(-spec.d_qk // int(values["chunk"] or 64)),
        prefetch=bool(values["prefetch"]),
        special=bool(values["specialise"]),
        swap=bool(values["swap_ab"]),
        score_scales=values["scale_site"] == "score",
        wgmma=wgmma,
        flop=2.0 * block_h * block_k * (spec.d_qk + D_V),
        mma_peak=device.bf16_tflops * 1e6 / (device.sms * device.sm_clock_mhz),
        operand_bytes=2.0 * block_k * (spec.d_qk + D_V) * readers,
        fp8=float(block_k * D_V) if spec.kv.fp8 else 0.0,
        scores=float(block_h * block_k),
        outputs=float(block_h * D_V),
        spills=use.spills,
        row_bytes=float(block_k * spec.kv.token_bytes),
        dram_bytes=float(rows if spec.kv.paged else min(rows, device.l2_bytes)),
        split_bytes=2.0 * part * count * spec.heads * splits * D_V if splits > 1 else 0.0,
        sms=device.sms,
        clock_mhz=device.sm_clock_mhz,
        dram_gbps=device.dram_gbps,
    )


def resident_programs(use: ResourceUse, num_warps: int, arch: ArchSpec) -> int:
    """Programs that one SM holds at a time: by shared memory, registers (in units of 8 per thread) and warps."""
    registers = -(-max(use.registers, 1) // 8) * 8 * 32 * num_warps
    by_smem = max(1, arch.smem_per_sm // (use.shared + SMEM_RESERVED))
    by_tmem = arch.tmem_columns // use.tmem if use.tmem else by_smem
    return max(1, min(by_smem, arch.regs_per_sm // registers, arch.max_warps // num_warps, by_tmem, 32))


def guess_resources(spec: KernelSpec, candidate: Candidate, arch: ArchSpec) -> ResourceUse:
    """Rough resources of a candidate that was not compiled: a key tile per stage, the accumulator plus 96 registers."""
    values, launch = dict(candidate.tunables), candidate.launch
    block_h, block_k = int(values["block_h"] or 0), int(values["block_k"] or 0)
    tall = block_h >= 64 or bool(values["swap_ab"])
    mma = arch.mma if tall and launch.num_warps >= 4 else "mma.sync"
    accumulator = 0 if mma == "tcgen05" else block_h * D_V // (32 * launch.num_warps)
    wanted = accumulator + 96
    limit = min(launch.maxnreg or arch.max_regs, arch.max_regs)
    row = spec.kv.token_bytes if spec.kv.fp8 else 0
    tiles = 1 if spec.kv.fp8 else max(1, launch.num_stages)
    shared = block_h * spec.d_qk * 2 + block_k * (2 * spec.d_qk * tiles + row * max(0, launch.num_stages - 1))
    spills = 4 * max(0, wanted - limit)
    tmem = min(arch.tmem_columns, D_V) if mma == "tcgen05" else 0
    return ResourceUse(shared, min(wanted, limit), spills, tmem, mma, 0)


def predict(work: Work, c: Coefficients) -> Estimate:
    """The time of a kernel from its work."""
    scale = (c.special if work.special else 1.0) / work.clock_mhz
    queue = -(-work.programs // work.sms)  # programs that the busiest SM runs in all
    rounds, rest = divmod(queue, work.resident)
    cycles = step_cycles(work, c)
    step = _step(work, cycles, work.resident, c) if rounds else 0.0
    last = _step(work, cycles, rest, c) if rest else 0.0
    prologue = c.prologue + work.outputs / LANES
    compute = scale * (rounds * (prologue + work.steps * step) + (prologue + work.steps * last if rest else 0.0))
    dram = work.dram_bytes / (work.dram_gbps * c.dram_share) / 1e3
    merge = c.combine_us + work.split_bytes / (work.dram_gbps * c.dram_share) / 1e3 if work.split_bytes else 0.0
    us = c.launch_us + _soft_max(compute, dram) + merge
    terms = (
        ("launch", c.launch_us), ("compute", compute), ("dram", dram), ("merge", merge), ("step_cycles", step or last),
        ("resident", float(work.resident)), ("rounds", queue / work.resident), *zip(StepCycles._fields, cycles, strict=True),
    )  # fmt: skip
    return Estimate(us, terms)


class StepCycles(NamedTuple):
    """SM clocks that one program's step takes of each unit, were the unit its own."""

    waits: float
    mma: float
    operands: float
    dequantise: float
    softmax: float
    rescale: float
    gather: float
    spill: float


def step_cycles(work: Work, c: Coefficients) -> StepCycles:
    """What one step of one program needs, before anything overlaps."""
    rate = work.mma_peak * c.mma_share if work.wgmma else min(work.mma_peak, c.mma_sync_rate)
    # scales at the scores are multiplied twice per chunk: into the scores and into the probabilities
    scores = work.scores * (c.softmax + (3.0 * work.chunks if work.score_scales else 0.0))
    hidden = (1.0 - c.hidden) ** max(0, work.stages - 1)
    return StepCycles(
        waits=c.step + c.chunk * work.chunks + c.load_latency * hidden + (0.0 if work.prefetch else c.index_latency),
        mma=work.flop / (rate * min(1.0, work.warps / 4)),
        operands=c.smem * work.operand_bytes / SMEM_BYTES_PER_CLOCK,
        dequantise=work.fp8 * c.dequantise * (c.score_scales if work.score_scales else 1.0) / LANES,
        softmax=scores / LANES,
        rescale=work.outputs * c.rescale / LANES,
        gather=work.row_bytes / c.l2_bytes,
        spill=c.spill * work.spills * work.warps,
    )


def _step(work: Work, cycles: StepCycles, resident: int, c: Coefficients) -> float:
    """Cycles until each of `resident` programs of an SM has done one step."""
    waits, mma, operands, dequantise, softmax, rescale, gather, spill = cycles
    alu = dequantise + softmax + rescale
    starving = max(1.0, c.warps_to_fill / work.warps)  # one program's warps alone do not fill the lanes
    chain = waits + max(mma, operands) + alu * starving + spill
    if work.swap:
        chain *= c.swap
    unit = max(mma, operands, alu, gather, spill) * resident
    return _soft_max(chain + c.contention * (resident - 1) * (mma + alu + spill), unit)


def _soft_max(a: float, b: float) -> float:
    """Two things that overlap, imperfectly where they are about equal."""
    return float((a**4 + b**4) ** 0.25) if math.isfinite(a + b) else math.inf

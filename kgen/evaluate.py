"""The GPU evaluator: compile a candidate, verify it on adversarial inputs, then time it. Runs inside a worker process.

Compilation runs freely; everything that touches the GPU runs under a file lock of that device, so that several workers of
one device overlap their compilations with each other's timing and never disturb it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kgen.archs import load_arch
from kgen.build import limits_exceeded
from kgen.check import CaseSpec, Inputs, Reference, Tolerance, attention_reference, compare, make_case, tolerance_for
from kgen.check.tuning import tuning_inputs
from kgen.compile_child import all_warps, mma_of
from kgen.jobs import Outcome, TuneJob
from kgen.measure import Budget, Finalist, Timer, interleaved, measure, unstable
from kgen.render import load_module
from kgen.runtime import launch as launcher
from kgen.runtime.call import AttentionCall
from kgen.runtime.table import Entry, Provenance, Shape
from kgen.runtime.validate import build_call
from kgen.select import config_of, module_of
from kgen.timers import CudaEventTimer, CudaGraphTimer
from kgen.types import Candidate, Failure, KernelSpec, ResourceUse

ROTATION_BYTES = 240 << 20
"""Bytes that a rotation of input sets gathers, at least: twice the largest L2 that kgen knows (decision 21)."""
MAX_SETS = 96
EXAM_TOKENS = 3


def entry_of(candidate: Candidate, shape: Shape, source: str = "measured") -> Entry:
    """A table entry for exactly `shape`, as `kgen.emit` would write it."""
    return Entry(
        layout=shape.layout, dual=shape.dual, heads=shape.heads,
        topk=(shape.topk, shape.topk), extra_topk=(shape.extra_topk, shape.extra_topk),
        page=shape.page or None, extra_page=shape.extra_page or None, tokens=(shape.tokens, shape.tokens),
        module=module_of(candidate, shape.layout),
        config=config_of(candidate), provenance=Provenance(source, "", anchor_tokens=shape.tokens),
    )  # fmt: skip


@dataclass(frozen=True)
class Ready:
    """A candidate bound to one input set: `run()` launches it, nothing is looked up or allocated."""

    call: AttentionCall
    plan: launcher.Plan
    modules: launcher.Modules
    workspace: torch.Tensor | None

    def run(self) -> None:
        launcher.launch(self.call, self.plan, self.modules, self.workspace)

    def compile(self) -> Any:
        """Compile without launching; the attention kernel's compiled form."""
        scratch = launcher._scratch_tensors(self.call, self.plan, self.workspace)
        args = launcher.attention_args(self.call, scratch, self.plan)
        compiled = self.modules.attention.attention_kernel.warmup(
            *args, **self.plan.constants, **self.plan.options, grid=(1,)
        )
        if self.plan.splits > 1:
            constants = launcher.combine_constants(self.plan, self.call)
            self.modules.combine.combine_kernel.warmup(
                *launcher.combine_args(self.call, self.plan, scratch), **constants, grid=(1,)
            )
        return compiled


def modules_of(candidate: Candidate, layout: str, arch: str) -> launcher.Modules:
    """The rendered modules that a candidate means."""
    attention = load_module(candidate.family, layout, arch, candidate.chunk)
    return launcher.Modules(attention, load_module("combine", None, arch))


def bind(candidate: Candidate, inputs: Inputs, arch: str, *, exact: bool = True, **flags: Any) -> Ready:
    """Bind a candidate to inputs. `exact`: the inputs have the shape it was tuned for, so constants may be used.
    `flags` go to `build_call` (return_lse, return_max_logits, out, …)."""
    call = build_call(**inputs.kwargs(), **flags)
    # as a call without lse: one that asks for it may take the form of another candidate, which then would be examined
    shape = replace(launcher.call_shape(call), lse=False)
    plan = launcher.make_plan(shape, entry_of(candidate, shape), exact)
    size = launcher.plan_scratch_bytes(plan, call.tokens, call.heads)
    workspace = torch.empty(size, dtype=torch.uint8, device=call.q.device) if size else None
    return Ready(call, plan, modules_of(candidate, call.layout.name, arch), workspace)


# ---------------------------------------------------------------------------------------------- verification


def exam_specs(spec: KernelSpec) -> list[CaseSpec]:
    """Adversarial cases of exactly the tuned shape. Aligned like real calls, so that no further variant is compiled."""
    slots = max(2 * (spec.topk + spec.extra_topk), 512)
    common: dict[str, Any] = {
        "layout": spec.layout, "heads": spec.heads, "topk": spec.topk, "page": spec.page, "slots": slots,
        "tokens": EXAM_TOKENS, "extra_topk": spec.extra_topk, "extra_page": spec.extra_page,
        "extra_slots": slots if spec.dual else 0, "q_pad": False,
    }  # fmt: skip
    return [
        CaseSpec(**common, sink="near", lengths="random", index="random", seed=1),
        CaseSpec(**common, sink="none", lengths="none", index="leading", index_at=min(spec.topk - 1, 130), seed=2),
    ]


@dataclass(frozen=True)
class Exam:
    inputs: Inputs
    truth: Reference
    tolerance: Tolerance
    name: str


@lru_cache(maxsize=4)
def exams(spec: KernelSpec, device: str) -> tuple[Exam, ...]:
    """Inputs and truth, made once per spec and process."""
    made = []
    for case in exam_specs(spec):
        inputs = make_case(case, device)
        made.append(Exam(inputs, attention_reference(inputs), tolerance_for(case), case.slug))
    return tuple(made)


def verify_candidate(candidate: Candidate, spec: KernelSpec, device: str = "cuda") -> tuple[float, Failure | None]:
    """Worst output error of the candidate over its exams, and the first that it fails."""
    worst = 0.0
    for exam in exams(spec, device):
        shape = (*exam.inputs.q.shape[:-1], 512)
        out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=exam.inputs.q.device)
        ready = bind(candidate, exam.inputs, spec.arch, out=out, return_lse=True, return_max_logits=True)
        ready.run()
        call = ready.call
        report = compare(exam.truth, exam.tolerance, call.out, call.lse, call.max_logits)
        worst = max(worst, report.max_abs)
        if not report.ok:
            return worst, Failure("wrong", f"{exam.name}: {report.sentence}")
    return worst, None


# ---------------------------------------------------------------------------------------------- timing


def sets_for(spec: KernelSpec, tokens: int) -> int:
    """Input sets so that a rotation gathers twice the L2 or more; 1 where one call does already."""
    return max(1, min(MAX_SETS, -(-ROTATION_BYTES // spec.gathered_bytes(tokens))))


def timer_for(spec: KernelSpec) -> Timer:
    """Decode: graph replays over rotating inputs. Prefill: event-timed calls, the L2 overwritten before each."""
    return CudaGraphTimer() if spec.phase == "decode" else CudaEventTimer()


@lru_cache(maxsize=1)
def timing_inputs(spec: KernelSpec, tokens: int) -> tuple[Inputs, ...]:
    return tuple(tuning_inputs(spec, tokens, "cuda", sets_for(spec, tokens)))


def finalist(candidate: Candidate, spec: KernelSpec, tokens: int) -> Finalist:
    """The candidate bound to every input set. Scratch is shared: calls of one stream do not overlap."""
    inputs = timing_inputs(spec, tokens)
    first = bind(candidate, inputs[0], spec.arch)
    bound = [first] + [
        Ready(build_call(**other.kwargs()), first.plan, first.modules, first.workspace) for other in inputs[1:]
    ]
    return Finalist(lambda index: bound[index].run(), len(bound))


def budget_for(tokens: int) -> Budget:
    return Budget(seconds=0.15, warmup_s=0.02, min_samples=5, max_samples=40)


# ---------------------------------------------------------------------------------------------- worker functions


@contextmanager
def gpu_lock() -> Iterator[None]:
    """Only one worker at a time uses the device (named by its UUID, so that masks of visible devices do not matter)."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    path = Path(os.environ.get("KGEN_LOCKS", tempfile.gettempdir())) / f"kgen-gpu-{uuid}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
            torch.cuda.synchronize()
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def resources_of(compiled: Any, num_warps: int) -> ResourceUse:
    """What the loaded kernel takes. Spills are counted in bytes of local memory per thread."""
    metadata = compiled.metadata
    registers = getattr(compiled, "n_regs", None) or 0
    spills = 4 * (getattr(compiled, "n_spills", None) or 0)
    tmem = int(getattr(metadata, "tmem_size", 0) or 0)
    return ResourceUse(
        metadata.shared, registers, spills, tmem, mma_of(compiled.asm["ptx"]), len(compiled.asm["cubin"]),
        all_warps(metadata, num_warps),
    )  # fmt: skip


def evaluate(job: TuneJob) -> Outcome:
    """Compile, check the limits, verify, time. What Triton or CUDA raises becomes a typed failure in the worker."""
    spec, candidate = job.spec, job.candidate
    arch = load_arch(spec.arch)
    with gpu_lock():
        inputs = timing_inputs(spec, job.tokens)
    compiled = bind(candidate, inputs[0], spec.arch).compile()
    use = resources_of(compiled, candidate.launch.num_warps)
    refused = limits_exceeded(use, arch, candidate.launch.num_warps)
    if refused is not None:
        return Outcome(failure=Failure("resource", refused), resources=use)
    with gpu_lock():
        worst, failure = verify_candidate(candidate, spec)
        if failure is not None:
            return Outcome(failure=failure, resources=use, max_error=worst)
        ready = finalist(candidate, spec, job.tokens)
        measurement = measure(ready.run, ready.sets, clock=timer_for(spec), budget=budget_for(job.tokens))
    shaky = unstable(measurement)
    if shaky is not None:
        return Outcome(failure=shaky, resources=resources_of(compiled, candidate.launch.num_warps), max_error=worst)
    return Outcome(
        measurement=measurement, resources=resources_of(compiled, candidate.launch.num_warps), max_error=worst
    )


def finals(jobs: Sequence[TuneJob], rounds: int) -> list[Outcome]:
    """Time verified candidates of one spec side by side."""
    spec, tokens = jobs[0].spec, jobs[0].tokens
    for job in jobs:
        bind(job.candidate, timing_inputs(spec, tokens)[0], spec.arch).compile()
    with gpu_lock():
        runners = {index: finalist(job.candidate, spec, job.tokens) for index, job in enumerate(jobs)}
        times = interleaved(runners, rounds, clock=timer_for(spec), budget=budget_for(tokens))
    return [Outcome(measurement=times[index]) for index in range(len(jobs))]

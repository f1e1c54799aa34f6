"""Compile probe: what a kernel takes on an arch, found by compiling it for real, with no GPU.

Compilation runs in child processes (`python -m kgen.compile_child`), because a C++ assertion of the compiler ends its process
and because `TRITON_INTERPRET=1` in ours would make `triton.compile` impossible. A child that dies costs the job it had.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from kgen.archs import ArchSpec
from kgen.render import module_name, render_module
from kgen.runtime.families import FAMILIES, attention_constants, part_type
from kgen.runtime.layouts import LAYOUTS
from kgen.types import Candidate, Failure, KernelSpec, ResourceUse

TIMEOUT_S = 180.0


@dataclass(frozen=True)
class ProbeJob:
    """One kernel to compile: a module's text is named by (family, layout, arch), its constants and launch options follow."""

    family: str
    layout: str | None
    chunk: int
    arch: str
    cc: int
    constants: tuple[tuple[str, int | bool], ...]
    num_warps: int
    num_stages: int
    maxnreg: int | None
    part: str = "fp32"  # type of the parts of a split

    @property
    def key(self) -> str:
        """Identity of the compile result: the module's text, every constant and option, the full cc and Triton's version."""
        return _job_key(self)

    @property
    def kernel(self) -> str:
        return {"combine": "combine_kernel"}.get(self.family, "attention_kernel")


@cache
def _text_digest(family: str, layout: str | None, arch: str, chunk: int) -> str:
    return hashlib.sha256(render_module(family, layout, arch, chunk).encode()).hexdigest()


@cache
def _job_key(job: ProbeJob) -> str:
    import triton

    facts = [
        _text_digest(job.family, job.layout, job.arch, job.chunk),
        job.cc,
        job.constants,
        job.num_warps,
        job.num_stages,
    ]
    facts += [job.maxnreg, job.part == "bf16", triton.__version__]
    if job.part == "fp16":  # so that other keys stay what they were
        facts.append(job.part)
    if job.family in FAMILIES and FAMILIES[job.family].ctas > 1:  # so that keys of other families stay what they were
        facts.append(FAMILIES[job.family].ctas)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def attention_job(spec: KernelSpec, candidate: Candidate, cc: int) -> ProbeJob:
    """The attention kernel that `candidate` means for `spec`, with the shape constants of its exact or generic form."""
    special = bool(candidate["specialise"])
    exact = {
        "heads": spec.heads if special else 0,
        "topk": spec.topk if special else 0,
        "extra_topk": spec.extra_topk if special else 0,
        "page": spec.page if special else 0,
        "extra_page": spec.extra_page if special else 0,
    }
    split = int(candidate["splits"] or 1) > 1
    tunables = dict(candidate.tunables)
    constants = attention_constants(FAMILIES[candidate.family], tunables, exact, spec.dual, split, upcast=False)
    launch = candidate.launch
    return ProbeJob(
        candidate.family, spec.layout, candidate.chunk, spec.arch, cc,
        tuple((name, value) for name, value in constants.items() if isinstance(value, (int, bool))),
        launch.num_warps, launch.num_stages, launch.maxnreg,
        part_type(FAMILIES[candidate.family], tunables) if split else "fp32",
    )  # fmt: skip


def combine_job(arch: str, cc: int, block_s: int, block_d: int, warps: int, part: str = "fp32") -> ProbeJob:
    constants = (("BLOCK_S", block_s), ("BLOCK_D", block_d), ("UPCAST", False))
    return ProbeJob("combine", None, 0, arch, cc, constants, warps, 2, None, part)


POINTERS = {
    "q": "*bf16", "indices": "*i32", "lengths": "*i32", "extra_indices": "*i32", "extra_lengths": "*i32", "sink": "*fp32",
    "out": "*bf16", "lse": "*fp32", "max_logits": "*fp32", "part_lse": "*fp32", "part_max": "*fp32", "counter": "*i32",
}  # fmt: skip
FLOATS = ("scale_log2", "lse_scale", "empty_lse")


def signature_of(
    job: ProbeJob, arg_names: list[str], unaligned: Iterable[str]
) -> tuple[dict[str, str], dict[Any, Any]]:
    """Types and alignment hints of a launch with contiguous, 16-byte aligned tensors, as Triton's launcher derives them."""
    constants = dict(job.constants)
    kv = "*bf16" if job.layout and not LAYOUTS[job.layout].fp8 else "*u8"
    types = POINTERS | {"kv": kv, "extra_kv": kv, "part_out": f"*{job.part}"}
    signature: dict[str, str] = {}
    attrs: dict[Any, Any] = {}
    skip = set(unaligned)
    for position, name in enumerate(arg_names):
        if name in constants or name.isupper() or name in ("lse_stride_h", "max_stride_h"):
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "fp32" if name in FLOATS else "i32")
        if name not in FLOATS and name not in skip:
            attrs[(position,)] = [["tt.divisibility", 16]]
    return signature, attrs


def limits_exceeded(use: ResourceUse, arch: ArchSpec, num_warps: int) -> str | None:
    """A sentence when the kernel cannot be loaded on the arch (compiling does not notice). `num_warps` as the launch asks for
    them; a warp-specialised kernel states itself how many it runs."""
    num_warps = use.warps or num_warps
    if use.shared > arch.smem_limit:
        return f"Needs {use.shared} B of shared memory; {arch.name} allows {arch.smem_limit} B per block."
    if use.registers * num_warps * 32 > arch.regs_per_sm:
        return f"Needs {use.registers} registers x {num_warps * 32} threads; {arch.name} has {arch.regs_per_sm} per SM."
    if use.tmem > arch.tmem_columns:
        return f"Needs {use.tmem} columns of tensor memory; {arch.name} has {arch.tmem_columns}."
    return None


class _Child:
    """A compile process: one JSON line in, one out."""

    def __init__(self) -> None:
        self.cache = tempfile.TemporaryDirectory(prefix="kgen-probe-")
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env["TRITON_CACHE_DIR"] = self.cache.name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kgen.compile_child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
            start_new_session=True,  # a terminal's Ctrl-C is ours to handle: a child that it ends looks like a crash
        )  # fmt: skip

    def run(self, job: ProbeJob) -> ResourceUse | Failure:
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            expired = not timer.is_alive()
            timer.cancel()
        if not line:
            code = self.process.wait()
            if expired:
                return Failure("timeout", f"The compiler took more than {TIMEOUT_S:.0f} s.")
            return Failure("crash", f"The compile process ended with code {code}: {self._last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            return Failure("compile", reply["error"])
        return ResourceUse(**reply)

    def _last_words(self) -> str:
        assert self.process.stderr is not None
        lines = [line.strip() for line in self.process.stderr.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.cache.cleanup()


def compile_all(
    jobs: Iterable[ProbeJob],
    workers: int | None = None,
    on_result: Callable[[ProbeJob, ResourceUse | Failure], None] | None = None,
) -> dict[ProbeJob, ResourceUse | Failure]:
    """Compile every job (each once) in `workers` processes (default: the cores). `on_result` is called as results come;
    on Ctrl-C what is being compiled is given up, without a result."""
    todo: queue.SimpleQueue[ProbeJob] = queue.SimpleQueue()
    unique = list(dict.fromkeys(jobs))
    for job in unique:
        todo.put(job)
    results: dict[ProbeJob, ResourceUse | Failure] = {}
    lock = threading.Lock()
    stop = threading.Event()
    children: list[_Child] = []

    def work() -> None:
        child: _Child | None = None
        try:
            while not stop.is_set():
                try:
                    job = todo.get_nowait()
                except queue.Empty:
                    return
                if child is None or not child.alive:
                    child = _Child()
                    children.append(child)
                result = child.run(job)
                with lock:
                    if stop.is_set() and isinstance(result, Failure):
                        return
                    results[job] = result
                    if on_result is not None:
                        on_result(job, result)
        finally:
            if child is not None:
                child.close()

    count = min(workers or os.cpu_count() or 1, len(unique))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        with lock:
            stop.set()
        for child in children:
            child.process.kill()
        for thread in threads:
            thread.join()
        raise
    return results


def describe_module(job: ProbeJob) -> str:
    """Readable name of a job, for messages."""
    constants = " ".join(f"{name.lower()}={int(value)}" for name, value in job.constants if name != "UPCAST")
    return f"{job.arch}/{module_name(job.family, job.layout, job.chunk)} {constants} warps={job.num_warps} stages={job.num_stages}"

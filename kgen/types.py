"""The data that flows through kgen: frozen, and dicts only at the YAML/JSON edge.

configs -> KernelSpec -> Candidate -> ResourceUse -> Measurement | Failure -> TuneRecord -> (kgen.emit) -> Entry
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kgen.runtime.layouts import LAYOUTS, KvLayout

TOKEN_BUCKETS = (1, 2, 4, 16, 64, 256, 1024, 4096)
"""A bucket b serves token counts up to b (the last one also everything above)."""

DECODE_MAX_TOKENS = 512

INPUTS_RECIPE = 2
"""The recipe of the inputs that timings are made with (kgen/check/tuning.py), stored with every new result. Raised when a
change of the inputs changes what is timed; `KernelSpec.inputs_since` says for which specs. A result that states none has 1.

1: bf16 rows come from one pool of 32,768 (an L2 holds most of it), fp8 rows from pools of 64 requests that no L2 holds.
2: decode over bf16 rows, too, has a pool of 64 requests, 32,768 rows each; everything else is as before.
"""

Scalar = int | float | str | bool | None


@dataclass(frozen=True)
class KernelSpec:
    """What must be computed, on which arch: the exact shape that a kernel is tuned for.

    `topk` and `extra_topk` are index widths; `page` and `extra_page` are tokens per page (0 for flat bf16 rows and for a
    missing extra cache); `tokens` is the bucket.
    """

    arch: str
    layout: str  # a key of kgen.runtime.layouts.LAYOUTS
    heads: int
    topk: int
    page: int
    tokens: int
    extra_topk: int = 0
    extra_page: int = 0

    @property
    def kv(self) -> KvLayout:
        return LAYOUTS[self.layout]

    @property
    def d_qk(self) -> int:
        return self.kv.d_qk

    @property
    def dual(self) -> bool:
        return self.extra_topk > 0

    @property
    def phase(self) -> str:
        """A name for buckets, not an argument: the host sees only tokens."""
        return "decode" if self.tokens <= DECODE_MAX_TOKENS else "prefill"

    @property
    def half(self) -> KernelSpec | None:
        """This shape with half of its tokens, where its bucket serves those as well. That count is no bucket: its times are
        second measurements, which say what serves the bucket's lower half, and tell apart what is even at its top (`kgen.ties`)."""
        smaller = max((bucket for bucket in TOKEN_BUCKETS if bucket < self.tokens), default=0)
        served = self.tokens in TOKEN_BUCKETS and smaller < self.tokens // 2
        return replace(self, tokens=self.tokens // 2) if served else None

    @property
    def inputs_since(self) -> int:
        """The first recipe of inputs whose timings of this spec may stand beside those of today's (see `INPUTS_RECIPE`)."""
        return 2 if self.phase == "decode" and not self.kv.paged else 1

    @property
    def slug(self) -> str:
        """Readable, unique name, e.g. `sm90-decode-v4-d512-h64-k128+512-p256+64-t16`."""
        extra_k = f"+{self.extra_topk}" if self.dual else ""
        extra_p = f"+{self.extra_page}" if self.dual else ""
        return (
            f"{self.arch}-{self.phase}-{self.layout}-d{self.d_qk}-h{self.heads}-k{self.topk}{extra_k}"
            f"-p{self.page}{extra_p}-t{self.tokens}"
        )

    @property
    def keys_per_token(self) -> int:
        return self.topk + self.extra_topk

    def flop(self, tokens: int | None = None) -> int:
        """2 * tokens * heads * keys * (d_qk + d_v), the formula of every number in this project."""
        return 2 * (tokens or self.tokens) * self.heads * self.keys_per_token * (self.d_qk + 512)

    def gathered_bytes(self, tokens: int | None = None) -> int:
        """Bytes of KV rows that a call gathers (without reuse)."""
        return (tokens or self.tokens) * self.keys_per_token * self.kv.token_bytes


@dataclass(frozen=True)
class LaunchOptions:
    """Compiler options of one launch: never mixed with kernel constants (they are not in a kernel's signature)."""

    num_warps: int
    num_stages: int
    maxnreg: int | None = None


@dataclass(frozen=True)
class Candidate:
    """One point of a search space: a family, the tunables of its template (sorted by name) and the launch options."""

    family: str
    tunables: tuple[tuple[str, Scalar], ...]
    launch: LaunchOptions

    @staticmethod
    def make(family: str, tunables: Mapping[str, Scalar], launch: LaunchOptions) -> Candidate:
        return Candidate(family, tuple(sorted(tunables.items())), launch)

    def __getitem__(self, name: str) -> Scalar:
        return dict(self.tunables)[name]

    @property
    def chunk(self) -> int:
        """Width of the slices of the head dimension, where that is a part of the module's text; else 0."""
        return int(dict(self.tunables).get("chunk") or 0)

    @property
    def slug(self) -> str:
        """e.g. `portable block_h=64 block_k=64 … warps=8 stages=2`."""
        parts = [self.family] + [f"{name}={_word(value)}" for name, value in self.tunables]
        parts += [f"warps={self.launch.num_warps}", f"stages={self.launch.num_stages}"]
        if self.launch.maxnreg is not None:
            parts.append(f"maxnreg={self.launch.maxnreg}")
        return " ".join(parts)


def _word(value: Scalar) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class ResourceUse:
    """What the compiled kernel takes, read from the compiler's own output, not from a formula.

    shared and tmem as Triton's metadata state them (bytes; tensor-memory columns); registers per thread; spills in bytes
    of local memory (stack frame); mma is the instruction family seen in the SASS: wgmma, tcgen05, mma.sync or none; warps that
    a program runs, where these are more than the launch asks for (the partitions of a warp-specialised kernel), else None.
    """

    shared: int
    registers: int
    spills: int
    tmem: int
    mma: str
    cubin_bytes: int
    warps: int | None = None


FailureKind = Literal["restricted", "compile", "resource", "timeout", "crash", "wrong", "unstable"]
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)


@dataclass(frozen=True)
class Failure:
    """Why a candidate is out. A failure is never a number: it cannot be compared with a measurement."""

    kind: FailureKind
    message: str  # one sentence


@dataclass(frozen=True)
class Measurement:
    """A time with what it takes to trust it: never a bare float."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    calls_per_sample: int
    method: str  # "cuda-graph" or "cpu" …
    input_sets: int
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None

    @property
    def spread(self) -> float:
        """(p90 - p10) / median: below it, a difference is noise."""
        return (self.p90_us - self.p10_us) / self.median_us


@dataclass(frozen=True)
class Environment:
    """Where a record was made. `hard` fields must match for a record to be used; `soft` ones mark it stale when they differ."""

    arch: str
    device_class: str  # a name of configs/archs/*.yaml, or "static"
    gpu: str
    cc: int  # full compute capability, e.g. 90, 120, 121
    sms: int
    driver: str
    triton: str
    torch: str
    python: str
    kgen: str

    HARD = ("arch", "cc")
    SOFT = ("driver", "triton", "torch", "kgen")


@dataclass(frozen=True)
class TuneRecord:
    """One line of configs/records/*.jsonl: a candidate of a spec, and what came of it.

    Exactly one of `measurement`, `failure`, `estimate_us` is set: measured, out, or ranked statically by the cost model.
    """

    spec: KernelSpec
    candidate: Candidate
    template_hash: str
    environment: Environment
    resources: ResourceUse | None = None
    measurement: Measurement | None = None
    failure: Failure | None = None
    estimate_us: float | None = None
    max_error: float | None = None
    considered: int | None = None  # static picks: how many candidates were compiled for this spec
    rejected: tuple[tuple[str, int], ...] = ()  # static picks: why the others fell, counted by kind
    inputs: int | None = None  # recipe of the timing inputs (`INPUTS_RECIPE`); None: before these had numbers, so 1

    @property
    def outdated(self) -> bool:
        """Whether it was timed on inputs whose times say nothing about those of today's recipe. What was found without
        timing (a compile error, a wrong result, an estimate) holds whatever the inputs of timings are."""
        timed = self.measurement is not None or (self.failure is not None and self.failure.kind == "unstable")
        return timed and (self.inputs or 1) < self.spec.inputs_since

    @property
    def status(self) -> str:
        if self.measurement is not None:
            return "measured"
        return "failed" if self.failure is not None else "static"

"""One valid value of every type, with any field changed on demand."""

from __future__ import annotations

from kgen.types import Candidate, Environment, Failure, KernelSpec, LaunchOptions, Measurement, ResourceUse, TuneRecord


def make_spec(**changes: object) -> KernelSpec:
    values = dict(arch="sm90", layout="v32", heads=16, topk=2048, page=64, tokens=16)
    return KernelSpec(**{**values, **changes})  # type: ignore[arg-type]


def make_candidate(family: str = "portable", warps: int = 4, stages: int = 2, **tunables: object) -> Candidate:
    return Candidate.make(family, tunables or {"block_k": 64}, LaunchOptions(warps, stages))  # type: ignore[arg-type]


def make_environment(**changes: object) -> Environment:
    values = dict(
        arch="sm90", device_class="h200", gpu="NVIDIA H200", cc=90, sms=132, driver="580.1",
        triton="3.6.0", torch="2.11.0", python="3.11.7", kgen="0.1.0",
    )  # fmt: skip
    return Environment(**{**values, **changes})  # type: ignore[arg-type]


def make_measurement(
    us: float = 50.0, spread: float = 0.01, method: str = "cuda-graph", samples: int = 20
) -> Measurement:
    half = us * spread / 2
    return Measurement(us, us - half, us + half, samples, 8, method, 4, 1980, 41)


def make_record(us: float | None = 50.0, **changes: object) -> TuneRecord:
    values: dict[str, object] = dict(
        spec=make_spec(),
        candidate=make_candidate(),
        template_hash="t0",
        environment=make_environment(),
        resources=ResourceUse(83968, 168, 0, 0, "wgmma", 40000),
        max_error=1.7e-3,
    )
    if us is not None:
        values["measurement"] = make_measurement(us)
    elif "failure" not in changes and "estimate_us" not in changes:
        values["failure"] = Failure("crash", "The worker died of SIGABRT.")
    return TuneRecord(**{**values, **changes})  # type: ignore[arg-type]

"""kgen tune: search on this machine's GPUs, or rank compiled candidates without one (--static)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from kgen.archs import ArchSpec, DeviceClass
from kgen.cli.common import FOUND, INTERRUPTED, Json, MachineError, arch_or_here, command, device_here, show
from kgen.cli.specs import choose_specs, spec_from_shape
from kgen.config import config_root
from kgen.errors import ConfigError
from kgen.jsonl import check_plain
from kgen.types import Environment, KernelSpec

if TYPE_CHECKING:
    from kgen.tune import TunePlan

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float:
    """ "90", "90s", "10m" or "1.5h" in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--budget {text!r} is no duration: write 90s, 10m or 1.5h.")
    return float(match[1]) * _UNITS[match[2]]


def shard_of(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise ConfigError(f"--shard {text!r} is not I/N with I from 0 to N-1, as in 0/4.")
    return int(match[1]), int(match[2])


@command("tune")
def tune_command(
    arch: Optional[str] = typer.Option(None, help="sm90, sm100, sm120 or sm121; default: this machine's GPU."),
    model: list[str] = typer.Option([], help="dsv32, glm5, dsv4 or dsv41; repeatable. Default: all."),
    spec: list[str] = typer.Option([], help="Only these specs: slugs, `*` matches anything; repeatable."),
    every: bool = typer.Option(False, "--all", help="All specs of the models, not only the anchors."),
    layout: Optional[str] = typer.Option(None, help="One shape instead: a KV layout, with the options that follow."),
    heads: int = typer.Option(0), topk: int = typer.Option(0), page: int = typer.Option(0), tokens: int = typer.Option(0),
    extra_topk: int = typer.Option(0), extra_page: int = typer.Option(0),
    budget: Optional[str] = typer.Option(None, help="Time for all specs together, such as 90s, 10m or 1.5h."),
    trials: Optional[int] = typer.Option(None, min=1, help="Candidates per spec, those of earlier runs included."),
    devices: str = typer.Option("0", help="CUDA devices, such as 0,1."),
    lanes: int = typer.Option(1, min=1, help="Workers per device: one measures while the others compile."),
    storage: Optional[str] = typer.Option(None, help="Optuna storage that runs share: journal:FILE, postgresql://… or grpc://…"),
    shard: Optional[str] = typer.Option(None, help="I/N: every N-th spec from the I-th, for N processes on one store."),
    static: bool = typer.Option(False, "--static", help="Without a GPU: compile candidates and rank them by the cost model."),
    stale: bool = typer.Option(False, "--stale", help="Measure again what other versions of Triton, torch or driver measured."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be done, and do nothing."),
    workers: Optional[int] = typer.Option(None, min=1, help="Compile processes of --static; default: the cores."),
    records: Optional[Path] = typer.Option(
        None, help="Record file, with --static compile results beside it; default: configs/records/<device class>.jsonl."),
    as_json: bool = Json,
) -> int:  # fmt: skip
    """Find the fastest verified kernel for each spec and record every outcome."""
    target = arch_or_here(arch)
    if layout is not None:
        specs = [spec_from_shape(target.name, layout, heads, topk, page, tokens, extra_topk, extra_page)]
    else:
        specs = choose_specs(target.name, model, spec, every or static)
    if shard is not None:
        first, step = shard_of(shard)
        specs = specs[first::step]
    if static:
        return _static(target, specs, records, workers, dry_run, as_json)
    seconds = seconds_of(budget) if budget is not None else None
    if seconds is None and trials is None and not dry_run:
        trials = 64
    return _measured(
        target, specs, records, seconds, trials, _devices(devices, lanes), storage, stale, dry_run, as_json
    )


def _devices(text: str, lanes: int) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"--devices {text!r} is no list of device numbers such as 0,1.")
    return [int(number) for number in text.split(",") for _ in range(lanes)]


def _store_path(records: Path | None, name: str) -> Path:
    path = records or config_root() / "records" / f"{name}.jsonl"
    check_plain(path)  # before anything is timed
    return path


def _static(
    arch: ArchSpec, specs: list[KernelSpec], records: Path | None, workers: int | None, dry_run: bool, as_json: bool
) -> int:
    from kgen.probe_records import ProbeStore
    from kgen.records import RecordStore
    from kgen.static_run import probe_store, run_static

    if dry_run:
        lines = [f"{len(specs)} specs would be ranked for {arch.name}:", *(f"  {spec.slug}" for spec in specs)]
        show({"specs": [spec.slug for spec in specs]}, lines, as_json)
        return 0
    store = RecordStore(_store_path(records, f"static-{arch.name}"))
    checked_in = probe_store(arch.name)
    probes = checked_in if records is None else ProbeStore(records.with_name(f"compile-{arch.name}.jsonl"))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    summary = run_static(arch, specs, store, workers, say, probes=probes, known=checked_in.load().results)
    show(summary, summary.lines(), as_json)
    return FOUND if summary.unserved else 0


def _measured(
    arch: ArchSpec, specs: list[KernelSpec], records: Path | None, seconds: float | None, trials: int | None,
    devices: list[int], storage: str | None, stale: bool, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    from kgen.environment import current_environment
    from kgen.progress import make_reporter
    from kgen.records import RecordStore
    from kgen.tune import TuneError, forecast, tune
    from kgen.worker import WorkerPool

    device: DeviceClass | None
    try:
        device = device_here(arch)
    except MachineError:
        if not dry_run:
            raise
        device = None  # a plan can be shown anywhere
    environment = current_environment(arch.name, device.name if device else "none")
    plan = make_plan(arch, device, specs, environment, seconds, trials, storage, stale)
    store = RecordStore(_store_path(records, environment.device_class))
    if dry_run:
        forecasts = forecast(plan, store)
        show(forecasts, (item.line() for item in forecasts), as_json)
        return 0
    pool = WorkerPool(devices, "kgen.evaluate:evaluate", timeout_s=120.0, finals="kgen.evaluate:finals")
    try:
        summary = tune(plan, pool, store, make_reporter(sys.stderr))
    except TuneError as error:
        show(error.summary, [f"kgen: {error}"], as_json)
        return FOUND
    finally:
        pool.close()
    show(summary, summary.lines(), as_json)
    return INTERRUPTED if summary.interrupted else summary.exit_code


def make_plan(
    arch: ArchSpec,
    device: DeviceClass | None,
    specs: list[KernelSpec],
    environment: Environment,
    seconds: float | None,
    trials: int | None,
    storage: str | None,
    stale: bool,
) -> TunePlan:
    """A TunePlan over every family's space, each search begun at `kgen.starts`."""
    from kgen.render import template_hash
    from kgen.search import SearchPart
    from kgen.space import spaces_of
    from kgen.starts import starting_points
    from kgen.tune import SpecPlan, TunePlan

    spaces = spaces_of(arch.name)
    plans = []
    for spec in specs:
        parts, first = [], []
        for space in spaces.values():
            feasible = tuple(space.feasible(spec, arch, device))
            if feasible:
                parts.append(SearchPart(space.axes, feasible))
                first += starting_points(spec, space, arch, device)
        plans.append(SpecPlan(spec, tuple(parts), first=tuple(first)))
    hashes = {family: template_hash(family) for family in spaces}
    return TunePlan(
        tuple(plans), environment, hashes, seconds=seconds, trials=trials, storage=storage, stale=stale, rounds=7
    )

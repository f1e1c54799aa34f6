"""kgen verify: the emitted kernels against the float64 reference, on a GPU or (a sample) in Triton's interpreter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Optional

import typer

from kgen.archs import ArchSpec
from kgen.build import ProbeJob
from kgen.cli.common import FOUND, INTERRUPTED, MACHINE, Json, MachineError, arch_or_here, command, local_gpu, show
from kgen.cli.verify_jobs import Ending, Shard, require_file, run_shards, summary_of
from kgen.errors import BuildError, ConfigError


@command("verify")
def verify_command(
    full: bool = typer.Option(False, "--full", help="The peers' whole matrices, thousands of cases, instead of the core."),
    budget: Optional[float] = typer.Option(None, "--budget", help="Seconds after which no case is started.", min=0.0),
    resume: Optional[Path] = typer.Option(None, "--resume", help="Results file; what it holds is not run again."),
    repeat: int = typer.Option(1, "--repeat", help="Run every case so often; all bits must agree.", min=1),
    jobs: int = typer.Option(1, "--jobs", help="Processes that share the GPU; each kernel is compiled by one.", min=1),
    shard: Optional[str] = typer.Option(None, "--shard", help="I/N: the I-th of N shares (from 0), for several machines."),
    compile_: bool = typer.Option(False, "--compile", help="Compile every kernel of an arch's table instead; no GPU."),
    arch: Optional[str] = typer.Option(None, "--arch", help="With --compile: sm90, sm100, sm120 or sm121."),
    as_json: bool = Json,
) -> int:  # fmt: skip
    """Check the kernels in generated/: results against a float64 reference, or with --compile that all still compile."""
    if compile_:
        return _compile(arch_or_here(arch), as_json)
    shards = _shards(jobs, shard)
    _require_machine(arch)
    suite = "full" if full else "core"
    file = resume or Path(".kgen") / f"verify-{suite}.jsonl"
    require_file(file)
    begin = time.monotonic()
    ending = run_shards(shards, ["--suite", suite, "--resume", str(file), "--repeat", str(repeat)], budget)
    return _report(suite, shards, file, ending, begin, budget, as_json)


def _shards(jobs: int, shard: str | None) -> list[Shard]:
    from kgen.verify_child import shard as parsed

    if shard is None:
        return [(part, jobs) for part in range(jobs)]
    if jobs > 1:
        raise ConfigError("--shard is one share for one process: leave out --jobs.")
    try:
        return [parsed(shard)]
    except ValueError:
        raise ConfigError(f"--shard {shard!r} is not I/N with I from 0 to N-1, as in 0/4.") from None


def _report(
    suite: str, shards: list[Shard], file: Path, ending: Ending, begin: float, budget: float | None, as_json: bool
) -> int:
    """Print the summary of a run over what its file holds, and say how it ended."""
    from kgen.verify_child import cases_of_shard
    from kgen.verify_forms import formed_cases

    device = "cpu" if local_gpu() is None else "cuda"
    alone = shards[0] if len(shards) == 1 else (0, 1)
    cases = formed_cases(suite, device) if alone == (0, 1) else cases_of_shard(suite, device, *alone, "generated")
    summary = summary_of(cases, file, device)
    summary.seconds = time.monotonic() - begin
    spent = [f"The budget of {budget:g} s is spent."] if budget is not None and budget < summary.seconds else []
    reasons = [*ending.early, *(["Interrupted."] if ending.interrupted else spent)]
    summary.stopped = " ".join(reasons) if summary.left else ""
    many = "processes" if len(shards) > 1 else "process"
    lines = [*summary.lines(), f"{len(shards)} {many}, {summary.seconds:.0f} s."]
    show(summary.to_json() | {"processes": len(shards)}, lines, as_json)
    if ending.interrupted:
        return INTERRUPTED
    if summary.failures:
        return FOUND
    if ending.early and summary.left:
        return MACHINE
    return 0 if summary.ok or summary.stopped else FOUND


def _require_machine(arch: str | None) -> None:
    from kgen.runtime.kernel import interpreting

    gpu = local_gpu()
    if gpu is None and not interpreting():
        raise MachineError(
            "No GPU is visible, so no kernel can run: set TRITON_INTERPRET=1 to run a sample in Triton's interpreter, or "
            "add --compile to check without a GPU that every kernel compiles."
        )
    if gpu is not None and arch is not None and arch != gpu[0]:
        raise MachineError(f"This GPU ({gpu[1]}) is {gpu[0]}, not {arch}: only --compile works for another arch.")


# ---------------------------------------------------------------------------------------------- --compile


def table_jobs(arch: ArchSpec, package: str = "generated") -> dict[ProbeJob, str]:
    """Every kernel that the table of `arch` points at, with the module's name: exact form where an entry has one, and
    always the generic form, which serves every other shape; keys whole and split, where other token counts than the tuned one
    ask for that (see `launch.make_plan`); every merge."""
    import importlib

    from kgen.build import attention_job
    from kgen.runtime.families import exact_sums, family_of
    from kgen.static import combine_jobs
    from kgen.types import Candidate, KernelSpec, LaunchOptions

    jobs: dict[ProbeJob, str] = {}
    for entry in importlib.import_module(f"{package}.{arch.name}.table").ENTRIES:
        config, paged = entry.config, entry.page or 64
        launch = LaunchOptions(config.num_warps, config.num_stages, config.maxnreg)
        family = family_of(entry.module, entry.layout)
        asked = {config.tunables, exact_sums(family, config.tunables)}  # calls without and with lse
        one_shape = entry.topk[0] == entry.topk[1] and entry.extra_topk[0] == entry.extra_topk[1]
        tokens = min(entry.tokens[1], 1 << 20)
        spec = KernelSpec(
            arch.name, entry.layout, entry.heads, entry.topk[1], paged, tokens,
            entry.extra_topk[1], (entry.extra_page or 64) if entry.dual else 0,
        )  # fmt: skip
        split = int(config.get("splits", 1)) > 1
        fewer_tokens = (entry.provenance.anchor_tokens or entry.tokens[1]) > 1  # than it was tuned for: they may split
        for special in {False, bool(config.get("specialise", False)) and one_shape}:
            for splits in {1, 2} if split or fewer_tokens else {1}:
                for tunables in asked:
                    form = {**dict(tunables), "specialise": special, "splits": splits}
                    jobs[attention_job(spec, Candidate.make(family.name, form, launch), arch.cc)] = entry.module
    return jobs | dict.fromkeys(combine_jobs(arch), "combine") if jobs else {}


def _compile(arch: ArchSpec, as_json: bool) -> int:
    from kgen.build import compile_all, describe_module, limits_exceeded
    from kgen.types import Failure

    jobs = table_jobs(arch)
    if not jobs:
        raise BuildError(f"The table of {arch.name} in generated/ is empty: tune for it, then run kgen emit.")
    failures: list[str] = []
    compiled = compile_all(jobs)
    for job, result in compiled.items():
        if isinstance(result, Failure):
            failures.append(f"{describe_module(job)}: {result.message}")
            continue
        refused = limits_exceeded(result, arch, job.num_warps)
        if refused is not None:
            failures.append(f"{describe_module(job)}: {refused}")
    verdict = f"{arch.name}: {len(compiled) - len(failures)} of {len(jobs)} kernels compile within its limits."
    show({"arch": arch.name, "kernels": len(jobs), "failures": failures}, [*failures, verdict], as_json)
    return FOUND if failures else 0

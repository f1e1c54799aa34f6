"""The compile probe as static ranking uses it: once per kernel, and a compiler that dies is a Failure (B35, B47)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kgen import build, static_run
from kgen.archs import load_arch
from kgen.build import ProbeJob, combine_job, compile_all
from kgen.config import template_root
from kgen.probe_records import ProbeStore
from kgen.records import RecordStore
from kgen.static_run import Prober, run_static
from kgen.types import Failure, KernelSpec, ResourceUse

JOB = combine_job("sm120", 120, 2, 128, 4)


def quiet(text: str) -> None:
    """Say nothing."""


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    store = ProbeStore(tmp_path / "compile.jsonl")
    first = Prober(store, 1, quiet)
    first.compile([JOB, JOB])
    first.compile([JOB])
    assert first.compiled == 1 and isinstance(first.results[JOB], ResourceUse)
    again = Prober(store, 1, quiet)
    again.compile([JOB])
    assert again.compiled == 0 and again.results == first.results
    assert len((tmp_path / "compile.jsonl").read_text().splitlines()) == 1


def broken_templates(folder: Path, line: str) -> Path:
    """The templates with a combine kernel that runs `line` when its module is loaded."""
    shutil.copytree(template_root(), folder)
    path = folder / "combine.py.jinja"
    path.write_text(path.read_text().replace("import triton\n", f"import triton\n{line}\n", 1))
    return folder


def compiled_with(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block_s: int) -> ResourceUse | Failure:
    monkeypatch.setenv("KGEN_TEMPLATES", str(folder))
    monkeypatch.setenv("KGEN_CACHE", str(tmp_path / "cache"))
    job = combine_job("sm120", 120, block_s, 128, 4)
    return compile_all([job], 1)[job]


def test_a_compiler_that_dies_is_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = broken_templates(tmp_path / "templates", "import os; os.abort()")
    result = compiled_with(folder, monkeypatch, tmp_path, 4)
    assert isinstance(result, Failure) and result.kind == "crash" and "code" in result.message


def test_a_compiler_that_hangs_is_a_timeout_and_the_next_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # the first process hangs and is killed; the second job gets a new one, whose module raises
    line = "import os, time; time.sleep(600) if not os.path.exists(MARK) and not open(MARK, 'w').close() else 1 / 0"
    folder = broken_templates(tmp_path / "templates", line.replace("MARK", repr(str(tmp_path / "mark"))))
    monkeypatch.setenv("KGEN_TEMPLATES", str(folder))
    monkeypatch.setenv("KGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "TIMEOUT_S", 10.0)
    jobs = [combine_job("sm120", 120, 2, 128, 4), combine_job("sm120", 120, 16, 128, 4)]
    results = compile_all(jobs, 1)
    kinds = [result.kind for job in jobs if isinstance(result := results[job], Failure)]
    assert kinds == ["timeout", "compile"]


def test_a_kernel_that_does_not_compile_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = broken_templates(tmp_path / "templates", 'raise ValueError("no such layout")')
    result = compiled_with(folder, monkeypatch, tmp_path, 8)
    assert isinstance(result, Failure) and result.kind == "compile" and "no such layout" in result.message


def specs() -> list[KernelSpec]:
    return [KernelSpec("sm120", "bf16_d512", heads, 512, 0, tokens) for heads in (16, 64) for tokens in (16, 4096)]


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fits: bool) -> tuple[list[ProbeJob], static_run.StaticSummary]:
    """A static run with a compiler that answers at once."""
    asked: list[ProbeJob] = []

    def fake(jobs: list[ProbeJob], workers: int | None, keep: object) -> dict[ProbeJob, ResourceUse | Failure]:
        asked.extend(jobs)
        results: dict[ProbeJob, ResourceUse | Failure] = {}
        for job in jobs:
            use = ResourceUse(60_000 if fits else 150_000, 128, 0, 0, "mma.sync", 1)
            # every other kernel fails, so that there is something to count
            results[job] = Failure("compile", "No.") if fits and job.num_warps == 16 else use
            keep(job, results[job])  # type: ignore[operator]
        return results

    monkeypatch.setattr(static_run, "compile_all", fake)
    probes, store = ProbeStore(tmp_path / "compile.jsonl"), RecordStore(tmp_path / "static.jsonl")
    return asked, run_static(load_arch("sm120"), specs(), store, 1, quiet, probes=probes)


def test_a_run_serves_every_spec_and_a_second_one_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, summary = run(monkeypatch, tmp_path, fits=True)
    assert summary.written == len(specs()) and not summary.unserved and len(asked) == len(set(asked)) > 0
    asked, summary = run(monkeypatch, tmp_path, fits=True)
    assert not asked and summary.written == 0 and summary.current == len(specs())


def test_a_kernel_over_the_limit_is_never_picked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, summary = run(monkeypatch, tmp_path, fits=False)
    assert summary.written == 0 and len(summary.unserved) == len(specs())
    assert summary.rejected.keys() == {"over limits"}
    assert any("no kernel fits" in line for line in summary.lines())


def test_what_is_known_elsewhere_is_not_compiled_and_not_written(tmp_path: Path) -> None:
    use = ResourceUse(2048, 72, 0, 0, "none", 1)
    prober = Prober(ProbeStore(tmp_path / "compile.jsonl"), 1, quiet, {JOB.key: use})
    prober.compile([JOB])
    assert prober.compiled == 0 and prober.results == {JOB: use} and not (tmp_path / "compile.jsonl").exists()

"""The run: right passes, wrong is seen, canaries, repeats, results files that survive any end of the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.check import CaseSpec, Inputs, make_case
from kgen.check.mutations import MUTATIONS, Mutation, Quirks
from kgen.verify import MAX_ATTEMPTS, read_results, sampled_rows, verify
from kgen.verify_cases import core_cases, verify_case
from kgen.verify_child import subject_of

from .attentions import Emulated, small_cases

CHILD = [sys.executable, "-m", "tests.verify.attentions"]


def test_right_emulation_passes_the_flat_core() -> None:
    cases = [c for c in core_cases("cpu") if c.spec.heads <= 16 and c.spec.scale_rule != "nan_scale"][:24]
    summary = verify(cases, Emulated(), "cpu")
    assert summary.ok, summary.lines()
    assert summary.to_json()["environment"]["gpu"] == "Triton interpreter"
    assert set(summary.worst()) <= {"bf16", "fp8", "fp8_rounded"}


@pytest.mark.parametrize("mutation", MUTATIONS[::3], ids=lambda m: m.name)
def test_mutated_attention_fails(mutation: Mutation) -> None:
    case = verify_case("core", mutation.spec)
    summary = verify([case], Emulated(mutation.quirks), "cpu")
    assert not summary.ok and [f.kind for f in summary.failures] == ["wrong"]
    assert case.slug in "\n".join(summary.lines())
    assert verify([case], Emulated(), "cpu").ok


def test_overwritten_canary_is_seen() -> None:
    good = Emulated()

    def attention(inputs: Inputs, **flags: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out = flags["out"]
        torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()
        return good(inputs, **flags)

    assert verify(small_cases(1), attention, "cpu").failures[0].kind == "canary"


def test_repeats_must_agree() -> None:
    good = Emulated()

    def attention(inputs: Inputs, **flags: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out, lse, top = good(inputs, **flags)
        if good.calls % 3 == 0:
            out[0, 0, 0] *= 1.01
        return out, lse, top

    assert verify(small_cases(1), attention, "cpu", repeat=3).failures[0].kind == "unstable"
    assert verify(small_cases(1), Emulated(), "cpu", repeat=3).ok


def test_out_must_be_written_in_place() -> None:
    good = Emulated()

    def attention(inputs: Inputs, **flags: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        flags.pop("out", None)
        return good(inputs, **flags)

    failure = verify(small_cases(1), attention, "cpu").failures[0]
    assert failure.kind == "wrong" and "passed as out" in failure.sentence
    own = verify_case("core", small_cases(1)[0].spec, "own")
    assert verify([own], attention, "cpu").ok and verify([own], Emulated(), "cpu").ok


@pytest.mark.parametrize("layout", ["bf16_d576", "v4"])
def test_facade_gives_plus_infinity_for_empty_rows(layout: str) -> None:
    case = verify_case("core", CaseSpec(layout=layout, heads=2, topk=20, tokens=6, index="some_empty"), "facade")
    assert dict(case.flags).get("return_max_logits", False) == (layout == "bf16_d576")
    assert verify([case], Emulated(), "cpu").ok
    good = Emulated()

    def native(inputs: Inputs, **flags: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return good(inputs, **{**flags, "facade": False})

    failure = verify([case], native, "cpu").failures[0]
    assert failure.kind == "wrong" and "lse" in failure.sentence


def test_rows_limit_still_compares_first_and_last() -> None:
    inputs = make_case(CaseSpec(heads=2, topk=20, tokens=90))
    rows = sampled_rows(inputs, 5)
    assert rows is not None and rows.tolist() == [0, 22, 44, 66, 89]
    assert sampled_rows(inputs) is None
    assert verify(small_cases(1), Emulated(), "cpu", rows_limit=1).ok


def test_results_of_other_kernels_are_not_taken(tmp_path: Path) -> None:
    file, broken = tmp_path / "r.jsonl", Emulated(Quirks(drop_key="last", ignore_sink=True))
    assert verify(small_cases(3), Emulated(), "cpu", resume_file=file, subject="one").ok
    assert not verify(small_cases(3), broken, "cpu", resume_file=file, subject="two").ok
    again = Emulated()
    assert verify(small_cases(3), again, "cpu", resume_file=file, subject="one").ok and again.calls == 0


def test_subject_changes_with_kernels_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "emitted_here"
    for name in ("__init__.py", "launch.py", "sm90/table.py", "sm120/table.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    here = {"arch": "sm90", "gpu": "G", "cc": 90, "driver": "1", "triton": "3.6.0", "torch": "2"}
    first = subject_of("emitted_here", here)
    (package / "sm120/table.py").write_text("# another arch")
    assert subject_of("emitted_here", here) == first
    assert subject_of("emitted_here", here | {"triton": "3.7.0"}) != first
    (package / "sm90/table.py").write_text("# retuned")
    assert subject_of("emitted_here", here) != first


def test_what_is_raised_is_a_failure_without_paths() -> None:
    def attention(inputs: Inputs, **flags: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        raise RuntimeError("no file /some/where/kernel.py")

    failure = verify(small_cases(1), attention, "cpu").failures[0]
    assert failure.kind == "error" and "/some" not in failure.sentence


def test_results_behind_the_first_case_that_is_left_count(tmp_path: Path) -> None:
    """Shards leave gaps: a summary of their joined files counts what each of them has."""
    cases, file = small_cases(5), tmp_path / "r.jsonl"
    attention = Emulated()
    verify([cases[1], cases[3]], attention, "cpu", resume_file=file)
    spent = verify(cases, attention, "cpu", resume_file=file, budget_s=-1.0)
    assert [result.slug for result in spent.results] == [cases[1].slug, cases[3].slug]
    assert spent.left == 3 and not spent.ok and "budget" in spent.stopped


def test_budget_leaves_cases_and_the_next_run_takes_them(tmp_path: Path) -> None:
    file, attention = tmp_path / "r.jsonl", Emulated()
    first = verify(small_cases(5), attention, "cpu", resume_file=file, budget_s=-1.0)
    assert first.left == 5 and not first.ok and "budget" in first.stopped
    assert verify(small_cases(5), attention, "cpu", resume_file=file).ok
    assert verify(small_cases(5), attention, "cpu", resume_file=file).ok
    assert attention.calls == 5


def test_killed_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    process = subprocess.Popen([*CHILD, str(file), ""])
    until = time.monotonic() + 30
    while len(read_results(file)[0]) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = read_results(file)[0]
    assert 3 <= len(before) < 10
    attention = Emulated()
    summary = verify(small_cases(10), attention, "cpu", resume_file=file)
    assert summary.ok and attention.calls == 10 - len(before)
    assert {**read_results(file)[0], **before} == read_results(file)[0]


def test_case_that_ends_its_process_is_a_crash(tmp_path: Path) -> None:
    file, deadly = tmp_path / "r.jsonl", small_cases(10)[4].slug
    codes = [subprocess.run([*CHILD, str(file), deadly]).returncode for _ in range(MAX_ATTEMPTS)]
    assert codes == [-signal.SIGKILL] * MAX_ATTEMPTS
    summary = verify(small_cases(10), Emulated(), "cpu", resume_file=file)
    assert [(f.slug, f.kind) for f in summary.failures] == [(deadly, "crash")] and summary.left == 0

"""Processes that share a results file: killed, poisoned, hanging or interrupted, nothing that they wrote is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kgen import jsonl
from kgen.cli import app, verify_jobs
from kgen.cli import verify as cli_verify
from kgen.cli.verify_jobs import CHILD, Ending, gpu_of, gpus_here, run_shards, summary_of, threads_each
from kgen.verify import CaseResult, environment_here, read_results, verify
from kgen.verify_cases import VerifyCase
from kgen.verify_child import REFUSED, subject_of
from kgen.verify_forms import formed_cases

from .attentions import small_cases
from .jobs_child import CASES

PAIR = [(0, 2), (1, 2)]


def subject() -> str:
    return subject_of("generated", environment_here("cpu"))


def fake(mode: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.verify.jobs_child", mode, str(folder)]


def line(file: Path) -> list[str]:
    return ["--device", "cpu", "--resume", str(file)]


def events(file: Path) -> Counter[tuple[str, str]]:
    values = [value for value, _ in jsonl.scan(file.read_bytes(), dict).values]
    return Counter((str(value["event"]), str(value["slug"])) for value in values)


def wait_for(true: Callable[[], Any], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    assert run_shards(PAIR, line(file), child=fake("kill", tmp_path)) == Ending()
    slugs = [case.slug for case in small_cases(CASES)]
    met, killed = events(file), slugs[3]  # the second case of shard 1
    assert met == Counter(
        {("started", slug): 1 for slug in slugs} | {("done", slug): 1 for slug in slugs} | {("started", killed): 2}
    )
    assert len(list(tmp_path.glob("pid-*"))) == 3
    summary = summary_of(small_cases(CASES), file, "cpu")
    assert summary.ok and len(summary.results) == CASES


def test_a_lost_context_costs_its_case_and_a_process(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    assert run_shards(PAIR, line(file), child=fake("context", tmp_path)) == Ending()
    summary = summary_of(small_cases(CASES), file, "cpu")
    assert [result.slug for result in summary.failures] == [small_cases(CASES)[3].slug] and summary.left == 0
    assert len(list(tmp_path.glob("pid-*"))) == 3 and set(events(file).values()) == {1}


def test_a_process_without_a_summary_is_told_and_leaves_its_cases(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    ending = run_shards(PAIR, line(file), child=fake("quit", tmp_path))
    assert ending.early == ["The process of shard 1/2 ended with code 3 before it had a summary."]
    assert summary_of(small_cases(CASES), file, "cpu").left == CASES // 2
    assert run_shards([(0, 1)], line(file), child=fake("", tmp_path)) == Ending()  # another number of processes goes on
    assert summary_of(small_cases(CASES), file, "cpu").ok and set(events(file).values()) == {1}


def test_a_process_that_dies_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_jobs, "MAX_STARTS", 3)
    child = [sys.executable, "-c", f"import os; open('{tmp_path}/n', 'a').write('x'); os.kill(os.getpid(), 9)"]
    ending = run_shards([(0, 1)], [], child=child)
    assert (tmp_path / "n").read_text() == "xxx"
    assert ending.early == ["The process of shard 0/1 was started 3 times and ended with code -9."]


def test_the_budget_ends_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_jobs, "LATE_S", 1.0)
    monkeypatch.setattr(verify_jobs, "STOP_S", 0.5)
    begin, file = time.monotonic(), tmp_path / "r.jsonl"
    ending = run_shards([(0, 1)], line(file), 20.0, child=fake("hang", tmp_path))
    assert ending.early == ["The process of shard 0/1 was in a case 1 s after the budget was spent."]
    assert 21.0 <= time.monotonic() - begin < 40.0
    assert list(events(file)) == [("started", small_cases(1)[0].slug)]


def test_a_spent_budget_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    assert run_shards(PAIR, line(file), 0.0, child=fake("kill", tmp_path)) == Ending()
    assert not file.exists() and len(list(tmp_path.glob("pid-*"))) == 2


_DRIVER = """
import sys
from pathlib import Path
from kgen.cli.verify_jobs import run_shards
folder = Path(sys.argv[1])
child = [sys.executable, "-m", "tests.verify.jobs_child", "slow", str(folder)]
ending = run_shards([(0, 2), (1, 2)], ["--device", "cpu", "--resume", str(folder / "r.jsonl")], child=child)
sys.exit(130 if ending.interrupted else 0)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_command(tmp_path: Path, sign: signal.Signals) -> None:
    """Ctrl-C or SIGTERM three times over: what is done stays, and the cases that were running are not taken to be deadly. SIGKILL
    of the command ends its processes as well."""
    file = tmp_path / "r.jsonl"
    rounds = 1 if sign == signal.SIGKILL else 3
    for index in range(1, rounds + 1):
        before = len(read_results(file, subject())[0])
        driver = subprocess.Popen([sys.executable, "-c", _DRIVER, str(tmp_path)])
        wait_for(lambda before=before: len(read_results(file, subject())[0]) >= before + 2)
        wait_for(lambda index=index: len(list(tmp_path.glob("pid-*"))) == 2 * index)
        driver.send_signal(sign)
        assert driver.wait(timeout=30) == (-signal.SIGKILL if sign == signal.SIGKILL else 130)
    pids = [int(path.name.split("-")[1]) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2 * rounds
    wait_for(lambda: not any(_alive(pid) for pid in pids), 10.0)
    done, attempts = read_results(file, subject())
    assert 2 * rounds <= len(done) < CASES and all(result.ok for result in done.values())
    if sign != signal.SIGKILL:
        assert all(count == (slug in done) for slug, count in attempts.items())
    assert run_shards(PAIR, line(file), child=fake("", tmp_path)) == Ending()
    assert summary_of(small_cases(CASES), file, "cpu").ok
    assert all(count == 1 for (event, _), count in events(file).items() if event == "done")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_an_interrupted_case_is_withdrawn(tmp_path: Path) -> None:
    file, case = tmp_path / "r.jsonl", small_cases(1)

    def attention(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            verify(case, attention, "cpu", resume_file=file)
    assert read_results(file) == ({}, {case[0].slug: 0})


def test_the_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_each(1) == {} and threads_each(5) == {"OMP_NUM_THREADS": "3"}
    assert threads_each(17) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads_each(5) == {}


def with_gpus(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(kinds))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: kinds[number])


def test_shards_are_dealt_out_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several like GPUs gets every so-manieth shard; with one, or none, the caller's choice stays."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7,GPU-1")
    with_gpus(monkeypatch, "H200", "H200", "H200")
    assert gpus_here() == ["5", "7", "GPU-1"]
    dealt = [gpu_of((part, 7), gpus_here()).get("CUDA_VISIBLE_DEVICES") for part in range(7)]
    assert dealt == ["5", "7", "GPU-1", "5", "7", "GPU-1", "5"]
    assert gpu_of((1, 2), ["0"]) == gpu_of((1, 2), []) == {}
    with_gpus(monkeypatch, "H200", "T400", "H200")  # results of another kind would count for nothing
    assert gpus_here() == ["5", "GPU-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with_gpus(monkeypatch)
    assert gpus_here() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with_gpus(monkeypatch, "H200", "H200")
    assert gpus_here() == ["0", "1"]


def test_a_process_sees_the_gpu_of_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with_gpus(monkeypatch, "H200", "H200")
    child = tmp_path / "child.py"
    child.write_text(
        "import os, sys\n"
        "part = sys.argv[sys.argv.index('--shard') + 1].split('/')[0]\n"
        f"open(r'{tmp_path}/gpu' + part, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{}')\n"
    )
    run_shards([(part, 3) for part in range(3)], [], child=(sys.executable, str(child)))
    assert [(tmp_path / f"gpu{part}").read_text() for part in range(3)] == ["3", "4", "3"]
    run_shards([(1, 3)], [], child=(sys.executable, str(child)))  # one share for one machine: as the caller has it
    assert (tmp_path / "gpu1").read_text() == "3,4"


def test_two_processes_of_the_real_child_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = tmp_path / "r.jsonl"
    line = ["--suite", "core", "--device", "cpu", "--resume", str(file), "--rows", "1", "--limit", "1"]
    assert run_shards([(0, 60), (1, 60)], line, child=CHILD) == Ending()
    summary = summary_of(formed_cases("core", "cpu"), file, "cpu")
    assert len(summary.results) == 2 and not summary.failures and summary.left == summary.planned - 2


# ---------------------------------------------------------------------------------------------- the command


def fill(file: Path, cases: list[VerifyCase], failed: int = 0) -> None:
    """Results of all cases, the first `failed` of them wrong."""
    for at, case in enumerate(cases):
        found = CaseResult(
            case.slug, case.suite, at >= failed, "" if at >= failed else "wrong", "As told.", "bf16", 0.1
        )
        jsonl.append_lines(file, [found.line(subject())])


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[VerifyCase]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return formed_cases("core", "cpu")


@pytest.mark.parametrize(
    ("left", "failed", "ending", "budget", "code", "words"),
    [
        (0, 0, Ending(), None, 0, ""),
        (0, 2, Ending(), None, 1, ""),
        (3, 0, Ending(), 0.0, 0, "The budget of 0 s is spent."),
        (3, 0, Ending(), None, 1, ""),
        (3, 0, Ending(early=["The process of shard 1/2 is gone."]), None, 3, "The process of shard 1/2 is gone."),
        (3, 1, Ending(early=["The process of shard 1/2 is gone."]), None, 1, "The process of shard 1/2 is gone."),
        (3, 1, Ending(interrupted=True), 0.0, 130, "Interrupted."),
    ],
)  # fmt: skip
def test_the_command_prints_one_summary(
    left: int, failed: int, ending: Ending, budget: float | None, code: int, words: str,
    cases: list[VerifyCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file, asked = tmp_path / "r.jsonl", []

    def run(*args: Any) -> Ending:
        asked.append(args)
        fill(file, cases[left:], failed)
        time.sleep(0.2)
        return ending

    monkeypatch.setattr(cli_verify, "run_shards", run)
    more = [] if budget is None else ["--budget", str(budget)]
    result = CliRunner().invoke(app, ["verify", "--jobs", "2", "--resume", str(file), "--json", *more])
    found = json.loads(result.stdout)
    assert result.exit_code == code
    assert (found["planned"], found["done"], found["stopped"]) == (len(cases), len(cases) - left, words)
    assert found["processes"] == 2 and 0.2 <= found["seconds"] < 30 and len(found["failures"]) == failed
    assert asked == [(PAIR, ["--suite", "core", "--resume", str(file), "--repeat", "1"], budget)]


def test_the_command_says_how_many_processes_took_how_long(
    cases: list[VerifyCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "r.jsonl", cases)
    monkeypatch.setattr(cli_verify, "run_shards", lambda *_: Ending())
    result = CliRunner().invoke(app, ["verify", "--jobs", "3", "--resume", str(tmp_path / "r.jsonl")])
    passed, processes = result.stdout.splitlines()[-2:]
    assert passed == f"All {len(cases)} cases passed." and re.fullmatch(r"3 processes, \d+ s\.", processes)
    result = CliRunner().invoke(app, ["verify", "--shard", "1/3", "--resume", str(tmp_path / "r.jsonl"), "--json"])
    found = json.loads(result.stdout)
    assert found["processes"] == 1 and 20 < found["planned"] == found["done"] < len(cases) / 2


@pytest.mark.parametrize(
    ("args", "words"),
    [(("--shard", "4/4"), "from 0 to N-1"), (("--shard", "0/2", "--jobs", "2"), "leave out --jobs")],
)
def test_mistakes_are_sentences(args: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, ["verify", *args])
    assert (result.exit_code, words in result.output) == (2, True)


def test_a_results_file_that_cannot_be_kept_is_told_before_any_process(
    cases: list[VerifyCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> Ending:
        raise AssertionError("no process may start")

    monkeypatch.setattr(cli_verify, "run_shards", run)
    (tmp_path / "file").touch()
    for place, words in ((tmp_path, "is no file"), (tmp_path / "file" / "r.jsonl", "")):
        result = CliRunner().invoke(app, ["verify", "--resume", str(place)])
        assert result.exit_code == 2 and words in result.output and result.output.startswith("kgen: ")


def test_a_process_whose_file_fails_says_so_in_a_sentence(tmp_path: Path) -> None:
    told = subprocess.run([*fake("", tmp_path), *line(tmp_path), "--shard", "0/2"], capture_output=True, text=True)
    assert (
        told.returncode == REFUSED
        and told.stderr == f"kgen.verify_child: {tmp_path.name} cannot be read: Is a directory.\n"
    )


@pytest.mark.parametrize(
    "odd",
    [
        {"suite": None},  # no such key
        {"newer": 1},
        {"worst": {"out": {"max_abs": 0.0}}},
        {"worst": [1]},
        {"ok": "yes"},
        {"slug": 3},
    ],
)  # fmt: skip
def test_a_whole_line_that_is_no_result_leaves_its_case_to_run(odd: dict[str, Any], tmp_path: Path) -> None:
    file, case = tmp_path / "r.jsonl", small_cases(1)[0]
    value = {"event": "done", "subject": subject(), "slug": case.slug, "suite": case.suite, "ok": True, "kind": "",
             "sentence": "", "tolerance": "fp8", "seconds": 1, "worst": {}}  # fmt: skip
    jsonl.append_lines(file, [jsonl.seal(value)])
    assert summary_of([case], file, "cpu").ok
    file.unlink()
    told = {key: x for key, x in (value | odd).items() if x is not None}
    jsonl.append_lines(file, [jsonl.seal(told), "no line at all"])
    summary = summary_of([case], file, "cpu")
    assert summary.left == 1 and summary.lines() and summary.to_json()

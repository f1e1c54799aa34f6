"""Runs that are killed, interrupted or shared: no point is measured twice and none is lost (decision 23, B71)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kgen.ledger import Claims
from kgen.measure import is_interleaved
from kgen.progress import PlainReporter
from kgen.records import RecordStore
from kgen.tune import tune
from kgen.worker import WorkerPool

from . import fakes
from .test_tune import names, plan, screening


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "h200.jsonl")


DRIVER = """
import sys
from {package}.test_resume import driver
sys.exit(driver(sys.argv[1], int(sys.argv[2])))
"""


def driver(path: str, workers: int) -> int:
    """What the subprocesses of the next tests run."""
    with WorkerPool(["cpu"] * workers, f"{fakes.__name__}:evaluate", timeout_s=30) as pool:
        summary = tune(plan(rounds=1), pool, RecordStore(path), PlainReporter(every_s=0.0))
    print(summary.to_json())
    return summary.exit_code


def start(store: RecordStore, log: Path, sleep: float, workers: int = 1) -> subprocess.Popen[str]:
    env = {**os.environ, "KGEN_TEST_LOG": str(log), "KGEN_TEST_SLEEP": str(sleep)}
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    code = DRIVER.format(package=fakes.__name__.rpartition(".")[0])
    command = [sys.executable, "-c", code, str(store.path), str(workers)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(count: int, log: Path) -> None:
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        time.sleep(0.01)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_a_random_trial_and_run_again(store: RecordStore, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    log = tmp_path / "log"
    process = start(store, log, 0.05)
    wait_for(rng.randint(1, 12), log)
    time.sleep(rng.random() * 0.06)
    process.kill()
    process.communicate()
    recorded = set(names(screening(store)))
    first_log = log.read_text().splitlines()
    log.write_text("")
    process = start(store, log, 0.0)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    again = log.read_text().splitlines()
    assert len(screening(store)) == 12 == len(set(names(screening(store))))  # none twice, none lost
    assert recorded <= set(names(screening(store)))
    assert json.loads(out)["specs"][0]["known"] == len(recorded)
    # only what was in flight is tried again; the finalists follow once more
    top = [name for name in again if "-t16 " in name]
    assert len(set(first_log)) - len(recorded) <= 1 and len(top) <= 12 - len(recorded) + 4
    assert len(again) - len(top) == 3  # finalists that are near the winner, once more with half of the tokens


def test_ctrl_c_keeps_everything_and_resumes(store: RecordStore, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(store, log, 0.1, workers=2)
    wait_for(5, log)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    summary = json.loads(out)
    assert summary["interrupted"] and summary["exit_code"] == 130
    assert summary["tried"] == len(screening(store)) >= 4 and "Stopping" in err
    assert "KeyboardInterrupt" not in err and "noise" not in err  # workers write elsewhere
    out, _ = start(store, log, 0.0).communicate(timeout=60)
    assert json.loads(out)["specs"][0]["known"] == summary["tried"]
    assert len(screening(store)) == 12 == len(set(names(screening(store))))


def test_ctrl_c_does_not_wait_for_a_hanging_candidate(store: RecordStore, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(store, log, 25.0)
    wait_for(1, log)
    before = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - before < 10
    assert screening(store) == []


def test_two_processes_share_the_points(store: RecordStore, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(store, log, 0.1) for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert len(screening(store)) == 12 == len(set(names(screening(store))))  # B71
    finals = [r for r in store.load().records if r.measurement and is_interleaved(r.measurement)]
    assert sorted(r.spec.tokens for r in finals) == [8] * 3 + [16] * 4
    assert log.read_bytes().count(b"\n") == 12 + 4 + 3


def test_claims_are_exclusive_between_processes_and_end_with_them(store: RecordStore) -> None:
    claims = Claims(store)
    assert claims.take("a") and claims.take("b")
    code = (
        "import sys; from kgen.ledger import *; c = Claims(RecordStore(sys.argv[1])); print(c.take('a'), c.take('c'))"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}

    def other() -> str:
        command = [sys.executable, "-c", code, str(store.path)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    assert other() == "False True"
    claims.free("a")
    assert other() == "True True"  # and 'c' was freed by the end of the first process
    claims.close()

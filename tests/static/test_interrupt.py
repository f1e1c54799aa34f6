"""Ctrl-C in the middle of a real `kgen tune --static`: the compile processes get the signal as well, as from a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from kgen.config import config_root
from kgen.probe_records import ProbeStore
from kgen.records import RecordStore
from kgen.types import ResourceUse

SPEC = "--arch sm120 --layout bf16_d512 --heads 16 --topk 512 --tokens 16".split()
CUT = {
    "block_h": "[16]", "block_k": "[16, 32]", "chunk": "[256]", "prefetch": "[true]", "splits": "[1]",
    "specialise": "[false]", "num_warps": "[4]", "num_stages": "[1, 2]", "maxnreg": "[null]",
}  # fmt: skip
"""Values that are left of the axes: four kernels, beside those that merge parts."""


def small_configs(folder: Path) -> Path:
    """The configuration without records and with a small space."""
    shutil.copytree(config_root(), folder, ignore=shutil.ignore_patterns("records", "sm90_*"))
    (folder / "records").mkdir()
    path = folder / "spaces" / "portable.yaml"
    text = path.read_text()
    for name, values in CUT.items():
        text, count = re.subn(rf"^(  {name}: .*values: )\[.*\]", rf"\g<1>{values}", text, flags=re.MULTILINE)
        assert count == 1, name
    path.write_text(text)
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"KGEN_CONFIGS": str(folder), "KGEN_CACHE": str(folder.parent / "cache")}
    command = [sys.executable, "-m", "kgen", "tune", "--static", *SPEC, "--workers", "2", "--json"]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_ctrl_c_keeps_what_is_compiled_and_a_second_run_compiles_the_rest_once(tmp_path: Path) -> None:
    folder = small_configs(tmp_path / "configs")
    file = folder / "records" / "compile-sm120.jsonl"
    process = start(folder)
    end = time.monotonic() + 120
    while not file.exists() or file.read_bytes().count(b"\n") < 1:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    time.sleep(0.3)  # two more are being compiled
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out) == {"error": "Interrupted.", "exit_code": 130}
    assert "Traceback" not in err and "KeyboardInterrupt" not in err, err

    before = ProbeStore(file).load()
    assert not before.set_aside and before.results
    assert all(isinstance(result, ResourceUse) for result in before.results.values()), "a killed compiler is no result"

    process = start(folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    summary = json.loads(out)
    after = ProbeStore(file).load()
    keys = Counter(json.loads(line)[1] for line in file.read_text().splitlines())
    assert max(keys.values()) == 1, "a kernel was compiled twice"
    assert before.results.items() <= after.results.items()
    assert summary["compiled"] == len(after.results) - len(before.results) > 0
    assert summary["written"] == 1 and len(RecordStore(folder / "records" / "static-sm120.jsonl").load().records) == 1

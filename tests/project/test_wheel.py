"""B67 (huggingface/kernels#754, pytorch/ao#280): the wheel carries the emitted kernels, which need torch and triton alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kgen.demo import isolated_prelude, isolated_python

ROOT = Path(__file__).resolve().parents[2]
TUNING = ("jinja2", "yaml", "optuna", "typer", "rich")

SCRIPT = """
import importlib.util, json, sys
sys.path.insert(0, sys.argv[1])
import torch
from generated.dispatch import Shape, explain, sparse_mla
import generated
entry = explain(Shape("v32", 128, 2048, 64, 1), arch="sm90", device_class="h200").entry
q = torch.randn(1, 2, 512, dtype=torch.bfloat16)
kv = torch.randn(8, 512, dtype=torch.bfloat16)
indices = torch.tensor([[3, -1, 3, 5]], dtype=torch.int32)
out = sparse_mla(q, kv, indices, sm_scale=0.05, kv_layout="bf16")
x = (q[0].double() @ kv[[3, 3, 5]].double().T) * 0.05
truth = torch.softmax(x, -1) @ kv[[3, 3, 5]].double()
print(json.dumps({
    "file": generated.__file__,
    "source": entry.provenance.source,
    "error": float((out[0].double() - truth).abs().max()),
    "loaded": [name for name in sys.modules if name.split(".")[0] == "kgen"],
    "found": [name for name in sys.argv[2].split(",") if importlib.util.find_spec(name)],
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, unpacked as an installer would."""
    pytest.importorskip("hatchling", reason="the build back end comes with the dev extra: make test installs it")
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=120)
    [archive] = folder.glob("kgen-*.whl")
    zipfile.ZipFile(archive).extractall(folder / "site")
    return folder / "site"


def test_the_emitted_kernels_run_from_the_wheel_without_the_tuning_parts(wheel: Path, tmp_path: Path) -> None:
    command = [*isolated_python(tmp_path), "-W", "ignore", "-c", isolated_prelude(tmp_path) + SCRIPT]
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(tmp_path),
        "TRITON_INTERPRET": "1",
        "KGEN_ARCH": "sm90",
    }
    done = subprocess.run(
        [*command, str(wheel), ",".join(TUNING)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(wheel)
    assert found["found"] == [], "the process could import tuning parts, so that it proves nothing"
    assert found["loaded"] == [], "the emitted package imported kgen"
    assert found["source"] == "measured"
    assert found["error"] < 0.03  # bf16 rounding of P and of an output of magnitude 4


@pytest.mark.parametrize("folder", ["templates", "configs"])
def test_the_wheel_carries_what_the_checkout_has(wheel: Path, folder: str) -> None:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split() if (ROOT / name).is_file() and "/archive/" not in name]
    assert len(names) > 3
    assert not (
        wheel / "kgen" / "_data" / folder / "records" / "archive"
    ).exists()  # records that count for nothing stay behind
    for name in names:
        assert (wheel / "kgen" / "_data" / name).read_bytes() == (ROOT / name).read_bytes(), name


def test_kgen_of_the_wheel_reads_its_own_data(wheel: Path, tmp_path: Path) -> None:
    code = "from kgen.config import config_root, template_root; print(config_root()); print(template_root())"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KGEN_")} | {"PYTHONPATH": str(wheel)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(wheel / "kgen" / "_data" / name) for name in ("configs", "templates")], (
        done.stderr
    )
    listed = subprocess.run(
        [sys.executable, "-m", "kgen", "list", "--arch", "sm120", "--model", "glm5", "--json"],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)["specs"]

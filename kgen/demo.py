"""The main job, end to end, on any machine: `make demo`.

1. tune: on this machine's GPU if it is one that kgen knows, else rank compiled candidates (--static);
2. emit a package into a temporary folder, from the checked-in records and what step 1 added;
3. import it in a process that can see torch, triton and numpy and nothing else, and run every layout there;
4. compare what it computed with the float64 reference.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kgen.errors import KgenError

ALLOWED = (
    "torch", "torchgen", "functorch", "triton", "numpy", "numpy.libs", "typing_extensions", "sympy", "mpmath", "filelock",
    "fsspec", "networkx", "nvidia", "cuda", "cuda_bindings",
)  # fmt: skip
"""What the process of step 3 may import: torch, triton, numpy and torch's own requirements (jinja2 left out)."""

RUNNER = """
import importlib, sys, torch
sys.path.insert(0, sys.argv[1])
for name in ("kgen", "jinja2", "yaml", "optuna", "typer", "rich"):
    if importlib.util.find_spec(name) is not None:
        sys.exit(f"{name} can be imported here, but the emitted package must do without it")
from demo_kernels.dispatch import sparse_mla, explain
cases = torch.load(sys.argv[2])
results = {}
for name, kwargs in cases.items():
    kwargs = {k: v.to(sys.argv[4]) if torch.is_tensor(v) else v for k, v in kwargs.items()}
    results[name] = [x.cpu() for x in sparse_mla(**kwargs, return_lse=True, return_max_logits=True)]
torch.save(results, sys.argv[3])
"""


def main() -> int:
    start = time.monotonic()
    from kgen.cli.common import local_gpu

    gpu = local_gpu()
    arch = gpu[0] if gpu else "sm90"
    say(f"GPU: {gpu[1]} ({arch})" if gpu else f"No GPU: kernels are ranked for {arch} and run in Triton's interpreter.")
    with tempfile.TemporaryDirectory(prefix="kgen-demo-") as folder:
        root = Path(folder)
        tune(arch, root, measured=gpu is not None)
        emit(root)
        failed = run_everywhere(root, arch, "cuda" if gpu else "cpu")
    say(f"{'FAILED' if failed else 'Done'} in {time.monotonic() - start:.0f} s.")
    return 1 if failed else 0


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def tune(arch: str, root: Path, measured: bool) -> None:
    """Step 1, on one spec with a small budget, into a record file of its own."""
    how = ["--budget", "60s", "--trials", "12"] if measured else ["--static"]
    shape = "--layout v32 --heads 16 --topk 2048 --page 64 --tokens 16".split()
    command = [
        sys.executable,
        "-m",
        "kgen",
        "tune",
        "--arch",
        arch,
        *shape,
        *how,
        "--records",
        str(root / "demo.jsonl"),
    ]
    say("kgen " + " ".join(command[3:-2]))
    if subprocess.run(command).returncode:
        raise KgenError("The demo's tuning run failed; its message is above.")


def emit(root: Path) -> None:
    """Step 2: the checked-in records and the demo's."""
    from kgen import emit as emission
    from kgen.records import load_records

    records, _ = emission.read_records()
    fresh, _ = load_records(root / "demo.jsonl")
    package = emission.build([*records, *fresh], "demo_kernels")
    changed = emission.write(package, root / "demo_kernels")
    entries = {arch: len(table) for arch, table in package.tables.items()}
    say(f"emitted {len(changed)} files; entries by arch: {entries}")


def run_everywhere(root: Path, arch: str, device: str) -> bool:
    """Steps 3 and 4; whether any layout failed."""
    import torch

    from kgen.check import CaseSpec, attention_reference, compare, make_case, tolerance_for
    from kgen.runtime.layouts import DUAL_LAYOUTS, LAYOUTS

    cases = {}
    for name, layout in LAYOUTS.items():
        page = 64 if layout.paged else 0
        cases[name] = CaseSpec(layout=name, heads=8, topk=64, page=page, tokens=3)
        if name in DUAL_LAYOUTS:
            more = {"extra_topk": 48, "extra_page": 2, "extra_slots": 64}
            cases[f"{name} + extra cache"] = CaseSpec(layout=name, heads=8, topk=64, page=page, tokens=3, **more)  # type: ignore[arg-type]
    inputs = {name: make_case(case) for name, case in cases.items()}
    torch.save({name: value.kwargs() for name, value in inputs.items()}, root / "inputs.pt")
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(root), "KGEN_ARCH": arch}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    python = isolated_python(root)
    files = [str(root), str(root / "inputs.pt"), str(root / "outputs.pt"), device]
    say("running every layout with torch, triton and numpy alone")
    done = subprocess.run([*python, "-W", "ignore", "-c", isolated_prelude(root) + RUNNER, *files], env=environment)
    if done.returncode:
        return True
    results = torch.load(root / "outputs.pt")
    failed = False
    for name, case in cases.items():
        report = compare(attention_reference(inputs[name]), tolerance_for(case), *results[name])
        say(f"  {name:24s} {'ok  ' if report.ok else 'FAIL'} worst error {report.max_abs:.1e}")
        if not report.ok:
            say(f"    {report.sentence}")
        failed |= not report.ok
    return failed


def isolated_python(root: Path) -> list[str]:
    """A Python without site-packages; `isolated_prelude` gives it the allowed ones."""
    site = root / "site"
    site.mkdir(exist_ok=True)
    for name in ALLOWED:
        spec = importlib.util.find_spec(name) if "." not in name else None
        origin = (
            spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else spec and spec.origin
        )
        if origin:
            path = Path(origin)
        else:
            numpy = importlib.util.find_spec("numpy")
            path = Path(str(numpy.origin)).parent.parent / name if numpy else Path(name)
        if path.exists() and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return [sys.executable, "-I", "-S"]


def isolated_prelude(root: Path) -> str:
    """Code that puts the folder of `isolated_python` on the path of a process started with it."""
    return f"import sys; sys.path.append({str(root / 'site')!r})\n"


if __name__ == "__main__":
    sys.exit(main())

"""What kgen doctor looks at."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from kgen.archs import all_archs, load_arch, match_device
from kgen.config import config_root
from kgen.emit import template_hashes
from kgen.environment import current_environment, overrides, recording_refusals
from kgen.records import RecordStore, record_status

PACKAGES = ("kgen", "torch", "triton", "jinja2", "optuna", "pyyaml", "typer", "rich")


def examine(gpu: tuple[str, str] | None) -> tuple[list[str], dict[str, str]]:
    """(what is wrong, each a sentence; what was found)."""
    facts = {"python": platform.python_version()}
    findings: list[str] = []
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["ptxas"] = _ptxas()
    if facts["ptxas"] == "not found":
        findings.append("ptxas is neither in the triton package nor on the PATH: kernels cannot be compiled.")
    facts["gpu"] = "none visible: kgen tune needs --static here" if gpu is None else f"{gpu[1]} ({gpu[0]})"
    arch = device = None
    if gpu is not None:
        if gpu[0] not in all_archs():
            findings.append(
                f"{gpu[1]} is {gpu[0]}, for which there is no configs/archs/{gpu[0]}.yaml (docs/adding.md)."
            )
        else:
            arch = load_arch(gpu[0])
            device = match_device(arch, gpu[1])
            facts["class"] = device.name if device else "none"
            if device is None:
                findings.append(f"{gpu[1]} belongs to no device class of configs/archs/{arch.name}.yaml: add one.")
    findings += [sentence for sentence in overrides()]
    findings += [sentence for sentence in recording_refusals() if sentence not in findings]
    findings += _record_findings(arch.name if arch else None, device.name if device else None, facts)
    return findings, facts


def _record_findings(arch: str | None, device: str | None, facts: dict[str, str]) -> list[str]:
    out = []
    hashes = template_hashes()
    for path in sorted((config_root() / "records").glob("*.jsonl")):
        if path.name.startswith("compile-"):
            continue
        loaded = RecordStore(path).load()
        facts[path.name] = f"{len(loaded.records)} records"
        warning = loaded.warning(path.name)
        if warning:
            out.append(warning)
        old = sum(
            record_status(r, r.environment, hashes.get(r.candidate.family, "")).kind == "stale-template"
            for r in loaded.records
        )
        if old:
            out.append(
                f"{path.name}: {old} records belong to templates that have changed since: kgen tune measures "
                "anew, kgen records archive puts them aside."
            )
        outdated = sum(r.outdated for r in loaded.records)
        if outdated:
            out.append(
                f"{path.name}: {outdated} times are of outdated inputs and do not count: kgen tune measures anew, "
                "kgen records archive puts them aside."
            )
        if arch is None or device is None or not loaded.records:
            continue
        here = current_environment(arch, device)
        kinds = Counter(record_status(r, here, hashes.get(r.candidate.family, "")).kind for r in loaded.records)
        facts[path.name] += ": " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    return out


def _ptxas() -> str:
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    path = str(own) if own.exists() else shutil.which("ptxas")
    if path is None:
        return "not found"
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return next((line.split("release ")[1] for line in text.splitlines() if "release " in line), "unknown version")

"""Host time of a whole call of `sparse_mla`: python -m bench.host_call [FOLDER ...]

Without a GPU, and without its driver: kernels are compiled and bound for an H200, and the launch itself is left out
(`bench.no_launch`). Packages in the folders (emitted by other versions) are timed in turns with `generated/`, in one process,
so that the ratio holds on a busy machine, too. `bench.host` times the same calls on a GPU, launches included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]


def arguments(layout: str, heads: int, tokens: int, topk: int, extra: int = 0, device: str = "cpu") -> dict[str, Any]:
    """A call as engines make it: contiguous tensors, pages of 64 as writers allocate them, outputs left to the call."""
    from kgen.runtime.layouts import LAYOUTS

    form = LAYOUTS[layout]
    size = form.token_bytes
    if form.paged:
        stride = form.page_bytes(64)
        bytes_ = torch.zeros(65 * stride, dtype=torch.uint8, device=device)
        kv = bytes_.as_strided((64, 64, 1, size), (stride, size, size, 1))
    else:
        kv = torch.zeros(4096, form.d_qk, dtype=torch.bfloat16, device=device)
    given: dict[str, Any] = {
        "q": torch.zeros(tokens, heads, form.d_qk, dtype=torch.bfloat16, device=device),
        "kv": kv,
        "indices": torch.zeros(tokens, topk, dtype=torch.int32, device=device),
        "sm_scale": form.d_qk**-0.5,
        "kv_layout": form.kv_layout,
        "return_lse": True,
    }
    if form.paged:
        given["scale_range"] = (1e-3, 1.0)
    if extra:
        given |= {
            "extra_kv": kv, "extra_indices": torch.zeros(tokens, extra, dtype=torch.int32, device=device),
            "topk_length": torch.full((tokens,), topk, dtype=torch.int32, device=device),
            "extra_topk_length": torch.full((tokens,), extra, dtype=torch.int32, device=device),
            "attn_sink": torch.zeros(heads, device=device),
        }  # fmt: skip
    return given


def cases(device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Calls whose kernels take about as long as the host, or less."""
    return {
        "v32, 16 heads, 4 tokens": arguments("v32", 16, 4, 2048, device=device),
        "v32, 128 heads, 64 tokens": arguments("v32", 128, 64, 2048, device=device),
        "v4, 64 heads, 16 tokens, two caches": arguments("v4", 64, 16, 128, 512, device=device),
        "bf16, 64 heads, 16 tokens": arguments("bf16_d576", 64, 16, 2048, device=device),
    }


def us_of(calls: Mapping[str, Call], rounds: int = 60, number: int = 40) -> dict[str, float]:
    """Least mean of `number` calls, in µs, over rounds that take the calls in turns: other processes only add to it."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(number):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / number * 1e6)
    return {name: round(us, 1) for name, us in best.items()}


def on_gpu() -> dict[str, float]:
    """Microseconds until each call returns, its kernels launched and not waited for."""
    from generated.dispatch import sparse_mla

    out = {}
    for name, given in cases("cuda").items():
        sparse_mla(**given)
        torch.cuda.synchronize()
        found = []
        for _ in range(40):  # few enough calls that the device's queue never fills
            start = time.perf_counter()
            for _ in range(20):
                sparse_mla(**given)
            found.append((time.perf_counter() - start) / 20 * 1e6)
            torch.cuda.synchronize()
        out[name] = round(min(found), 1)
    return out


def without_launch(packages: list[str], rounds: int = 60) -> dict[str, dict[str, Any]]:
    """By case: µs and launches of a call in each package, on an H200 that is not there."""
    from bench.no_launch import install

    log = install()
    entries = {}
    for package in packages:
        dispatch, launch, target = (
            importlib.import_module(f"{package}.{name}") for name in ("dispatch", "launch", "target")
        )
        here = target.Target("sm90", "h200", "NVIDIA H200")
        dispatch.target_of = lambda device, here=here: here
        launch._sms = lambda device: 132
        entries[package] = dispatch.sparse_mla
    found: dict[str, dict[str, Any]] = {}
    for name, given in cases().items():
        found[name] = {"launches": {}}
        for package, sparse_mla in entries.items():
            sparse_mla(**given)
            before = log.count
            sparse_mla(**given)
            found[name]["launches"][package] = log.count - before
        calls: dict[str, Call] = {p: lambda f=f, given=given: f(**given) for p, f in entries.items()}  # type: ignore[misc]
        found[name]["us"] = us_of(calls, rounds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="other emitted packages, timed in turns with generated/")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    sys.path[:0] = [str(folder.resolve().parent) for folder in args.folders]
    print(json.dumps(without_launch(["generated", *(f.name for f in args.folders)], args.rounds), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

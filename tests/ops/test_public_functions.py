"""The public functions in an emitted tree of their own, without kgen, and every refusal as a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
import torch

from kgen.render import module_name, render_module
from kgen.runtime import cache_checks
from kgen.runtime.cache_ops import gather_dequantise, quantise_and_write, to_physical_indices

from . import kernels

ROOT = Path(__file__).resolve().parents[2]

ROUND_TRIP = """
import sys
import torch
from emitted.cache_ops import gather_dequantise, quantise_and_write, to_physical_indices

cache = torch.zeros(2, 4, 1, 584, dtype=torch.uint8)
rows = torch.arange(3 * 512).view(3, 512).remainder(8).bfloat16()
table = torch.tensor([[1, 0]], dtype=torch.int32)
tokens, requests = torch.tensor([[0, 5, -1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
slots = to_physical_indices(tokens, table, requests, page=4)
assert slots.tolist() == [[4, 1, -1]], slots
quantise_and_write(rows, cache, slots[0], kv_layout="v4", scale_rule="vllm")
back = gather_dequantise(cache, slots, kv_layout="v4")
assert torch.equal(back[0, :2], rows[:2]) and (back[0, 2] == 0).all()
assert not any(name.split(".")[0] == "kgen" for name in sys.modules)
try:
    quantise_and_write(rows, cache.to("meta"), slots[0], kv_layout="v4")
except ValueError as error:
    print(type(error).__name__, error)
"""


def _emit(folder: Path, arch: str, *families: tuple[str, str | None]) -> None:
    package = folder / "emitted"
    (package / arch).mkdir(parents=True)
    for source in (ROOT / "kgen" / "runtime").glob("*.py"):
        copy(source, package / source.name)
    for family, layout in families:
        (package / arch / f"{module_name(family, layout)}.py").write_text(render_module(family, layout, "sm90"))


def _run(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "1"} | more
    command = [sys.executable, "-c", ROUND_TRIP]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)


def test_an_emitted_tree_stands_alone(tmp_path: Path) -> None:
    _emit(tmp_path, "sm90", ("cache_ops", "v4"), ("index_ops", None))
    done = _run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CacheOpError All tensors must be on one device")


def test_a_module_of_another_arch_is_refused(tmp_path: Path) -> None:
    _emit(tmp_path, "sm120", ("cache_ops", "v4"), ("index_ops", None))
    done = _run(tmp_path, KGEN_ARCH="sm120")
    assert done.returncode != 0 and "was emitted for sm90, not sm120" in done.stderr


def test_without_gpu_or_interpreter_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="move them to a GPU, or set TRITON_INTERPRET=1"):
        gather_dequantise(torch.zeros(1, 1, 1, 656, dtype=torch.uint8), _ints(0), kv_layout="v32")


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ROWS = torch.zeros(2, 576, dtype=torch.bfloat16)
CACHE = torch.zeros(3, 4, 1, 656, dtype=torch.uint8)
TABLE, INDICES = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)


def _write(
    rows: torch.Tensor = ROWS, cache: torch.Tensor = CACHE, slots: torch.Tensor | None = None, **more: str
) -> None:
    kernels.write(
        rows, cache, _ints(0, 1) if slots is None else slots, more.get("word", "v32"), more.get("rule", "flashmla"), 576
    )


def _flat(row_stride: int) -> torch.Tensor:
    return torch.zeros(9999, dtype=torch.bfloat16).as_strided((4, 576), (row_stride, 1))


def _paged(page_stride: int, token_stride: int = 656, offset: int = 0) -> torch.Tensor:
    return torch.zeros(20000, dtype=torch.uint8).as_strided((3, 4, 1, 656), (page_stride, token_stride, 656, 1), offset)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # fmt: off
    "layout": (lambda: quantise_and_write(ROWS, CACHE, _ints(0, 1), kv_layout="v41"), "ambiguous"),
    "layout width": (lambda: quantise_and_write(ROWS, CACHE, _ints(0, 1), kv_layout="v4"), "no rows of shape"),
    "rows dtype": (lambda: _write(ROWS.half()), "bf16 or fp32, not torch.float16"),
    "rows width": (lambda: _write(ROWS[:, :512]), r"rows must be \[n, 576\]"),
    "rows transposed": (lambda: _write(torch.zeros(576, 2).t()), "rows must be contiguous"),
    "slots dtype": (lambda: _write(slots=torch.zeros(2)), "int32 or int64"),
    "slots count": (lambda: _write(slots=_ints(0)), r"slots must be \[2\]"),
    "slots strided": (lambda: _write(slots=_ints(0, 1, 2, 3)[::2]), "slots.contiguous"),
    "scale rule": (lambda: _write(rule="flashinfer"), "use flashmla, vllm, sglang, arbitrary"),
    "rule of V4": (lambda: cache_checks.scale_rule_of(cache_checks.layout_of_cache("v4", CACHE), "arbitrary"), "ue8m0"),
    "cache dtype": (lambda: _write(cache=CACHE.int()), "uint8, int8 or float8_e4m3fn, not int32"),
    "cache bytes": (lambda: _write(cache=CACHE[..., :584]), "584 is the size of v4"),
    "cache tokens apart": (lambda: _write(cache=_paged(2800, 700)), "needs strides"),
    "cache pages overlap": (lambda: _write(cache=_paged(656)), "needs strides"),
    "cache address": (lambda: _write(cache=_paged(2624, offset=2)), "multiples of 4 bytes"),
    "cache page stride": (lambda: _write(cache=_paged(2626)), "multiples of 4 bytes"),
    "page of 2 GiB": (lambda: _write(cache=CACHE[:, :1].expand(-1, 3_273_604, -1, -1)), "less than 2 GiB"),
    "bf16 dtype": (lambda: _write(cache=torch.zeros(4, 576), word="bf16"), "must be bf16"),
    "bf16 rows overlap": (lambda: _write(cache=_flat(512), word="bf16"), "contiguous and apart"),
    "out dtype": (lambda: kernels.gather(CACHE, _ints(0), "v32", out=torch.zeros(1, 576)), "out must be bf16"),
    "out overlaps": (lambda: kernels.gather(CACHE, _ints(0, 1), "v32", out=ROWS[:1].expand(2, 576)), "overlap"),
    "gather indices": (lambda: kernels.gather(CACHE, torch.zeros(1), "v32"), "indices must be int32 or int64"),
    "indices dtype": (lambda: to_physical(INDICES.long()), "indices must be int32"),
    "indices strided": (lambda: to_physical(torch.zeros(5, 2, dtype=torch.int32).t()), "contiguous last dim"),
    "table": (lambda: to_physical(table=TABLE[0]), "block_table must be int32"),
    "empty table": (lambda: to_physical(table=TABLE[:0]), "block_table is empty"),
    "requests": (lambda: to_physical(requests=_ints(0)), r"request_ids must be contiguous int32 \[2\]"),
    "counts": (lambda: to_physical(counts=torch.zeros(2)), r"counts must be contiguous int32 \[2\]"),
    "page": (lambda: to_physical(page=0), "page must be at least 1"),
    "page stride": (lambda: to_physical(page=4, page_stride_rows=3), "page_stride_rows at least page"),
    "index out": (lambda: to_physical(out=INDICES[:, :4]), r"out must be int32 \[2, 5\]"),
    # fmt: on
}


def to_physical(
    indices: torch.Tensor = INDICES,
    table: torch.Tensor = TABLE,
    requests: torch.Tensor | None = None,
    page: int = 4,
    **more: object,
) -> torch.Tensor:
    return kernels.convert(indices, table, _ints(0, 1) if requests is None else requests, page, **more)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_sentences(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(cache_checks.CacheOpError, match=words) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert caught.value.reasons
    assert all(reason.endswith(".") for reason in caught.value.reasons)


def test_the_public_index_function_names_its_module() -> None:
    with pytest.raises(ModuleNotFoundError, match="sm90"):
        to_physical_indices(INDICES, TABLE, _ints(0, 1), page=4)

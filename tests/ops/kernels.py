"""The launchers under test on freshly rendered modules."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from kgen.render import load_module
from kgen.runtime import cache_ops
from kgen.runtime.layouts import find_layout

D_QK = {"v32": 576, "v4": 512, "v41_footer": 512, "v41_inline": 512}


@functools.cache
def module(family: str, name: str | None) -> ModuleType:
    return load_module(family, name, "sm90")


def write(
    rows: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    word: str,
    rule: str = "flashmla",
    d_qk: int | None = None,
) -> None:
    layout = find_layout(word, d_qk or rows.shape[-1])
    assert layout is not None
    cache_ops._write(module("cache_ops", layout.name), layout, rows, cache, slots, rule)


def gather(
    cache: torch.Tensor, indices: torch.Tensor, word: str, d_qk: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    layout = find_layout(word, d_qk or D_QK[word])
    assert layout is not None
    return cache_ops._gather(module("cache_ops", layout.name), layout, cache, indices, out)


def convert(
    indices: torch.Tensor, table: torch.Tensor, requests: torch.Tensor, page: int, **more: object
) -> torch.Tensor:
    return cache_ops._convert(module("index_ops", None), indices, table, requests, page, **more)  # type: ignore[arg-type]

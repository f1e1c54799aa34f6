"""Hand-made tables and calls: small enough to read, wide enough to choose from."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from kgen.runtime.table import Config, Entry, Provenance, Shape

MOST = 2**31 - 1
BYTES = {"v32": 656, "v4": 584, "v41_footer": 528, "v41_inline": 528}


def entry(
    layout: str = "v4",
    heads: int = 64,
    topk: tuple[int, int] = (1, 128),
    tokens: tuple[int, int] = (1, MOST),
    page: int | None = None,
    extra: tuple[int, int] | None = None,
    extra_page: int | None = None,
    source: str = "measured",
    device_class: str = "h200",
    module: str | None = None,
    warps: int = 4,
    us: float | None = 10.0,
) -> Entry:
    return Entry(
        layout=layout,
        dual=extra is not None,
        heads=heads,
        topk=topk,
        extra_topk=extra or (0, 0),
        page=page,
        extra_page=extra_page,
        tokens=tokens,
        module=module or f"portable_{layout}",
        config=Config(
            (("block_h", min(heads, 64)), ("block_k", 32), ("splits", 1)), num_warps=warps, num_stages=2, maxnreg=None
        ),
        provenance=Provenance(
            source, "static" if source == "static" else device_class, us=us if source != "static" else None
        ),
    )


HEADS = (8, 16, 64, 128)
BUCKETS = ((1, 1), (2, 16), (17, 256), (257, MOST))


def toy_table() -> tuple[Entry, ...]:
    """Every head count, two widths and four buckets over V4 with one cache and two; V32 with one width."""
    rows = []
    for heads, tokens in itertools.product(HEADS, BUCKETS):
        warps = 8 if heads >= 64 else 4
        rows.append(entry("v4", heads, (1, 128), tokens, warps=warps))
        rows.append(entry("v4", heads, (129, 640), tokens, warps=warps))
        rows.append(entry("v4", heads, (1, 128), tokens, extra=(1, 512), page=64, extra_page=2, warps=warps))
        rows.append(entry("v32", heads, (1, 2048), tokens, page=64, warps=warps))
        rows.append(entry("bf16_d576", heads, (1, 2048), tokens, page=0, warps=warps))
    return tuple(rows)


def key_of(row: Entry) -> Shape:
    """A shape that the row was made for."""
    flat = row.layout.startswith("bf16")
    return Shape(
        layout=row.layout,
        heads=row.heads,
        topk=row.topk[1],
        page=0 if flat else row.page or 64,
        tokens=row.tokens[0],
        extra_topk=row.extra_topk[1],
        extra_page=(row.extra_page or 64) if row.dual else 0,
    )


def paged(layout: str, pages: int = 3, page: int = 4, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros((pages, page, 1, BYTES[layout]), dtype=torch.uint8).view(dtype)


def arguments(layout: str = "v4", tokens: int = 5, heads: int = 8, topk: int = 6, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a good call; `changes` replace single ones."""
    d_qk = 576 if layout in ("v32", "bf16_576") else 512
    word = "bf16" if layout.startswith("bf16") else layout
    good: dict[str, Any] = {
        "q": torch.zeros((tokens, heads, d_qk), dtype=torch.bfloat16),
        "kv": torch.zeros((12, d_qk), dtype=torch.bfloat16) if word == "bf16" else paged(layout),
        "indices": torch.zeros((tokens, topk), dtype=torch.int32),
        "sm_scale": 0.1,
        "kv_layout": word,
    }
    return good | changes


def dual(**changes: Any) -> dict[str, Any]:
    return (
        arguments("v4")
        | {
            "extra_kv": paged("v4", pages=2, page=2),
            "extra_indices": torch.zeros((5, 3), dtype=torch.int32),
            "extra_topk_length": torch.zeros(5, dtype=torch.int32),
        }
        | changes
    )

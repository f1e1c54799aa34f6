"""Where the elements of a shared tile lie in memory, for views whose rows are not the rows of the tile.

The model keeps a tile's bytes row by row. In memory a tile of an `NVMMASharedLayout` lies in chunks of as many bytes of each
row as the swizzle is wide, the rows of a chunk one behind the other, their 16-byte units swizzled. A view with other rows, or of a
`SharedLinearLayout`, is therefore looked up byte by byte: which memory its elements lie in, and what of the tile lies there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .layouts import Layout
from .types import ModelError

Home = tuple[tuple[int, ...], int, str]
"""Shape, bytes of an element and layout of an allocation."""
_UNIT = 16


def _facts(layout: Layout) -> str:
    return f"{type(layout).__name__} {sorted(layout.__dict__.items())}"


_layouts: dict[str, Layout] = {}


def key_of(layout: Any) -> str:
    """A layout by its contents; "" for none."""
    if not isinstance(layout, Layout):
        return ""
    _layouts.setdefault(_facts(layout), layout)
    return _facts(layout)


def is_tile(key: str) -> bool:
    return key.startswith("NVMMASharedLayout")


def needs_look_up(home: Home, shape: Sequence[int], size: int, key: str) -> bool:
    """Whether rows of the view may be other than those of the tile."""
    if not is_tile(home[2]) or len(home[0]) < 2:
        return False
    rows, wide = home[0][-2], home[0][-1] * home[1]
    return key.startswith("SharedLinearLayout") or (is_tile(key) and (shape[-2] != rows or shape[-1] * size != wide))


@lru_cache(maxsize=256)
def _memory(shape: tuple[int, ...], size: int, key: str) -> torch.Tensor:
    """int64 [shape]: the byte at which each element begins, from the first one's of memory on."""
    layout = _layouts[key].__dict__
    if is_tile(key):
        wide = int(layout["swizzle_byte_width"])
        *lead, rows, columns = shape
        row = torch.arange(rows)[:, None]
        at = torch.arange(columns)[None, :] * size
        unit = ((at % wide) // _UNIT) ^ (row * min(wide, columns * size) // 128 % (wide // _UNIT))
        tile = at // wide * (rows * wide) + row * wide + unit * _UNIT + at % _UNIT
        starts = torch.arange(int(torch.tensor(lead).prod()) if lead else 1) * (rows * columns * size)
        return (starts[:, None, None] + tile).view(shape)
    bases = [[int(n) for n in basis] for basis in layout["offset_bases"]]
    offsets = torch.arange(1 << len(bases))
    places = torch.zeros(offsets.numel(), dtype=torch.int64)
    for dim, extent in enumerate(shape):
        along = torch.zeros_like(offsets)
        for bit, basis in enumerate(bases):
            along ^= ((offsets >> bit) & 1) * basis[dim]
        places = places * extent + along
    found = torch.full((int(torch.tensor(shape).prod()),), -1)
    for offset in reversed(range(offsets.numel())):  # the first one counts where several hold an element
        found[places[offset]] = offset
    if bool((found < 0).any()):
        raise ModelError(f"A SharedLinearLayout leaves elements of a view {list(shape)} without a place.")
    return (found * size).view(shape)


@lru_cache(maxsize=256)
def _of_memory(home: Home) -> torch.Tensor:
    """int64 [bytes]: which byte of the model each byte of memory is."""
    shape, size, key = home
    first = _memory(shape, size, key).flatten()
    count = first.numel() * size
    memory = (first[:, None] + torch.arange(size)).flatten()
    model = torch.empty(count, dtype=torch.int64)
    model[memory] = torch.arange(count)
    return model


@lru_cache(maxsize=1024)
def strided(
    home: Home, start: int, shape: tuple[int, ...], size: int, key: str, block: int = 0
) -> tuple[int, tuple[int, ...]] | None:
    """(first byte, strides in elements) of a view at a byte of the model, moved by `block` bytes of memory; None where it is not
    so regular."""
    model = _of_memory(home)
    origin = int((model == start).nonzero()) + block
    memory = origin + _memory(shape, size, key)
    if int(memory.max()) + size > model.numel():
        raise ModelError(f"A view {list(shape)} from byte {origin} on ends behind its buffer of {model.numel()} bytes.")
    found = model[memory]
    first = int(found.flatten()[0])
    expected = torch.full(shape, first)
    strides = []
    for dim, extent in enumerate(shape):
        step = int(found.select(dim, 1).flatten()[0]) - first if extent > 1 else size
        sizes = [1] * len(shape)
        sizes[dim] = -1
        expected = expected + (torch.arange(extent) * step).view(sizes)
        strides.append(step // size)
    whole = all(bool((model[memory + i] == found + i).all()) for i in range(size))
    return (first, tuple(strides)) if whole and torch.equal(found, expected) else None

"""Clusters of two CTAs: which part of a block a CTA holds, places in shared memory, and what CTAs say to each other.

A kernel that is run with `num_ctas=2` is executed once per CTA. To the compiler both do the same, and a layout says by its CGA
basis what a CTA holds: all of a block (a basis of zeros), or the slice of its rank along one dim. The model keeps the whole block
in both and, for the second kind, remembers the dim: loads and stores then touch the slice of the CTA's rank alone. What
every CTA holds is stored by CTA 0, as Triton has it.

Gluon has no words for one CTA's access to the other's shared memory, so that a kernel says them in PTX. Functions of the
kernel's text with the names of `HELPERS` are replaced by the ones here, which take the same parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import state
from .layouts import Layout
from .machine import Machine, Place
from .memory import Region, Shared
from .types import ModelError
from .values import Scalar, Split

# ---------------------------------------------------------------------------------------------- blocks


def split_of(layout: Any) -> Split:
    """(dim, basis): CTA 1 holds the elements whose index along the dim has that bit. None: every CTA holds all."""
    if not isinstance(layout, Layout):
        return None
    if type(layout).__name__ == "SliceLayout":
        split = split_of(layout.__dict__["parent"])
        gone = int(layout.__dict__["dim"])
        if split is None or split[0] == gone:
            return None
        return (split[0] - (split[0] > gone), split[1])
    if type(layout).__name__ == "DotOperandLayout":
        return split_of(layout.__dict__["parent"])
    bases = getattr(layout, "cga_layout", None) or getattr(layout, "block_bases", None) or []
    found = [(dim, int(step)) for basis in bases for dim, step in enumerate(basis) if int(step)]
    if len(bases) > 1 or len(found) > 1:
        raise ModelError(f"A layout spreads a block over CTAs by the bases {bases}; the model has one for two CTAs.")
    return found[0] if found else None


def held(split: Split, shape: Any, rank: int) -> torch.Tensor:
    """bool, to be broadcast to the shape: which elements CTA `rank` holds."""
    if split is None:
        return torch.ones((), dtype=torch.bool)
    dim, step = split
    index = torch.arange(shape[dim])
    sizes = [1] * len(shape)
    sizes[dim] = -1
    return (((index // step) & 1) == rank).view(sizes)


# ---------------------------------------------------------------------------------------------- places

_GAP = 1024
_CHUNK_BYTES = 128  # of a row: the columns of a tile with 128-byte swizzle lie in memory in chunks of so many
_ROWS = 32  # that copy_to_peer copies


def _start(machine: Machine, number: int) -> int:
    """The address of an allocation; between two lie bytes that belong to none."""
    sizes = (a.bytes.numel() for a in machine.allocations[:number])
    return _GAP + sum(-(-size // _GAP) * _GAP + _GAP for size in sizes)


def _place(machine: Machine, address: Any) -> Place:
    for number, allocation in enumerate(machine.allocations):
        offset = int(address) - _start(machine, number)
        if 0 <= offset < allocation.bytes.numel():
            return number, offset
    raise ModelError(f"{state.where()} names the shared address {int(address):#x}, where nothing lies.")


def _barrier_at(machine: Machine, address: Any) -> Place:
    number, offset = _place(machine, address)
    allocation = machine.allocations[number]
    if (id(allocation), offset // 8) not in machine.barriers or offset % 8:
        raise ModelError(f"{state.where()} speaks to byte {offset} of {allocation.name}, which is no barrier.")
    return number, offset


def _rows_at(machine: Machine, address: Any, chunks: int) -> Region:
    """The bytes of `chunks` chunks of 32 rows of a tile, the first of which lies at the address. Chunks of a tile of 64 rows lie
    8 KB apart in memory; in the model rows are whole."""
    number, offset = _place(machine, address)
    tile = machine.tiles.get(number)
    name = machine.allocations[number].name
    if tile is None or tile.rank < 2 or tile.shape[-2] != 64:
        raise ModelError(f"{state.where()} copies from {name}, which is no tile of 64 rows that was looked for.")
    wide = tile.shape[-1] * tile.dtype.itemsize
    nth, inside = divmod(offset, 64 * wide)
    chunk, inside = divmod(inside, 64 * _CHUNK_BYTES)
    row, inside = divmod(inside, _CHUNK_BYTES)
    if inside or row % 8 or row + _ROWS > 64 or (chunk + chunks) * _CHUNK_BYTES > wide:
        raise ModelError(
            f"{state.where()} copies {chunks} chunks from byte {offset} of {name}, which are not {_ROWS} rows of it."
        )
    at = nth * 64 * wide + row * wide + chunk * _CHUNK_BYTES
    return Region(machine.allocations[number], at, (_ROWS, chunks * _CHUNK_BYTES), (wide, 1), 1)


# ---------------------------------------------------------------------------------------------- helpers


def _here() -> Machine:
    machine = state.machine()
    if machine.peer is None:
        raise ModelError(f"{state.where()} speaks to another CTA, but it runs with one.")
    return machine


def cluster_rank() -> Scalar:
    return Scalar(_here().rank)


def cluster_sync() -> None:
    if state.partition() is None:
        raise ModelError(
            "The kernel meets the other CTA outside warp_specialize, where its other warps would not come."
        )
    _here().meet()


def find_shared(tiles: Any, barriers: Any) -> tuple[Scalar, ...]:
    """Addresses of shared-memory descriptors, the same in both CTAs."""
    machine = _here()
    found = []
    for shared in (*tiles, *barriers):
        assert isinstance(shared, Shared)
        number = machine.number_of(shared.allocation)
        machine.tiles[number] = shared
        found.append(Scalar(_start(machine, number) + int(shared.data.storage_offset()) * shared.dtype.itemsize))
    return tuple(found)


def copy_to_peer(source: Any, barrier: Any, chunks: Any) -> None:
    machine = _here()
    machine.copy_to_peer(_rows_at(machine, source, int(chunks)), _barrier_at(machine, barrier))


def arrive_at_peer(barrier: Any) -> None:
    machine = _here()
    machine.arrive_at_peer(_barrier_at(machine, barrier))


HELPERS: dict[str, Callable[..., Any]] = {
    helper.__name__: helper for helper in (cluster_rank, cluster_sync, find_shared, copy_to_peer, arrive_at_peer)
}


def replace_helpers(namespace: dict[str, Any]) -> None:
    """Put the model's functions in the place of the text's of the same names."""
    for name, helper in HELPERS.items():
        if name in namespace:
            wanted, given = ([n.lower() for n in inspect.signature(f).parameters] for f in (helper, namespace[name]))
            if wanted != given:
                raise ModelError(f"{name} takes {given} in the kernel, but the model's takes {wanted}.")
            namespace[name] = helper

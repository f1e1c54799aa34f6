"""Global memory as an address space over the arguments' storages, and shared memory as byte buffers with views.

Every storage that is an argument gets its own 2^40 bytes of address space, so that a pointer is one number whatever is done
to it, and an access outside every argument is a sentence instead of a stray read. Shared memory starts as 0xFF bytes (NaN),
so that what is read before it is written shows. The bytes of a shared tile are modelled in row-major order: swizzles are a
matter of the compiler, and `_reinterpret` keeps rows as rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import state
from . import types as ty
from .swizzle import Home, key_of, needs_look_up, strided
from .types import DType, ModelError
from .values import NoOperand, Scalar, Tensor, as_tensor, expand_together, shape_of

_SPACE = 40
_POISON = 0xFF


class GlobalMemory:
    """The storages of the arguments; loads and stores by address."""

    def __init__(self) -> None:
        self._bytes: list[torch.Tensor] = []
        self._names: list[str] = []
        self._known: dict[int, int] = {}

    def pointer(self, tensor: torch.Tensor, name: str) -> Scalar:
        """The address of a tensor's first element, as a pointer to its element type."""
        storage = tensor.untyped_storage()
        slot = self._known.get(storage.data_ptr())
        if slot is None or storage.nbytes() == 0:
            slot = len(self._bytes)
            self._known[storage.data_ptr()] = slot
            self._bytes.append(torch.empty(0, dtype=torch.uint8).set_(storage))
            self._names.append(name)
        dtype = ty.of_torch(tensor.dtype)
        address = ((slot + 1) << _SPACE) + int(tensor.storage_offset()) * dtype.itemsize
        return Scalar(address, ty.pointer_type(dtype))

    def _locate(
        self, addresses: torch.Tensor, size: int, verb: str
    ) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        """For each storage: (which of the addresses lie in it, the storage, their element numbers)."""
        low, high = int(addresses.min()) >> _SPACE, int(addresses.max()) >> _SPACE
        if low == high:
            yield (..., *self._inside(addresses, low - 1, size, verb))
            return
        slots = addresses >> _SPACE
        for slot in torch.unique(slots).tolist():
            here = slots == slot
            yield (here, *self._inside(addresses[here], slot - 1, size, verb))

    def _inside(self, addresses: torch.Tensor, slot: int, size: int, verb: str) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= slot < len(self._bytes):
            raise ModelError(f"{state.where()} {verb} address {int(addresses[0]):#x}, which belongs to no argument.")
        memory, name = self._bytes[slot], self._names[slot]
        offsets = addresses - ((slot + 1) << _SPACE)
        last = int(offsets.max())
        if last + size > memory.numel():
            raise ModelError(
                f"{state.where()} {verb} bytes {last} to {last + size - 1} from the start of the storage of "
                f"{name}, which has {memory.numel()} bytes."
            )
        if size > 1 and bool((offsets % size).any()):
            raise ModelError(f"{state.where()} {verb} an address of {name} that is not a multiple of {size} bytes.")
        return memory[: memory.numel() // size * size], offsets // size

    def load(
        self, address: torch.Tensor, dtype: DType, mask: torch.Tensor | None, other: Tensor | None
    ) -> torch.Tensor:
        """Carrier data. A masked-out element reads nothing; without `other` it is poison."""
        keep = torch.ones((), dtype=torch.bool) if mask is None else mask
        address, keep = expand_together(address, keep)
        stored = torch.full((keep.numel() * dtype.itemsize,), _POISON, dtype=torch.uint8)
        stored = stored.view(dtype.storage).reshape(keep.shape)
        if other is not None:
            stored = ty.to_storage(other.data, dtype).expand(keep.shape).clone()
        wanted = address[keep]
        if wanted.numel():
            found = torch.empty(wanted.shape, dtype=dtype.storage)
            for here, memory, index in self._locate(wanted, dtype.itemsize, "reads"):
                found[here] = memory.view(dtype.storage)[index]
            stored[keep] = found
        return ty.from_storage(stored, dtype)

    def store(self, address: torch.Tensor, value: torch.Tensor, dtype: DType, mask: torch.Tensor | None) -> None:
        keep = torch.ones((), dtype=torch.bool) if mask is None else mask
        address, keep, value = expand_together(address, keep, value)
        wanted = address[keep]
        if wanted.numel():
            written = ty.to_storage(value[keep], dtype)
            for here, memory, index in self._locate(wanted, dtype.itemsize, "writes"):
                memory.view(dtype.storage)[index] = written[here]


# ---------------------------------------------------------------------------------------------- shared memory


@dataclass(eq=False)
class Allocation:
    """One `gl.allocate_shared_memory`. `name` is the variable that the kernel's text gave it."""

    bytes: torch.Tensor
    name: str = "shared"
    home: Home = ((), 1, "")


@dataclass(frozen=True)
class Region:
    """Bytes of an allocation: offset, shape and strides of a view, in elements of `itemsize` bytes."""

    allocation: Allocation = field(compare=True)
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def covered(self) -> torch.Tensor:
        """bool [bytes of the allocation]: which bytes belong to the region."""
        marks = torch.zeros(self.allocation.bytes.numel(), dtype=torch.bool)
        wide = marks.view(-1, self.itemsize)
        starts = torch.tensor(self.offset)
        for size, stride in zip(self.shape, self.strides, strict=True):
            starts = starts[..., None] + torch.arange(size) * stride
        wide[starts.flatten()] = True
        return marks


class Shared(NoOperand):
    """A shared-memory descriptor: a view of an allocation."""

    def __init__(self, allocation: Allocation, data: torch.Tensor, dtype: DType, layout: Any) -> None:
        self.allocation = allocation
        self.data = data  # of the storage type, a view of the allocation's bytes
        self.dtype = dtype
        self.layout = layout

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def numel(self) -> int:
        return self.data.numel()

    @property
    def type(self) -> Shared:
        return self

    @property
    def element_ty(self) -> DType:
        return self.dtype

    def refuse_as_operand(self) -> str:
        return f"{state.where()} uses the shared-memory descriptor {self} in arithmetic; load it first."

    def __repr__(self) -> str:
        return f"{self.allocation.name}{list(self.shape)}"

    @property
    def region(self) -> Region:
        size = self.dtype.itemsize
        return Region(self.allocation, int(self.data.storage_offset()), self.shape, self.data.stride(), size)

    def _view(self, data: torch.Tensor) -> Shared:
        return Shared(self.allocation, data, self.dtype, self.layout)

    def index(self, index: int) -> Shared:
        if not 0 <= int(index) < self.shape[0]:
            raise ModelError(f"{state.where()} takes stage {int(index)} of {self}.")
        return self._view(self.data[int(index)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if int(start) + int(length) > self.shape[int(dim)] or int(start) < 0:
            raise ModelError(f"{state.where()} slices {int(start)} + {int(length)} of dimension {dim} of {self}.")
        return self._view(self.data.narrow(int(dim), int(start), int(length)))

    def permute(self, order: Any) -> Shared:
        return self._view(self.data.permute(shape_of(order)))

    def reshape(self, shape: Any) -> Shared:
        return self._view(self.data.view(shape_of(shape)))

    def _reinterpret(self, dtype: DType, shape: Any, layout: Any) -> Shared:
        return self._seen_as("_reinterpret", "3.6", dtype, shape, layout)

    def reinterpret(self, dtype: DType, shape: Any, layout: Any) -> Shared:
        return self._seen_as("reinterpret", "3.9", dtype, shape, layout)

    def _seen_as(self, name: str, api: str, dtype: DType, shape: Any, layout: Any) -> Shared:
        if state.machine().api != api:
            raise ModelError(
                f"{state.where()} calls {name} of {self}, which Triton {state.machine().api} does not have."
            )
        sizes = shape_of(shape)
        if needs_look_up(self.allocation.home, sizes, dtype.itemsize, key_of(layout)):
            return self._looked_up(dtype, sizes, layout)
        length = math.prod(sizes) * dtype.itemsize
        if not self.data.is_contiguous() or length > self.numel * self.dtype.itemsize:
            raise ModelError(
                f"{state.where()} reinterprets {self} as {dtype}{sizes}, which has more bytes or other rows."
            )
        start = self.data.storage_offset() * self.dtype.itemsize
        raw = self.allocation.bytes[start : start + length]
        return Shared(self.allocation, raw.view(dtype.storage).view(sizes), dtype, layout)

    def _looked_up(self, dtype: DType, sizes: list[int], layout: Any, block: int = 0) -> Shared:
        start = self.data.storage_offset() * self.dtype.itemsize
        key, size = key_of(layout), dtype.itemsize
        found = strided(self.allocation.home, start, tuple(sizes), size, key, block)
        if found is not None and found[0] % size == 0:
            raw = self.allocation.bytes.view(dtype.storage)
            return Shared(self.allocation, torch.as_strided(raw, sizes, found[1], found[0] // size), dtype, layout)
        if len(sizes) < 3:
            raise ModelError(f"{state.where()} sees {self} as {dtype}{sizes}, whose rows are no rows of the tile.")
        return Blocks(self, dtype, sizes, layout)

    def _keep_alive(self) -> None:
        pass

    def value(self) -> torch.Tensor:
        """Carrier data as it is now; no event."""
        if self.data.is_meta:
            return torch.empty(self.shape, dtype=self.dtype.carrier, device="meta")
        return ty.from_storage(self.data.clone(), self.dtype)

    def load(self, layout: Any = None) -> Tensor:
        state.machine().partition.apart = True
        state.machine().read(self)
        told = state.machine().told(self)
        return Tensor(self.value() if told is None else told, self.dtype)

    def store(self, value: Any) -> None:
        state.machine().partition.apart = True
        state.machine().write(self)
        block = as_tensor(value)
        if block.shape != self.shape:
            raise ModelError(f"{state.where()} stores a block {list(block.shape)} to {self}.")
        if block.dtype != self.dtype:
            raise ModelError(f"{state.where()} stores {block.dtype} to {self}, which holds {self.dtype}.")
        state.machine().tell(self, block.data)
        self.put(block.data)

    def put(self, data: torch.Tensor) -> None:
        if not self.data.is_meta:
            self.data.copy_(ty.to_storage(data, self.dtype))


class Blocks(Shared):
    """A view whose first dim is not regular in the tile's rows and columns; one block of it is."""

    def __init__(self, shared: Shared, dtype: DType, sizes: list[int], layout: Any) -> None:
        super().__init__(shared.allocation, shared.data, dtype, layout)
        self._shared, self._sizes = shared, sizes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def index(self, index: int) -> Shared:
        if not 0 <= int(index) < self._sizes[0]:
            raise ModelError(f"{state.where()} takes stage {int(index)} of {self}.")
        inner = self._sizes[1:]
        return self._shared._looked_up(
            self.dtype, inner, self.layout, int(index) * math.prod(inner) * self.dtype.itemsize
        )

    @property
    def region(self) -> Region:
        raise ModelError(f"{state.where()} uses {self} as a whole; take index(i) of it.")

    def value(self) -> torch.Tensor:
        raise ModelError(f"{state.where()} uses {self} as a whole; take index(i) of it.")

    def _view(self, data: torch.Tensor) -> Shared:
        raise ModelError(f"{state.where()} takes a part of {self}; take index(i) of it.")


def allocate_shared_memory(element_ty: DType, shape: Any, layout: Any, value: Any = None) -> Shared:
    sizes = shape_of(shape)
    count = math.prod(sizes) * element_ty.itemsize
    raw = torch.full((count,), _POISON, dtype=torch.uint8, device=state.machine().device)
    home = (tuple(sizes), element_ty.itemsize, key_of(layout))
    allocation = Allocation(raw, f"shared{len(state.machine().allocations)}", home)
    state.machine().allocations.append(allocation)
    shared = Shared(allocation, raw.view(element_ty.storage).view(sizes), element_ty, layout)
    if value is not None:
        shared.store(value)
    return shared

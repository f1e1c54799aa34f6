"""`triton.experimental.gluon.language.nvidia.hopper`: mbarrier, async_copy, tma, warpgroup_mma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import state
from . import types as ty
from .layouts import Layout
from .memory import Shared
from .types import DType, ModelError
from .values import NoOperand, Tensor, as_tensor


class MBarrierLayout(Layout):
    pass


class mbarrier:  # noqa: N801
    MBarrierLayout = MBarrierLayout

    @staticmethod
    def init(mbarrier: Shared, count: int) -> None:
        state.machine().init_barrier(mbarrier, int(count))

    @staticmethod
    def invalidate(mbarrier: Shared) -> None:
        pass

    @staticmethod
    def wait(mbarrier: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if pred:
            if int(phase) not in (0, 1):
                raise ModelError(f"{state.where()} waits for phase {int(phase)} of {mbarrier}; a parity is 0 or 1.")
            state.machine().wait(state.machine().barrier(mbarrier), int(phase))

    @staticmethod
    def arrive(mbarrier: Shared, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            state.machine().partition.apart = False  # Triton has the threads meet first
            state.machine().arrive(state.machine().barrier(mbarrier), int(count))

    @staticmethod
    def expect(mbarrier: Shared, bytes: Any, pred: Any = True) -> None:  # noqa: A002
        """One thread arrives. Triton does not have the others meet it first, as it does for `arrive`."""
        if pred:
            if state.machine().partition.apart:
                raise ModelError(
                    f"{state.where()} expects bytes of {mbarrier}, and so arrives, behind loads or stores that some threads may "
                    f"not have done: let them meet first."
                )
            state.machine().expect(state.machine().barrier(mbarrier), int(bytes))


class async_copy:  # noqa: N801
    @staticmethod
    def async_copy_global_to_shared(smem: Shared, pointer: Any, mask: Any = None, **_: Any) -> None:
        """Rows whose mask is off are filled with zeros, without a read."""
        address = as_tensor(pointer)
        if not address.dtype.is_ptr():
            raise ModelError(f"{state.where()} copies through {address.dtype}, which is no pointer.")
        element = address.dtype.element_ty
        shape = torch.Size(smem.shape)
        if address.data.shape != shape or element.bits != smem.dtype.bits:
            raise ModelError(f"{state.where()} copies {element}{list(address.shape)} to {smem} of {smem.dtype}.")
        keep = None if mask is None else as_tensor(mask, ty.int1).data.expand(shape)
        memory = state.machine().memory

        def finish() -> None:
            zero = as_tensor(0, ty.int64).to(ty.int64)
            fill = Tensor(ty.from_storage(zero.data.to(element.storage), element), element)
            data = memory.load(address.data, element, keep, fill)
            smem.put(ty.bitcast(data, element, smem.dtype))

        if not address.data.is_meta:  # a bad address is an error of the line that issues the copy
            memory.load(address.data, element, keep, None)
        state.machine().copy(smem, finish)

    async_load = async_copy_global_to_shared

    @staticmethod
    def mbarrier_arrive(mbarrier: Shared, increment_count: bool = True) -> None:
        state.machine().copy_arrive(state.machine().barrier(mbarrier), bool(increment_count))

    @staticmethod
    def commit_group() -> None:
        state.machine().commit_copies()

    @staticmethod
    def wait_group(num_outstanding: int = 0) -> None:
        state.machine().wait_copies(int(num_outstanding))


@dataclass
class TensorDescriptor:
    """A host-side TMA descriptor of a 2-D tensor."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any = None

    @staticmethod
    def from_tensor(tensor: torch.Tensor, block_shape: list[int], layout: Any = None) -> TensorDescriptor:
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block_shape), layout)


class tma:  # noqa: N801
    @staticmethod
    def async_copy_shared_to_global(tensor_desc: TensorDescriptor, coord: Any, src: Shared) -> None:
        row, column = (int(c) for c in coord)
        rows, columns = tensor_desc.block_shape

        def finish() -> None:
            target = tensor_desc.base[row : row + rows, column : column + columns]
            value = ty.to_storage(src.value(), src.dtype)
            target.copy_(value[: target.shape[0], : target.shape[1]])

        state.machine().bulk_store(src, finish)

    @staticmethod
    def store_wait(pendings: int) -> None:
        state.machine().wait_bulk(int(pendings))


def fence_async_shared(cluster: bool = False) -> None:
    """The model has one view of shared memory, so that a missing fence does not show."""


class Accumulator(NoOperand):
    """The result of a wgmma in flight. Reading it before a warpgroup_mma_wait retired it is an error."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: Any) -> None:
        self.done = False
        self.accesses: list[int] = []
        self.sources = [operand for operand in (a, b) if isinstance(operand, Shared)]
        self._a, self._b, self._acc, self._use = a, b, acc, bool(use_acc)
        self._value: Tensor | None = None
        self.dtype: DType = acc.dtype
        self.shape: tuple[int, ...] = tuple(acc.shape)

    def refuse_as_operand(self) -> str:
        return f"{state.where()} uses an accumulator {list(self.shape)} that is still in flight; wait for it first."

    def __getitem__(self, key: Any) -> Any:
        raise ModelError(self.refuse_as_operand())

    def to(self, *_: Any, **__: Any) -> Any:
        raise ModelError(self.refuse_as_operand())

    def run(self) -> None:
        if self._value is not None:
            return
        if self._b.data.is_meta:
            self._value = Tensor(torch.empty(self.shape, device="meta"), self.dtype)
            return
        a = self._a.value() if isinstance(self._a, Shared) else self._a.data
        product = a.float() @ self._b.value().float()
        before = self._acc._value if isinstance(self._acc, Accumulator) else self._acc
        assert before is not None
        self._value = Tensor(before.data + product if self._use else product, self.dtype)

    def settle(self) -> Tensor | Accumulator:
        return self._value if self.done and self._value is not None else self


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    if not isinstance(a, Shared):
        a = as_tensor(a)
    if not isinstance(b, Shared):
        raise ModelError(f"{state.where()} gives warpgroup_mma a right operand that is not in shared memory.")
    (m, k), (k2, n) = a.shape, b.shape
    if a.dtype != b.dtype or k != k2 or tuple(acc.shape) != (m, n) or acc.dtype != ty.float32:
        raise ModelError(
            f"{state.where()} multiplies {a.dtype}{list(a.shape)} by {b.dtype}{list(b.shape)} into "
            f"{acc.dtype}{list(acc.shape)}."
        )
    if m % 64 or n % 8 or k % (256 // a.dtype.bits):
        raise ModelError(f"{state.where()} multiplies {m} x {k} by {k} x {n}, for which there is no wgmma.")
    operation = Accumulator(a, b, acc, use_acc)
    state.machine().issue(operation)
    if is_async:
        return operation
    state.machine().retire(0)
    return operation.settle()


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    if deps is None:
        raise ModelError("warpgroup_mma_wait needs deps.")
    state.machine().retire(int(num_outstanding))
    settled = [dep.settle() if isinstance(dep, Accumulator) else dep for dep in deps]
    return settled[0] if len(settled) == 1 else tuple(settled)

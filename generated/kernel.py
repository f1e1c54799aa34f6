"""Launches of one kernel by all calls of a form: the first through Triton's binder, the later ones past it."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from functools import lru_cache
from typing import Any


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (decided when triton was imported, so read like triton reads it)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


class Kernel:
    """One kernel as all calls of a form launch it: with these constants and options, in this grid.

    What Triton compiles depends on the types of the arguments, on which numbers are 1 or multiples of 16, and on where
    tensors start: a form decides all of that. So the first launch goes through Triton's binder, which finds or compiles the
    kernel, and later ones go to that kernel, past the binder (half of the host's time of a launch). Switches of Triton that
    change what is compiled (TRITON_DEBUG and the like) are read at the first launch.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], keywords: dict[str, Any], programs: int = 0) -> None:
        """`programs`: of an SM, whose shared memory is set aside (`set_aside`); 0: what Triton asks for."""
        self._kernel, self._grid, self._keywords = kernel, grid, keywords
        self._programs = programs
        self._compiled: Any = None
        self._grid3 = (*grid, 1, 1)[:3]
        self._tail: tuple[Any, ...] = ()

    def __call__(self, args: tuple[Any, ...]) -> None:
        if self._compiled is not None and not self._kernel.pre_run_hooks:
            self._compiled[self._grid3](*args, *self._tail)
            return
        compiled = self._kernel[self._grid](*args, **self._keywords)  # None from the interpreter
        if compiled is not None and self._programs:
            set_aside(compiled, self._programs)
            self._programs = 0
        names = self._kernel.arg_names[len(args) :]
        if compiled is not None and passes_all_arguments() and all(name in self._keywords for name in names):
            self._tail = tuple(self._keywords[name] for name in names)
            self._compiled = compiled


SM_SHARED = 228 * 1024
"""Shared memory and L1 that an SM of Hopper divides between the two."""

RESERVED = 1024
"""Bytes that an SM keeps per program (CUDA programming guide)."""

_PREFER_NONE, _CARVEOUT = 0, 9  # CU_FUNC_CACHE_PREFER_NONE, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


def set_aside(compiled: Any, programs: int) -> None:
    """Have the driver set aside shared memory for that many programs of a loaded kernel, and leave the rest of it to the L1.
    Triton, which loads it, prefers shared memory above all. It is a hint: where it cannot be given, the kernel is as right."""
    need = programs * (compiled.metadata.shared + RESERVED)
    percent = min(100, -(-100 * need // SM_SHARED))
    try:
        cuda, function = _cuda(), ctypes.c_void_p(int(compiled.function))
        cuda.cuFuncSetCacheConfig(function, _PREFER_NONE)
        cuda.cuFuncSetAttribute(function, _CARVEOUT, percent)
    except (
        OSError,
        AttributeError,
        TypeError,
    ):  # no driver, one without these functions, or a Triton without the handle
        return


@lru_cache(maxsize=1)
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def passes_all_arguments() -> bool:
    """Whether a compiled kernel of the installed Triton is launched with all arguments of its function, constants included:
    looked up in 3.6 and 3.9."""
    from triton import __version__

    found = re.match(r"(\d+)\.(\d+)", __version__)
    return found is not None and (3, 6) <= tuple(map(int, found.groups())) <= (3, 9)


_asking = threading.Lock()


def in_cache(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Ask Triton for the kernel with a hook that cancels compilation: it gives the kernel if it has it, else None. The hook is
    everybody's: what another thread compiles meanwhile must not be cancelled, for its launch would silently not happen."""
    from triton import knobs

    asker = threading.get_ident()
    with _asking:
        before = knobs.runtime.jit_cache_hook

        def hook(**about: Any) -> Any:
            if threading.get_ident() == asker:
                return True
            return None if before is None else before(**about)

        knobs.runtime.jit_cache_hook = hook
        try:
            return kernel.warmup(*args, grid=(1,), **keywords) is not None
        finally:
            knobs.runtime.jit_cache_hook = before

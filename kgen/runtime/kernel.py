"""Launches of one kernel by all calls of a form: the first through Triton's binder, the later ones past it."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import Any


class Kernel:
    """One kernel as all calls of a form launch it: with these constants and options, in this grid.

    What Triton compiles depends on the types of the arguments, on which numbers are 1 or multiples of 16, and on where
    tensors start: a form decides all of that. So the first launch goes through Triton's binder, which finds or compiles the
    kernel, and later ones go to that kernel, past the binder (half of the host's time of a launch). Switches of Triton that
    change what is compiled (TRITON_DEBUG and the like) are read at the first launch.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], keywords: dict[str, Any]) -> None:
        self._kernel, self._grid, self._keywords = kernel, grid, keywords
        self._compiled: Any = None
        self._grid3 = (*grid, 1, 1)[:3]
        self._tail: tuple[Any, ...] = ()

    def __call__(self, args: tuple[Any, ...]) -> None:
        if self._compiled is not None and not self._kernel.pre_run_hooks:
            self._compiled[self._grid3](*args, *self._tail)
            return
        compiled = self._kernel[self._grid](*args, **self._keywords)  # None from the interpreter
        names = self._kernel.arg_names[len(args) :]
        if compiled is not None and passes_all_arguments() and all(name in self._keywords for name in names):
            self._tail = tuple(self._keywords[name] for name in names)
            self._compiled = compiled


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

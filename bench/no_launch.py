"""A Triton driver without a GPU: kernels are compiled for SM90 and bound, and a launch is only counted.

What the host does for a call can so be timed and looked at on any machine: everything but the driver's own `cuLaunchKernelEx`.
To be installed before the first launch of a process that does not interpret.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Launch:
    """One launch: the compiled kernel's hash, the grid, all arguments, and how many blocks a cluster has."""

    kernel: str
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    ctas: int = 1


@dataclass
class Log:
    """Launches since `install`: their number, and where `keep` is set the launches themselves."""

    keep: bool = False
    count: int = 0
    launches: list[Launch] = field(default_factory=list)


def install(keep: bool = False) -> Log:
    """Put the driver in the place of CUDA's; gives the log of what it was asked to launch."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    log = Log(keep)

    class Launcher:
        def __init__(self, src: Any, metadata: Any) -> None:
            self._hash, self._ctas = metadata.hash, metadata.num_ctas

        def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            log.count += 1
            if log.keep:  # behind four of Triton's own: packed metadata, launch metadata, two hooks
                log.launches.append(Launch(self._hash, (x, y, z), rest[4:], self._ctas))

    class Utils:
        def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
            return (1, 1, 128, 0, 1024)

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    class Driver:
        launcher_cls, utils = Launcher, Utils()

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    driver.set_active(Driver())  # type: ignore[arg-type]
    return log

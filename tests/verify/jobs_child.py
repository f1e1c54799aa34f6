"""`kgen.verify_child` with twelve small cases, dealt in turns, and an emulated attention that does what it is told once.

`python -m tests.verify.jobs_child MODE FOLDER ...`: "kill" ends the process of shard 1 by SIGKILL inside its second case,
"context" makes that case lose the CUDA context, "quit" ends the process of shard 1 before anything, "slow" takes half a
second for each case, "hang" never comes back from one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import kgen.verify
import kgen.verify_child
from kgen.check import Inputs
from kgen.verify_cases import VerifyCase

from .attentions import Emulated, small_cases

CASES = 12


def main(mode: str, folder: Path, line: list[str]) -> int:
    torch.set_num_threads(1)
    mine = line[line.index("--shard") + 1]
    (folder / f"pid-{os.getpid()}").touch()
    marker, second = folder / "done", mine.startswith("1/")
    if mode == "quit" and second:
        return 3
    good = Emulated()

    def attention(inputs: Inputs, **flags: Any) -> Any:
        if mode == "slow":
            time.sleep(0.5)
        if mode == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as a kernel that does not end
            time.sleep(600)
        if second and good.calls == 1 and not marker.exists():
            marker.touch()
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "context":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return good(inputs, **flags)

    def shard(suite: str, device: str, part: int, parts: int, package: str) -> list[VerifyCase]:
        return small_cases(CASES)[part::parts]

    guarded = kgen.verify._guarded

    def lost(*args: Any) -> Any:
        result, _ = guarded(*args)
        return result, "CUDA error" in result.sentence

    kgen.verify._guarded = lost  # on a CPU no context is lost
    kgen.verify_child.shipped_attention = lambda package: attention  # type: ignore[assignment]
    kgen.verify_child.cases_of_shard = shard
    return kgen.verify_child.main(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))

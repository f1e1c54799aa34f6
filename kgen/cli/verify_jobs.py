"""Processes of `kgen.verify_child` that share GPUs and a results file, and the summary over all of them.

The file is the only thing that they share: whole lines are appended under a lock, every shard holds other cases, and what
any process wrote before it died counts. So nothing is merged, and a later run with another number of processes goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen import jsonl
from kgen.errors import RecordError
from kgen.verify_child import RESTART

if TYPE_CHECKING:
    from kgen.verify import VerifySummary
    from kgen.verify_cases import VerifyCase

CHILD = (sys.executable, "-m", "kgen.verify_child")
MAX_STARTS = 100
"""Processes that one shard may start: each lost CUDA context costs one."""

STOP_S, LATE_S, POLL_S = 10.0, 60.0, 0.1
"""Seconds in which a process that is told to stop must be gone, seconds behind the budget after which it is told to, and
seconds between two looks at all of them."""

Shard = tuple[int, int]


@dataclass
class Ending:
    """How the processes of a run ended."""

    interrupted: bool = False
    early: list[str] = field(default_factory=list)  # a sentence for each shard that was given up


def run_shards(
    shards: Sequence[Shard], line: Sequence[str], budget_s: float | None = None, child: Sequence[str] = CHILD
) -> Ending:
    """Run a process for each shard until all are done: `child`, then the arguments `line` and those of the shard.

    A process that ends with RESTART or by a signal is started again. Ctrl-C and SIGTERM (that of `timeout`, say) stop all of
    them and return; they record that the cases they were in are not to blame. What they say goes to stderr.
    """
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if main:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kgen-verify-") as folder:
        gpus = gpus_here() if len(shards) > 1 else []
        run = _Run([*child, *line], budget_s, Path(folder), threads_each(len(shards)), gpus)
        try:
            for shard in shards:
                run.start(shard)
            while run.running:
                run.look()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            run.ending.interrupted = True
        finally:
            run.stop()
            if main:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # none: not set by Python
    return run.ending


def require_file(file: Path) -> None:
    """RecordError unless results can be kept there: before any process is started, each of which would say so."""
    if file.exists() and not file.is_file():
        raise RecordError(f"{file.name} is no file that results can be kept in: give --resume the name of one.")
    with jsonl.locked(file):
        pass


def threads_each(processes: int) -> dict[str, str]:
    """An environment in which processes share the cores, unless the caller's says how many threads to take."""
    if processes == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}


def gpus_here() -> list[str]:
    """The GPUs that processes may use, as CUDA_VISIBLE_DEVICES names them: of those that are visible all that are like the first
    one. Results say which GPU they are of, and those of another kind would count for nothing."""
    import torch

    kinds = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(len(kinds))]
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    return [name for name, kind in zip(names, kinds, strict=False) if kind == kinds[0]]


def gpu_of(shard: Shard, gpus: Sequence[str]) -> dict[str, str]:
    """An environment that deals shards out over several GPUs."""
    return {"CUDA_VISIBLE_DEVICES": gpus[shard[0] % len(gpus)]} if len(gpus) > 1 else {}


class _Run:
    """The processes that are running."""

    def __init__(
        self, line: list[str], budget_s: float | None, folder: Path, env: Mapping[str, str], gpus: Sequence[str]
    ) -> None:
        self.running: dict[Shard, subprocess.Popen[bytes]] = {}
        self.ending = Ending()
        self._line, self._budget_s, self._folder, self._env = line, budget_s, folder, env
        self._gpus = gpus
        self._begin = time.monotonic()
        self._starts: dict[Shard, int] = {}

    def start(self, shard: Shard) -> None:
        self._starts[shard] = self._starts.get(shard, 0) + 1
        self._report(shard).unlink(missing_ok=True)
        line = [*self._line, "--shard", f"{shard[0]}/{shard[1]}", "--json", str(self._report(shard))]
        line += ["--parent", str(os.getpid())]
        line += [] if self._budget_s is None else ["--budget", f"{max(0.0, self._left()):.1f}"]
        self.running[shard] = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **self._env, **gpu_of(shard, self._gpus)},
            start_new_session=True,  # Ctrl-C of the terminal does not reach it, and its compilers can be ended with it
        )

    def look(self) -> None:
        """Start again what ended and must go on; stop everything when the budget has been spent for long."""
        for shard, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[shard]
            again = code == RESTART or code < 0
            if again and self._left() > 0 and self._starts[shard] < MAX_STARTS:
                self.start(shard)
            elif again and self._left() > 0:
                self._give_up(shard, f"was started {MAX_STARTS} times and ended with code {code}")
            elif not again and not self._report(shard).is_file():
                self._give_up(shard, f"ended with code {code} before it had a summary")
        if self._left() < -LATE_S and self.running:
            for shard in self.running:
                self._give_up(shard, f"was in a case {LATE_S:g} s after the budget was spent")
            self.stop()

    def stop(self) -> None:
        """End what is running and wait for it: SIGTERM to each process, SIGKILL to those (with their compilers) that stay."""
        try:
            for process in self.running.values():
                process.terminate()
            until = time.monotonic() + STOP_S
            while time.monotonic() < until and any(process.poll() is None for process in self.running.values()):
                time.sleep(POLL_S)
        finally:
            for process in self.running.values():
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
                process.wait()
            self.running.clear()

    def _left(self) -> float:
        return float("inf") if self._budget_s is None else self._budget_s - (time.monotonic() - self._begin)

    def _report(self, shard: Shard) -> Path:
        return self._folder / f"{shard[0]}.json"

    def _give_up(self, shard: Shard, why: str) -> None:
        self.ending.early.append(f"The process of shard {shard[0]}/{shard[1]} {why}.")


def summary_of(cases: Sequence[VerifyCase], file: Path, device: str, package: str = "generated") -> VerifySummary:
    """What a results file says of `cases`, for the emitted package as it is here. Nothing is run."""
    from kgen.verify import environment_here, verify
    from kgen.verify_child import subject_of

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a summary runs no case")

    subject = subject_of(package, environment_here(device))
    return verify(cases, never, device, resume_file=file, budget_s=-1.0, subject=subject)

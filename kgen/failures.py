"""Exceptions and dead processes to typed failures: one sentence each, and never a number.

Classes are recognised by name, so that neither triton nor torch is imported here.
"""

from __future__ import annotations

import re
import signal
import traceback

from kgen.environment import without_paths
from kgen.types import Failure, FailureKind

MAX_MESSAGE = 400

_KIND_BY_CLASS: dict[str, FailureKind] = {
    "CompilationError": "compile",
    "CompileTimeAssertionFailure": "compile",
    "UnsupportedLanguageConstruct": "compile",
    "PTXASError": "compile",
    "BuildError": "compile",
    "OutOfResources": "resource",
    "OutOfMemoryError": "resource",
    "MemoryError": "resource",
    "TimeoutError": "timeout",
}
_KIND_BY_TEXT: tuple[tuple[str, FailureKind], ...] = (
    (r"out of resource|too much shared|CUDA out of memory|too many resources|register allocation failed", "resource"),
    (r"PassManager::run failed|ptxas (error|fatal)|LLVM ERROR|failed to (compile|legalize|translate)", "compile"),
)
_POISON = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction|"
    r"illegal address|hardware stack error|invalid program counter|launch timed out|launch timeout|"
    r"uncorrectable ECC|context is destroyed|cudaErrorIllegal|CUDA_ERROR_(ILLEGAL|LAUNCH_FAILED|MISALIGNED|ASSERT)",
    re.IGNORECASE,
)


def sentence(text: str, tail: str = "") -> str:
    """Text on one line, without paths, at most `MAX_MESSAGE` characters; the end of a worker's output follows."""
    text = _one_line(text)
    tail = _one_line(tail)
    if len(text) > MAX_MESSAGE:
        text = text[: MAX_MESSAGE - 2] + " …"
    text = text if text.endswith((".", "!", "?", "…")) else text + "."
    room = MAX_MESSAGE - len(text) - len(" Last output: ''.")
    if tail and room > 40:
        text += f" Last output: '{tail if len(tail) <= room else '… ' + tail[2 - room :]}'."
    return text


def _one_line(text: str) -> str:
    printable = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return without_paths(" ".join(printable.split()))


def poisons(text: str) -> bool:
    """Whether an error text means that the CUDA context is lost: every later call in that process would fail too."""
    return _POISON.search(text) is not None


def from_exception(error: BaseException, tail: str = "") -> Failure:
    """The failure that an exception of an evaluator means."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(_kind(error, text), sentence(text, tail))


def _kind(error: BaseException, text: str) -> FailureKind:
    if poisons(text):
        return "crash"
    for pattern, kind in _KIND_BY_TEXT:
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    for cls in type(error).__mro__:
        if cls.__name__ in _KIND_BY_CLASS:
            return _KIND_BY_CLASS[cls.__name__]
    if isinstance(error, AssertionError) and _raised_in(error, "triton"):
        return "compile"  # the compiler's own assertions
    return "crash"


def _raised_in(error: BaseException, package: str) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(str(frame.f_globals.get("__name__", "")).split(".")[0] == package for frame, _ in frames)


def from_exit(code: int | None, slug: str, tail: str = "") -> Failure:
    """The failure that the end of a worker process means; `code` as `subprocess` gives it (negative: a signal)."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Failure("crash", sentence(f"The worker died of {name} while it tried {slug}", tail))
    return Failure("crash", sentence(f"The worker ended with exit code {code} while it tried {slug}", tail))

"""Where a record is made: the facts that decide whether a number may be used elsewhere, and what falsifies them.

An `Environment` is checked in with every record, so it never holds a host name, a user or a path.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata

import kgen
from kgen.errors import RecordError
from kgen.types import Environment

NO_GPU = "none"
STATIC = "static"
"""Device class of records that a cost model ranked and no GPU measured."""

_FORBIDDEN = {
    "TRITON_OVERRIDE_ARCH": "code for another arch than the card's would be measured",
    "TRITON_INTERPRET": "kernels would run as Python on the CPU",
    "TRITON_KERNEL_OVERRIDE": "kernels would be replaced by files from a folder",
    "TRITON_MOCK_PTX_VERSION": "the PTX version would not be the compiler's own",
    "DISABLE_PTXAS_OPT": "ptxas would not optimise",
    "DISABLE_LLVM_OPT": "LLVM would not optimise",
    "TRITON_ENABLE_ASAN": "kernels would be instrumented",
    "TRITON_INSTRUMENTATION_MODE": "kernels would be instrumented",
}
_CHANGES_CODE = {
    "PTXAS_OPTIONS": "adds options to ptxas",
    "TRITON_PTXAS_PATH": "replaces Triton's ptxas",
    "TRITON_PTXAS_BLACKWELL_PATH": "replaces Triton's ptxas for Blackwell",
    "TRITON_LIBDEVICE_PATH": "replaces libdevice",
    "TRITON_DEFAULT_FP_FUSION": "changes the contraction of a multiply and an add",
    "TRITON_F32_DEFAULT": "changes the precision of float32 dots",
    "TRITON_DEBUG": "adds checks to the code",
    "TRITON_DISABLE_LINE_INFO": "changes the cubin (line information)",
    "TRITON_ALWAYS_COMPILE": "compiles again on every start: tuning gets slower, results do not change",
}
_OFF = ("", "0", "false", "off", "no", "n")


def overrides(environ: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each set environment variable that changes what Triton compiles or runs; empty when clean.

    Values are not repeated: they may be paths.
    """
    environ = os.environ if environ is None else environ
    known = {**_FORBIDDEN, **_CHANGES_CODE}
    return [f"{name} is set: it {_reason(name)}." for name in known if _is_set(name, environ)]


def recording_refusals(environ: Mapping[str, str] | None = None) -> list[str]:
    """Why nothing may be recorded here, with what to do; empty when recording is fine."""
    environ = os.environ if environ is None else environ
    refusals = [
        f"{name} is set, so {why}: unset it, then tune again."
        for name, why in _FORBIDDEN.items()
        if _is_set(name, environ)
    ]
    rank = environ.get("RANK", "0")
    if rank not in ("", "0"):
        refusals.append(
            f"This is rank {rank} of a distributed run: tune on rank 0 only, so that all ranks read one table."
        )
    return refusals


def require_recordable(environ: Mapping[str, str] | None = None) -> None:
    """Raise RecordError with every refusal; results made under an override would be believed elsewhere."""
    refusals = recording_refusals(environ)
    if refusals:
        raise RecordError(" ".join(refusals))


def current_environment(arch: str, device_class: str) -> Environment:
    """The environment of this process.

    Without a GPU, and for device class `static`, `gpu` is "none" and `cc` is that of the arch.

    Raises RecordError when the card here is of another compute capability than `arch`.
    """
    wanted = _arch_cc(arch)
    name, cc, sms = (NO_GPU, wanted, 0) if device_class == STATIC else _card(wanted)
    if cc != wanted:
        raise RecordError(
            f"The card here ({name}) has compute capability {cc // 10}.{cc % 10}, not that of {arch}: "
            f"tune for sm{cc}, or use --static to rank {arch} candidates without the card."
        )
    return Environment(
        arch=arch,
        device_class=device_class,
        gpu=name,
        cc=cc,
        sms=sms,
        driver=NO_GPU if name == NO_GPU else _driver(),
        triton=_version("triton"),
        torch=_version("torch"),
        python=platform.python_version(),
        kgen=kgen.__version__,
    )


_PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.+@-]+){2,}/?")


def without_paths(text: str) -> str:
    """Absolute paths cut to their last part: a stored sentence is read on other machines."""
    return _PATH.sub(lambda match: match.group().rstrip("/").rsplit("/", 1)[-1], text)


def _is_set(name: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name)
    if value is None:
        return False
    # a default of "on" (fp fusion) is changed by "0" as well
    return value != "" if name == "TRITON_DEFAULT_FP_FUSION" else value.strip().lower() not in _OFF


def _reason(name: str) -> str:
    return _CHANGES_CODE.get(name) or f"means that {_FORBIDDEN[name]}"


def _arch_cc(arch: str) -> int:
    digits = arch.removeprefix("sm")
    if not digits.isdigit():
        raise RecordError(f"{arch!r} is no arch name: write it as sm90, sm100, sm120 or sm121.")
    return int(digits)


def _card(default_cc: int) -> tuple[str, int, int]:
    """(name, compute capability, SMs) of the first visible card."""
    try:
        import torch

        if not torch.cuda.is_available():
            return NO_GPU, default_cc, 0
        props = torch.cuda.get_device_properties(0)
    except (ImportError, RuntimeError, AssertionError):
        return NO_GPU, default_cc, 0
    return props.name, props.major * 10 + props.minor, props.multi_processor_count


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.split()[0] if answer.split() else "unknown"


def _version(package: str) -> str:
    """From the package's metadata: importing torch or triton takes seconds."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"

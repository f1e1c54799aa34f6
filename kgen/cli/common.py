"""What all commands share: the app, errors as sentences, JSON or text."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

import typer

from kgen.archs import ArchSpec, DeviceClass, load_arch, match_device
from kgen.errors import KgenError

app = typer.Typer(
    name="kgen",
    help="Autotuned sparse-MLA kernels: tune, emit and explain them. `kgen COMMAND --help` says more.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

OK, FOUND, USAGE, MACHINE, INTERRUPTED = 0, 1, 2, 3, 130

Json = typer.Option(False, "--json", help="Print one JSON object instead of text.")

F = TypeVar("F", bound=Callable[..., Any])


class MachineError(KgenError):
    """This machine lacks what the command needs."""


def command(name: str, group: typer.Typer | None = None) -> Callable[[F], F]:
    """Register a command, of a group if given (`kgen records list`): its function returns an exit code (None: 0), and its
    errors are sentences."""

    def register(function: F) -> F:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            as_json = bool(kwargs.get("as_json", False))
            try:
                code = function(*args, **kwargs)
            except MachineError as error:
                code = complain(str(error), MACHINE, as_json)
            except KgenError as error:
                code = complain(str(error), USAGE, as_json)
            except ImportError as error:
                code = complain(f"{error}. Install the tuning parts: pip install 'kgen[tune]'.", MACHINE, as_json)
            except OSError as error:
                target = f" ({error.filename})" if error.filename else ""
                code = complain(f"{error.strerror or error}{target}.", USAGE, as_json)
            except KeyboardInterrupt:
                code = complain("Interrupted.", INTERRUPTED, as_json)
            raise typer.Exit(code or OK)

        (group or app).command(name)(wrapped)
        return function

    return register


def complain(sentence: str, code: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": sentence, "exit_code": code}))
    else:
        print(f"kgen: {sentence}", file=sys.stderr)
    return code


def show(value: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print a value as JSON, or its lines."""
    if as_json:
        print(json.dumps(plain(value), indent=1, sort_keys=True))
    else:
        for line in lines:
            print(line)


def plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as JSON has them."""
    if hasattr(value, "to_json"):
        found = value.to_json()
        return json.loads(found) if isinstance(found, str) else plain(found)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def local_gpu() -> tuple[str, str] | None:
    """(arch, GPU name) of the current CUDA device, or None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}", torch.cuda.get_device_name()


def device_here(arch: ArchSpec) -> DeviceClass:
    """The class of this machine's GPU, which must be one of `arch`. MachineError names --static."""
    gpu = local_gpu()
    if gpu is None:
        raise MachineError(
            f"No GPU is visible, so nothing can be timed for {arch.name}: add --static to rank compiled candidates "
            "by the cost model instead."
        )
    here, name = gpu
    if here != arch.name:
        raise MachineError(f"This GPU ({name}) is {here}, not {arch.name}: tune for --arch {here}, or add --static.")
    found = match_device(arch, name)
    if found is None:
        raise MachineError(
            f"{name} belongs to no device class of configs/archs/{arch.name}.yaml: add one there (docs/adding.md)."
        )
    return found


def arch_or_here(name: str | None) -> ArchSpec:
    """The named arch, or that of this machine's GPU."""
    if name is not None:
        return load_arch(name)
    gpu = local_gpu()
    if gpu is None:
        raise MachineError("No GPU is visible: name the arch with --arch (sm90, sm100, sm120 or sm121).")
    return load_arch(gpu[0])

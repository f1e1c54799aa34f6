"""Append-only files of JSON lines that survive crashes, concurrent writers and damaged bytes.

A line is one JSON object or array whose last member is a CRC-32 of the rest: a flipped digit is noticed and never read
as another number. Every write is one `write` of whole lines to a file opened for appending, under an exclusive
`flock`; a line that a crash cut off is closed by the next writer and set aside by readers. Nothing here deletes what
it cannot read.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kgen.errors import RecordError

_BOM = b"\xef\xbb\xbf"
_TAIL = len(',"01234567"}')
T = TypeVar("T")


@dataclass(frozen=True)
class SetAside:
    """A line that was not used: its number (from 1), why, and what it says (undecodable bytes replaced)."""

    line_no: int
    reason: str
    text: str
    damaged: bool = True  # False: whole, but of a newer kgen or another kind; never quarantined


class NewerSchema(ValueError):
    """A whole line of a schema or kind that this kgen does not know."""


def seal(value: dict[str, Any] | list[Any]) -> str:
    """The line (without its newline) of an object or array: compact ASCII JSON, key order as given, CRC last."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False)
    key = '"crc":' if isinstance(value, dict) else ""
    return f'{body[:-1]},{key}"{zlib.crc32(body.encode()):08x}"{body[-1]}'


def unseal(line: bytes) -> Any:
    """The object or array of a sealed line, without its CRC; ValueError with a sentence for anything else."""
    line = line.strip(b" \t\r\n")
    keyed = line.endswith(b"}")
    cut = len(line) - _TAIL - (len('"crc":') if keyed else 0)
    body = line[:cut] + line[-1:]
    if cut < 1 or line[cut:-1] != (b',"crc":"%08x"' if keyed else b',"%08x"') % zlib.crc32(body):
        raise ValueError("the line is cut off, or was changed after it was written (its checksum does not match)")
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is no JSON ({type(error).__name__})") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines in one write, under the lock; RecordError when the disk takes only a part of it."""
    data = "".join(f"{line}\n" for line in lines).encode()
    if not data:
        return
    check_plain(path)
    with locked(path) as fd:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # a writer died inside its line: close it, so that only that line is lost
        written = os.write(fd, data)
    if written != len(data):
        raise RecordError(
            f"Only {written} of {len(data)} bytes could be added to {path.name}: free disk space, run again."
        )


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """A descriptor of `path`, created if missing, opened for appending and reading, under an exclusive lock.

    `flock` belongs to the open file, so threads exclude each other as well. A rewrite may rename another file into
    place while we wait: then the lock is on the old file, and we start over.
    """
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordError(f"{path.name} cannot be opened for writing: {error.strerror}.") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _same_file(fd, path):
                yield fd
                return
        finally:
            os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def check_plain(path: Path) -> None:
    """RecordError for a packed file: a line added to it would make it unreadable. Call it before `locked`, which makes the file."""
    if path.suffix == ".gz":
        raise RecordError(f"{path.name} is packed and can only be read: unpack it (gunzip), or name a .jsonl file.")


def read_bytes(path: Path) -> bytes:
    """The bytes of a record file, unpacked where its name ends in .gz; a missing file is an empty one."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" and data else data
    except FileNotFoundError:
        return b""
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise RecordError(
            f"{path.name} is damaged or no gzip file: fetch it again, or move it away and start another."
        ) from None
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read: {error.strerror}.") from None


@dataclass(frozen=True)
class Scan(Generic[T]):
    """What the lines of a file hold, in their order: read values with their bytes, and lines set aside with theirs."""

    values: list[tuple[T, bytes]]
    set_aside: list[tuple[SetAside, bytes]]


def scan(data: bytes, decode: Callable[[Any], T]) -> Scan[T]:
    """Read every line that can be read; whatever the bytes, this does not raise."""
    values: list[tuple[T, bytes]] = []
    set_aside: list[tuple[SetAside, bytes]] = []
    for number, line in enumerate(data.removeprefix(_BOM).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            values.append((decode(unseal(line)), line))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            text = line.decode("utf-8", "replace")
            aside = SetAside(number, str(error), text, damaged=not isinstance(error, NewerSchema))
            set_aside.append((aside, line))
    return Scan(values, set_aside)


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write another content atomically; call it while holding `locked(path)`."""
    replace_bytes(path, b"".join(line.rstrip(b"\r") + b"\n" for line in lines))


def replace_bytes(path: Path, data: bytes) -> None:
    """Write another content atomically: temporary file beside it, fsync, rename. On an OSError the file is what it was. A link
    stays one: others may read and lock the file that it leads to."""
    path = Path(os.path.realpath(path))
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the name as well, so that what is renamed later does not reach the disk first
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def damaged_path(path: Path) -> Path:
    """Where the damaged lines of `path` are kept."""
    return path.with_name(path.name + ".damaged")


def save_damaged(path: Path, lines: list[bytes]) -> None:
    """Add lines to `<name>.damaged`, byte for byte and on the disk before anything is taken out of `path`."""
    if not lines:
        return
    with locked(damaged_path(path)) as fd:
        data = b"".join(line + b"\n" for line in lines)
        if os.write(fd, data) != len(data):
            raise RecordError(f"{damaged_path(path).name} could not be written: free disk space, run again.")
        os.fsync(fd)

"""Records that count for nothing any more leave their file, and are kept.

A record of a template's earlier text, or a time on outdated inputs, is never used again (`record_status`), but it was measured:
`archive_records` moves its line, byte for byte, to `archive/<name>.gz` beside the file. `kgen records merge` and `show` read such
a file as any other, so that a text that comes back finds its timings.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen import jsonl
from kgen.errors import RecordError
from kgen.records import from_json, record_status
from kgen.types import TuneRecord

__all__ = ["Archived", "archive_path", "archive_records"]


@dataclass(frozen=True)
class Archived:
    """What `archive_records` did: lines moved, lines that stay (with those that cannot be read), and where the moved are."""

    moved: int
    kept: int
    file: Path


def archive_path(path: Path) -> Path:
    """Where the retired lines of a record file are."""
    return path.parent / "archive" / (path.name + ".gz")


def archive_records(path: Path, hashes: Mapping[str, str]) -> Archived:
    """Move the lines of `path` that no longer count to its archive.

    hashes: of every family, the hash that its template goes by now. The archive is on the disk before the file is replaced, both
    atomically: after a crash lines may be in both, never in none, and the next call does not add them twice. Lines that cannot be
    read stay. RecordError or OSError when the archive cannot be read or written; then the file is what it was.
    """
    target = archive_path(path)
    jsonl.check_plain(path)
    with jsonl.locked(path):
        stay: list[bytes] = []
        go: list[bytes] = []
        for line in jsonl.read_bytes(path).split(b"\n"):
            if line.strip():
                (go if _retired(line, hashes) else stay).append(line)
        if go:
            _add(target, go)
            jsonl.replace_file(path, stay)
    return Archived(len(go), len(stay), target)


def _retired(line: bytes, hashes: Mapping[str, str]) -> bool:
    try:
        record: TuneRecord = from_json(line)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False
    return record_status(record, record.environment, hashes.get(record.candidate.family, "")).kind in (
        "stale-template",
        "stale-inputs",
    )


def _add(target: Path, lines: list[bytes]) -> None:
    try:
        target.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise RecordError(f"{target.parent.name} cannot be made beside the records: {error.strerror}.") from None
    with jsonl.locked(target):
        before = jsonl.read_bytes(target)
        if before and not before.endswith(b"\n"):
            before += b"\n"
        known = set(before.split(b"\n"))
        added = b"".join(line + b"\n" for line in dict.fromkeys(lines) if line not in known)
        if added:
            jsonl.replace_bytes(target, gzip.compress(before + added, mtime=0))  # no time in it: same lines, same bytes

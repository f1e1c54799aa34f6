"""Tuning results: one JSON line each, appended, never edited, and used only where they still hold.

`RecordStore` reads and writes a file; `fingerprint` names a point (resume, memo); `record_status` says whether a record
still holds; `settle` and `winner` say which of several records of a point, and which point of a spec, counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kgen import jsonl
from kgen.codec import decoder, encode
from kgen.environment import without_paths
from kgen.errors import RecordError
from kgen.jsonl import SetAside
from kgen.measure import beats, is_interleaved
from kgen.probe_records import ProbeLoad, ProbeRecord, ProbeStore, probe_key
from kgen.runtime.layouts import LAYOUTS
from kgen.same_code import timed_by
from kgen.types import INPUTS_RECIPE, Candidate, Environment, KernelSpec, Measurement, TuneRecord

__all__ = [
    "SCHEMA", "LoadResult", "ProbeLoad", "ProbeRecord", "ProbeStore", "RecordStatus", "RecordStore", "SetAside",
    "fingerprint", "from_json", "load_records", "merge", "probe_key", "record_id", "record_status", "settle", "to_json",
    "winner",
]  # fmt: skip

SCHEMA = 2
"""The highest schema that this kgen reads. 2 may state the recipe of the timing inputs and the warps of a kernel, 1 never does.
A line has the lowest schema that can hold it: a kgen that knows only 1 leaves the others alone, and lines of 1 stay byte for
byte what they are.
"""

_decode_record = decoder(TuneRecord)


def to_json(record: TuneRecord) -> str:
    """The line of a record: deterministic, without paths, sealed by a checksum. RecordError when it contradicts
    itself.
    """
    if problem := _contradiction(record):
        raise RecordError(f"The record of {record.spec.slug} cannot be stored: {problem}.")
    if record.failure is not None:
        record = replace(record, failure=replace(record.failure, message=without_paths(record.failure.message)))
    try:
        return jsonl.seal({"v": _schema_of(record), **encode(record)})
    except ValueError as error:  # NaN or infinity: a failed measurement must be a Failure
        raise RecordError(f"The record of {record.spec.slug} cannot be stored: {error}.") from None


def _schema_of(record: TuneRecord) -> int:
    plain = record.inputs is None and (record.resources is None or record.resources.warps is None)
    return 1 if plain else 2


def from_json(line: str | bytes) -> TuneRecord:
    """Read one line; ValueError with a sentence when anything is missing, unknown, damaged or contradictory."""
    return _from_value(jsonl.unseal(line.encode() if isinstance(line, str) else line))


def _from_value(value: Any) -> TuneRecord:
    if not isinstance(value, dict):
        raise jsonl.NewerSchema("the line is not an object")  # but whole: another file's, as a compile result is
    version = value.pop("v", None)
    if type(version) is not int or version < 1:
        raise ValueError("the line has no schema version")
    if version > SCHEMA:
        raise jsonl.NewerSchema(f"the line has schema {version}, this kgen reads up to {SCHEMA}: upgrade kgen")
    record: TuneRecord = _decode_record(value, "")
    if record.spec.layout not in LAYOUTS:
        raise jsonl.NewerSchema(f"the line has the layout {record.spec.layout!r}, which this kgen does not know")
    if version < _schema_of(record):
        raise ValueError("a line of schema 1 states no recipe of inputs and no warps")
    if problem := _contradiction(record):
        raise ValueError(problem)
    return record


def _contradiction(record: TuneRecord) -> str | None:
    results = [record.measurement, record.failure, record.estimate_us]
    if sum(result is not None for result in results) != 1:
        return "exactly one of measurement, failure and estimate_us must be set"
    if record.measurement is not None and not record.measurement.median_us > 0:
        return "a measured time must be above zero"
    if record.inputs is not None and record.inputs < 1:
        return "recipes of inputs count from 1"
    return None


# ---- identity -------------------------------------------------------------------------------------------------------


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([encode(part) for part in parts]).encode()).hexdigest()[:24]


def fingerprint(spec: KernelSpec, candidate: Candidate, template_hash: str, cc: int) -> str:
    """Names a point: 24 hex digits that differ when any field differs. `cc` is the full compute capability (121 is
    not 120).
    """
    return _digest(spec, candidate, template_hash, cc)


def record_id(record: TuneRecord) -> str:
    """Names a point, where it was tried (card, device class, cc, versions) and what kind of result it is."""
    return _digest(_place(record), record.status)


def _place(record: TuneRecord) -> str:
    env = record.environment
    facts = [getattr(env, name) for name in (*Environment.HARD, *Environment.SOFT, "device_class", "gpu")]
    return _digest(record.spec, record.candidate, record.template_hash, *facts)


@dataclass(frozen=True)
class RecordStatus:
    """Whether a record holds here and now, and a sentence that says why not and what to do."""

    kind: Literal["fresh", "stale-triton", "stale-template", "stale-inputs", "stale-environment", "foreign"]
    sentence: str

    @property
    def usable(self) -> bool:
        """Whether its number describes the code that would be emitted now, on the inputs of now: everything but foreign,
        another template and outdated inputs.
        """
        return self.kind not in ("foreign", "stale-template", "stale-inputs")


def record_status(record: TuneRecord, environment: Environment, template_hash: str) -> RecordStatus:
    """Compare a record with the environment and the template of now; the gravest difference is named."""
    there, here = record.environment, environment
    for name in (*Environment.HARD, "device_class"):
        if (was := getattr(there, name)) != (now := getattr(here, name)):
            return RecordStatus("foreign", f"Made on {name} {was}, not {now}: tune on this card.")
    if not timed_by(record.candidate.family, template_hash, record.template_hash, record.spec.layout):
        text = f"The template of {record.candidate.family} has changed since: verify and measure again (kgen tune)."
        return RecordStatus("stale-template", text)
    if record.outdated:
        text = f"Timed on inputs of recipe {record.inputs or 1}, now {INPUTS_RECIPE} is used: kgen tune measures again."
        return RecordStatus("stale-inputs", text)
    if there.triton != here.triton:
        text = f"Measured with Triton {there.triton}, here is {here.triton}: compare again with kgen tune --stale."
        return RecordStatus("stale-triton", text)
    for name in Environment.SOFT:
        if (was := getattr(there, name)) != (now := getattr(here, name)):
            text = f"Measured with {name} {was}, here is {now}: compare again with kgen tune --stale."
            return RecordStatus("stale-environment", text)
    return RecordStatus("fresh", "Made with this card, these versions and this template.")


# ---- which record counts --------------------------------------------------------------------------------------------


def settle(records: Iterable[TuneRecord]) -> list[TuneRecord]:
    """One record per id, in the order of the last line of each.

    Times on today's inputs count over those on outdated ones, then interleaved times over single ones, then later lines
    over earlier ones.

    A point that ever gave a wrong or unstable result in an environment loses its times there: right comes before fast.
    (Unstable on outdated inputs says nothing about today's.)
    """
    kept: dict[str, TuneRecord] = {}
    distrusted: set[str] = set()
    for record in records:
        if record.failure is not None and record.failure.kind in ("wrong", "unstable") and not record.outdated:
            distrusted.add(_place(record))
        name = record_id(record)
        if name not in kept or _rank(record) >= _rank(kept[name]):
            kept.pop(name, None)  # so that it moves to the end
            kept[name] = record
    return [r for r in kept.values() if r.measurement is None or _place(r) not in distrusted]


def _rank(record: TuneRecord) -> tuple[bool, bool]:
    return not record.outdated, record.measurement is not None and is_interleaved(record.measurement)


def winner(records: Sequence[TuneRecord]) -> TuneRecord | None:
    """The measured record of one spec that counts: the champion of the interleaved rounds in the order of the lines.

    A later one replaces it only by more than the noise. Without interleaved times the lowest median wins. Times on outdated
    inputs do not count. None when nothing was measured.
    """
    records = [r for r in records if not r.outdated]
    measured = [r for r in settle(records) if r.measurement is not None]
    trusted = {_place(r) for r in measured}
    champion: TuneRecord | None = None
    for record in records:  # not the settled ones: a champion that was timed again must stay before those that it beat
        if record.measurement is None or not is_interleaved(_time(record)) or _place(record) not in trusted:
            continue
        same = champion is not None and champion.candidate == record.candidate
        if champion is None or same or beats(_time(record), _time(champion)):
            champion = record
    if champion is None and measured:
        champion = min(measured, key=lambda r: _time(r).median_us)
    return champion


def _time(record: TuneRecord) -> Measurement:
    assert record.measurement is not None
    return record.measurement


# ---- files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadResult:
    """What a file holds: the records in order, and every line that was not used with the reason."""

    records: list[TuneRecord]
    set_aside: list[SetAside]

    def warning(self, name: str) -> str | None:
        """One sentence about the lines set aside, or None."""
        if not self.set_aside:
            return None
        first = self.set_aside[0]
        return f"{name}: {len(self.set_aside)} lines were set aside; line {first.line_no}: {first.reason}."


class RecordStore:
    """A file of tuning records; several processes may append at once, and a missing file is an empty one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._read_up_to = 0
        self._inode = -1

    def append(self, record: TuneRecord) -> None:
        """Add one complete line (see `kgen.jsonl.append_lines`)."""
        jsonl.append_lines(self.path, [to_json(record)])

    def append_all(self, records: Iterable[TuneRecord]) -> None:
        """Add several lines in one write: all of them or, after a crash, a beginning."""
        jsonl.append_lines(self.path, [to_json(record) for record in records])

    def load(self) -> LoadResult:
        """All records; lines that cannot be read are set aside with a sentence. Never raises whatever the bytes."""
        scan = jsonl.scan(jsonl.read_bytes(self.path), _from_value)
        return LoadResult([record for record, _ in scan.values], [aside for aside, _ in scan.set_aside])

    def news(self) -> list[TuneRecord]:
        """Records added (by anyone) since the last call; the first call gives all. Unreadable lines are skipped."""
        try:
            with open(self.path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                size = os.fstat(file.fileno()).st_size
                if inode != self._inode or size < self._read_up_to:
                    self._inode, self._read_up_to = inode, 0  # it was rewritten: the caller sees known records again
                file.seek(self._read_up_to)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_up_to += len(whole)
        return [record for record, _ in jsonl.scan(whole, _from_value).values]

    def quarantine(self) -> list[SetAside]:
        """Move damaged lines to `<name>.damaged` and keep the rest byte for byte; gives what was moved."""
        return self._rewrite(lambda records: None)

    def compact(self) -> list[SetAside]:
        """Keep one line per record id (`settle`); damaged lines go to `<name>.damaged`."""
        return self._rewrite(settle)

    def _rewrite(self, choose: Callable[[list[TuneRecord]], list[TuneRecord] | None]) -> list[SetAside]:
        jsonl.check_plain(self.path)
        with jsonl.locked(self.path):
            scan = jsonl.scan(jsonl.read_bytes(self.path), _from_value)
            damaged = [(aside, line) for aside, line in scan.set_aside if aside.damaged]
            newer = [line for aside, line in scan.set_aside if not aside.damaged]
            chosen = choose([record for record, _ in scan.values])
            lines = [line for _, line in scan.values] if chosen is None else [to_json(r).encode() for r in chosen]
            if damaged or chosen is not None:
                jsonl.save_damaged(self.path, [line for _, line in damaged])
                jsonl.replace_file(self.path, lines + newer)
        return [aside for aside, _ in damaged]


def load_records(path: str | os.PathLike[str]) -> tuple[list[TuneRecord], list[SetAside]]:
    """The records of a file and the lines set aside."""
    result = RecordStore(path).load()
    return result.records, result.set_aside


@dataclass(frozen=True)
class MergeResult:
    """What a merge did: lines added, lines already known, and a sentence for each conflict."""

    added: int
    known: int
    conflicts: list[str]
    set_aside: Mapping[str, list[SetAside]]


def merge(paths: Sequence[str | os.PathLike[str]], into: str | os.PathLike[str]) -> MergeResult:
    """Import records of other files; the file `into` is settled and replaced atomically.

    A record of an id that is known is dropped, except that an interleaved time replaces a single one, and a time on today's
    inputs one on outdated inputs. A wrong or
    unstable result from anywhere removes the times of that point in that environment. Merging twice changes nothing.
    """
    target = RecordStore(into)
    target.quarantine()
    foreign = {str(path): RecordStore(path).load() for path in paths}  # machines name their files alike
    with jsonl.locked(target.path):
        own = target.load().records
        kept = {record_id(record): record for record in settle(own)}
        added, known, conflicts = 0, 0, []
        for name, result in foreign.items():
            for record in settle(result.records):
                mine = kept.get(record_id(record))
                if mine is None or _rank(record) > _rank(mine):
                    added += 1
                    kept[record_id(record)] = record
                else:
                    known += 1
                if mine is not None and to_json(mine) != to_json(record):
                    loser = "the own line is replaced" if _rank(record) > _rank(mine) else "the own line is kept"
                    conflicts.append(f"{name}: another result for {record.spec.slug} {record.candidate.slug}; {loser}.")
        merged = settle(kept.values())
        if len(merged) < len(kept):
            conflicts.append(
                f"{len(kept) - len(merged)} times were dropped: their points gave wrong results elsewhere."
            )
        newer = _newer_lines(target.path)
        jsonl.replace_file(target.path, [to_json(record).encode() for record in merged] + newer)
    return MergeResult(added, known, conflicts, {name: result.set_aside for name, result in foreign.items()})


def _newer_lines(path: Path) -> list[bytes]:
    scan = jsonl.scan(jsonl.read_bytes(path), _from_value)
    return [line for aside, line in scan.set_aside if not aside.damaged]

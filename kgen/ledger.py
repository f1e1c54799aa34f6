"""What is known about the points of a plan: records that still hold, as the file grows, and claims on points.

Several tuning processes may share a record file: each sees the others' records, and a claim keeps two of them from
measuring one point at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from kgen.errors import RecordError
from kgen.records import RecordStore, fingerprint, record_status, winner
from kgen.types import INPUTS_RECIPE, TOKEN_BUCKETS, Candidate, Environment, KernelSpec, TuneRecord


class Ledger:
    """The records of a store that hold for this environment and these templates.

    Records of another card or another template, and times on outdated inputs, are ignored (B57); with `fresh_only` those of
    other versions, too, so that their points are measured again.
    """

    def __init__(
        self, store: RecordStore, environment: Environment, template_hashes: Mapping[str, str], fresh_only: bool
    ) -> None:
        self._store = RecordStore(store.path)  # its own place in the file
        self._environment = environment
        self._hashes = template_hashes
        self._fresh_only = fresh_only
        self._records: dict[KernelSpec, list[TuneRecord]] = defaultdict(list)
        self._points: dict[str, TuneRecord] = {}
        self._outdated: dict[KernelSpec, dict[Candidate, float]] = defaultdict(dict)
        self.refresh()

    def fingerprint(self, spec: KernelSpec, candidate: Candidate) -> str:
        """The name of a point under the current template; RecordError when the plan has no hash for the family."""
        if candidate.family not in self._hashes:
            raise RecordError(f"The plan has no template hash for the family {candidate.family}: add it.")
        return fingerprint(spec, candidate, self._hashes[candidate.family], self._environment.cc)

    def refresh(self) -> None:
        """Read what was added to the file since the last time, by anyone."""
        for record in self._store.news():
            if (
                record.outdated
                and record.measurement is not None
                and self._holds(replace(record, inputs=INPUTS_RECIPE))
            ):
                self._outdated[record.spec][record.candidate] = record.measurement.median_us
            if record.status != "static" and self._holds(record):
                self._records[record.spec].append(record)
                self._points[self.fingerprint(record.spec, record.candidate)] = record

    def add(self, records: Iterable[TuneRecord]) -> None:
        """Append new records to the file, and know them."""
        self._store.append_all(records)
        self.refresh()

    def knows(self, point: str) -> TuneRecord | None:
        """The last record of a point."""
        return self._points.get(point)

    def of(self, spec: KernelSpec) -> list[TuneRecord]:
        """All records of a spec that hold, in order."""
        return self._records.get(spec, [])

    def outdated(self, spec: KernelSpec) -> list[Candidate]:
        """Candidates of a spec that were timed on outdated inputs, fastest first: what to time again before all others."""
        times = self._outdated.get(spec, {})
        return sorted(times, key=lambda candidate: (times[candidate], candidate.slug))

    def neighbours(self, spec: KernelSpec, limit: int = 3) -> list[Candidate]:
        """Winners of the specs that resemble `spec` most (same arch and layout, a bucket's tokens), nearest first."""
        same = (spec.arch, spec.layout, spec.dual)
        others = [
            s for s in self._records if s != spec and (s.arch, s.layout, s.dual) == same and s.tokens in TOKEN_BUCKETS
        ]
        best = (
            winner(self._records[other]) for other in sorted(others, key=lambda other: _distance(spec, other))[:limit]
        )
        return [record.candidate for record in best if record is not None]

    def _holds(self, record: TuneRecord) -> bool:
        current = self._hashes.get(record.candidate.family)
        if current is None:
            return False
        status = record_status(record, self._environment, current)
        return status.kind == "fresh" if self._fresh_only else status.usable


def _distance(a: KernelSpec, b: KernelSpec) -> tuple[float, str]:
    pairs = [(a.heads, b.heads), (a.tokens, b.tokens), (a.keys_per_token, b.keys_per_token)]
    return sum(abs(math.log2(x / y)) for x, y in pairs) + 0.1 * (a.page != b.page), b.slug


class Claims:
    """Locks on points, held by a process for the time of a measurement and freed by the system when it dies.

    One empty file; the lock of a point is a byte range at an offset made from its name. Between hosts the locks hold
    as far as the file system carries them.
    """

    def __init__(self, store: RecordStore) -> None:
        path = store.path.parent / ".kgen" / f"{store.path.name}.claims"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def take(self, point: str) -> bool:
        """Whether the point is ours now (False: another process measures it)."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _offset(point))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def free(self, point: str) -> None:
        """Give the point back."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _offset(point))

    def close(self) -> None:
        """Give all points back."""
        os.close(self._fd)


def _offset(point: str) -> int:
    return int.from_bytes(hashlib.sha256(point.encode()).digest()[:7], "big")

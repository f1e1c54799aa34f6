"""Compile results as records: what a module with its constants takes on an arch, so that nothing is compiled twice.

`configs/records/compile-<arch>.jsonl` grows to tens of thousands of lines that are read at every start, so a line is a
short array: `[1, key, shared, registers, spills, tmem, mma, cubin_bytes, crc]`, or `[1, key, kind, message, crc]` for
a failure.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kgen import jsonl
from kgen.environment import without_paths
from kgen.jsonl import SetAside
from kgen.types import FAILURE_KINDS, Failure, FailureKind, LaunchOptions, ResourceUse, Scalar

_SCHEMA = 2
"""The highest schema that is read: 2 has the warps of a kernel that runs more than its launch asks for, else a line has 1."""
_RESOURCE_TYPES = (int, int, int, int, str, int)


@dataclass(frozen=True)
class ProbeRecord:
    """A key (`probe_key`) and what compiling it gave."""

    key: str
    result: ResourceUse | Failure


@dataclass(frozen=True)
class ProbeLoad:
    """The results by key (the last line of a key counts), and the lines that were not used."""

    results: dict[str, ResourceUse | Failure]
    set_aside: list[SetAside]


def probe_key(
    module_text: str,
    constexprs: Mapping[str, Scalar],
    signature: Mapping[str, str],
    options: LaunchOptions,
    cc: int,
    triton: str,
) -> str:
    """32 hex digits over everything that decides the compiled code: equal keys mean equal cubins."""
    parts = [
        module_text, sorted(constexprs.items()), list(signature.items()),
        options.num_warps, options.num_stages, options.maxnreg, cc, triton,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class ProbeStore:
    """A file of compile results, with the guarantees of `RecordStore`: whole lines, many writers, nothing raises on
    load.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, records: Iterable[ProbeRecord]) -> None:
        """Add the results of one or more probes in one write."""
        jsonl.append_lines(self.path, [_line(record) for record in records])

    def load(self) -> ProbeLoad:
        """All results; lines that cannot be read are set aside with a sentence."""
        scan = jsonl.scan(jsonl.read_bytes(self.path), _decode)
        return ProbeLoad(dict(pair for pair, _ in scan.values), [aside for aside, _ in scan.set_aside])

    def compact(self, keep: Iterable[str] | None = None) -> list[SetAside]:
        """One line per key (of `keep`, if given), sorted by key; damaged lines go to `<name>.damaged`. Gives those."""
        wanted = None if keep is None else set(keep)
        jsonl.check_plain(self.path)
        with jsonl.locked(self.path):
            scan = jsonl.scan(jsonl.read_bytes(self.path), _decode)
            lines = {pair[0]: line for pair, line in scan.values if wanted is None or pair[0] in wanted}
            newer = [line for aside, line in scan.set_aside if not aside.damaged]
            damaged = [(aside, line) for aside, line in scan.set_aside if aside.damaged]
            jsonl.save_damaged(self.path, [line for _, line in damaged])
            jsonl.replace_file(self.path, [lines[key] for key in sorted(lines)] + newer)
        return [aside for aside, _ in damaged]


def _line(record: ProbeRecord) -> str:
    result = record.result
    if isinstance(result, Failure):
        return jsonl.seal([1, record.key, result.kind, without_paths(result.message)])
    numbers = [result.shared, result.registers, result.spills, result.tmem, result.mma, result.cubin_bytes]
    return jsonl.seal([1, record.key, *numbers] if result.warps is None else [2, record.key, *numbers, result.warps])


def _decode(value: Any) -> tuple[str, ResourceUse | Failure]:
    if type(value) is not list or len(value) < 4 or type(value[0]) is not int or type(value[1]) is not str:
        raise ValueError("the line is no compile result")
    if not 1 <= value[0] <= _SCHEMA:
        raise jsonl.NewerSchema(f"the line has schema {value[0]}, this kgen reads up to {_SCHEMA}: upgrade kgen")
    types = _RESOURCE_TYPES if value[0] == 1 else (*_RESOURCE_TYPES, int)
    if tuple(map(type, value[2:])) == types:
        return value[1], ResourceUse(*value[2:])
    if len(value) == 4 and value[2] in FAILURE_KINDS and type(value[3]) is str:
        return value[1], Failure(cast(FailureKind, value[2]), value[3])
    raise ValueError("the line is neither resources nor a failure")

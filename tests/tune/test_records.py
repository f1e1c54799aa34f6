"""Record files: whatever happens to the bytes, good lines are read and nothing is lost or invented."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kgen import jsonl
from kgen.errors import RecordError
from kgen.records import (
    SCHEMA,
    RecordStore,
    from_json,
    load_records,
    to_json,
)  # fmt: skip
from kgen.types import Failure, ResourceUse, TuneRecord

from .samples import make_candidate, make_record, make_spec

RECORDS = [
    make_record(),
    make_record(None),
    make_record(None, estimate_us=12.25, considered=40, rejected=(("compile", 3), ("resource", 9))),
    make_record(
        candidate=make_candidate("sm90_ws", 8, 1, fused=True, split=1, scale=0.1234567890123, mode="a", none=None)
    ),
    make_record(spec=make_spec(layout="v4", extra_topk=512, extra_page=64), resources=None, max_error=None),
    make_record(inputs=2),
    make_record(resources=ResourceUse(83968, 168, 0, 0, "wgmma", 40000, 12)),
]


# ---- one line -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS)
def test_round_trip_is_exact_and_deterministic(record: TuneRecord) -> None:
    line = to_json(record)
    assert from_json(line) == record
    assert to_json(from_json(line)) == line
    assert "\n" not in line and line.isascii()
    assert json.loads(line)["v"] == (2 if '"inputs"' in line or '"warps"' in line else 1)


def test_round_trip_keeps_the_types_of_tunables() -> None:
    back = from_json(to_json(RECORDS[3])).candidate
    assert back["fused"] is True and type(back["split"]) is int
    assert back["scale"] == 0.1234567890123  # identity: not rounded


def test_times_are_rounded_to_six_digits() -> None:
    line = to_json(make_record(12.345678901))
    assert json.loads(line)["measurement"]["median_us"] == 12.3457


def _line_of(value: dict[str, object]) -> str:
    value = {k: v for k, v in value.items() if k != "crc"}
    return jsonl.seal(value)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda v: v.update(extra=1), "unknown field extra"),
        (lambda v: v["spec"].update(top_k=1), "unknown field spec.top_k"),
        (lambda v: v["spec"].pop("topk"), "missing field spec.topk"),
        (lambda v: v.pop("template_hash"), "missing field template_hash"),
        (lambda v: v["spec"].update(topk="64"), "spec.topk is '64', not int"),
        (lambda v: v["spec"].update(topk=True), "spec.topk is True, not int"),
        (lambda v: v["candidate"]["launch"].pop("num_warps"), "missing field candidate.launch.num_warps"),
        (lambda v: v["candidate"].update(tunables={"a": []}), "candidate.tunables.a is not a plain value"),
        (lambda v: v.update(failure={"kind": "odd", "message": ""}), "failure.kind is 'odd'"),
        (lambda v: v.update(failure={"kind": "crash", "message": ""}), "exactly one of"),
        (lambda v: v.pop("measurement"), "exactly one of"),
        (lambda v: v["measurement"].update(median_us=0), "above zero"),
        (lambda v: v.update(inputs=2), "schema 1 states no recipe"),
        (lambda v: v.update(inputs=0, v=2), "recipes of inputs count from 1"),
        (lambda v: v.pop("v"), "no schema version"),
        (lambda v: v.update(v=SCHEMA + 1), "upgrade kgen"),
    ],
)
def test_strict_reading(change: object, sentence: str) -> None:
    value = json.loads(to_json(make_record()))
    change(value)  # type: ignore[operator]
    with pytest.raises(ValueError, match=sentence):
        from_json(_line_of(value))


def test_contradictory_or_infinite_records_are_never_written() -> None:
    with pytest.raises(RecordError, match="exactly one"):
        to_json(make_record(failure=Failure("wrong", "x")))
    with pytest.raises(RecordError, match="cannot be stored"):
        to_json(make_record(float("inf")))
    with pytest.raises(RecordError, match="above zero"):
        to_json(make_record(float("nan")))


def test_no_paths_in_stored_sentences() -> None:
    record = make_record(
        None, failure=Failure("compile", "ptxas /home/ann/.triton/cache/k.ptx failed at /opt/x/y.py:3")
    )
    text = to_json(record)
    assert "/home" not in text and "/opt" not in text and "k.ptx" in text and "y.py:3" in text


# ---- damaged files (B52) --------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    store = RecordStore(tmp_path / "records.jsonl")
    store.append_all(RECORDS)
    return store


def test_truncated_at_every_byte(store: RecordStore, tmp_path: Path) -> None:
    data = store.path.read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == 10]
    for size in range(len(data) + 1):
        scan = jsonl.scan(data[:size], lambda value: value)
        whole = sum(end <= size for end in ends)  # the newline itself may be missing
        assert len(scan.values) == whole, size
        boundary = size == 0 or size in ends or data[size - 1] == 10
        assert len(scan.set_aside) == (0 if boundary else 1)
    cut = RecordStore(tmp_path / "cut.jsonl")
    for size in random.Random(1).sample(range(len(data)), 60):
        cut.path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        assert cut.load().records == RECORDS[:whole]
        cut.append(RECORDS[0])  # heals the line that was cut off
        assert cut.load().records == [*RECORDS[:whole], RECORDS[0]]


def test_any_flipped_bit_is_noticed(store: RecordStore) -> None:
    data = store.path.read_bytes()
    rng = random.Random(2)
    path = store.path
    for _ in range(400):
        at = rng.randrange(len(data))
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(flipped))
        result = store.load()
        for record in result.records:
            assert record in RECORDS  # never another number
        assert len(result.records) >= len(RECORDS) - 2  # a newline may be hit


@pytest.mark.parametrize(
    "data",
    [b"", b"\n\n\r\n", b"\x00" * 99, b"[" * 100000, b"{" * 9, b"null\n1\n\"x\"\n[]\n{}", "ÿþ\n".encode("utf-16"),
     b"1" * 9999, bytes(range(256)) * 20, b'{"a":NaN}', b'{"crc":"00000000"}', b',"crc":"00000000"}'],
)  # fmt: skip
def test_junk_is_set_aside(data: bytes, tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "junk.jsonl")
    store.path.write_bytes(data)
    result = store.load()
    assert result.records == []
    if data.strip():
        assert result.set_aside and all(aside.reason for aside in result.set_aside)
        assert "set aside" in (result.warning("junk.jsonl") or "")
    store.append(RECORDS[0])
    assert store.load().records == [RECORDS[0]]


def test_sealed_junk_is_set_aside(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "junk.jsonl")
    lines = [jsonl.seal({}), jsonl.seal([]), jsonl.seal([1, "k"]), jsonl.seal({"v": []}), jsonl.seal({"v": 10**400})]
    store.path.write_text("\n".join(lines))
    assert len(store.load().set_aside) == 5


def test_bom_crlf_and_blank_lines_are_read(store: RecordStore) -> None:
    data = store.path.read_bytes()
    store.path.write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n\r\n"))
    assert store.load().records == RECORDS and store.load().set_aside == []


def test_missing_file_is_empty_and_directory_is_a_sentence(tmp_path: Path) -> None:
    assert load_records(tmp_path / "none.jsonl") == ([], [])
    with pytest.raises(RecordError, match="cannot be"):
        RecordStore(tmp_path).load()
    with pytest.raises(RecordError, match="cannot be opened"):
        RecordStore(tmp_path).append(RECORDS[0])


def test_quarantine_moves_damaged_lines_and_keeps_newer_ones(store: RecordStore) -> None:
    good = store.path.read_bytes()
    newer = jsonl.seal({"v": SCHEMA + 1, "all": "new"}).encode()
    store.path.write_bytes(b"bad \xff line\n" + good + newer + b"\n" + b'{"cut')
    moved = store.quarantine()
    assert [aside.line_no for aside in moved] == [1, len(RECORDS) + 3]
    assert store.path.read_bytes() == good + newer + b"\n"
    assert jsonl.damaged_path(store.path).read_bytes() == b'bad \xff line\n{"cut\n'
    assert store.quarantine() == [] and jsonl.damaged_path(store.path).read_bytes().count(b"\n") == 2


# ---- many writers (B53) ---------------------------------------------------------------------------------------------

WRITER = """
import sys
from dataclasses import replace
from kgen.records import RecordStore, from_json
line, path, base, count = sys.stdin.readline(), sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
record = from_json(line)
store = RecordStore(path)
for i in range(count):
    store.append(replace(record, template_hash=f"{base}-{i}"))
"""


def _writer(path: Path, base: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(base), str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert process.stdin is not None
    process.stdin.write(to_json(make_record()) + "\n")
    process.stdin.close()
    return process


def test_eight_processes_append_500_each(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "records.jsonl")
    writers = [_writer(store.path, base, 500) for base in range(8)]
    while any(writer.poll() is None for writer in writers):
        store.compact()  # rewrites at the same time must lose nothing either
        time.sleep(0.2)
    assert [writer.returncode for writer in writers] == [0] * 8
    result = store.load()
    assert result.set_aside == []
    expected = {f"{base}-{i}" for base in range(8) for i in range(500)}
    assert len(result.records) == 4000 and {record.template_hash for record in result.records} == expected


def test_kill_loses_at_most_the_last_line(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "records.jsonl")
    writer = _writer(store.path, 0, 10**6)
    while not store.path.exists() or store.path.stat().st_size < 50_000:
        time.sleep(0.02)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    result = store.load()
    assert len(result.set_aside) <= 1
    assert [record.template_hash for record in result.records] == [f"0-{i}" for i in range(len(result.records))]


def test_news_gives_each_whole_line_once(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "records.jsonl")
    assert store.news() == []
    store.append(RECORDS[0])
    assert store.news() == [RECORDS[0]] and store.news() == []
    line = to_json(RECORDS[1]).encode()
    with open(store.path, "ab") as file:
        file.write(line[:30])
    assert store.news() == []
    with open(store.path, "ab") as file:
        file.write(line[30:] + b"\n")
    assert store.news() == [RECORDS[1]]
    store.compact()
    assert store.news() == RECORDS[:2]

"""Old records leave their file and are kept: each line is in one of the two files, byte for byte, whatever happens between."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kgen import jsonl
from kgen.archive import archive_path, archive_records
from kgen.emit import build, template_hashes
from kgen.errors import RecordError
from kgen.records import RecordStore, load_records, merge, record_id, to_json
from kgen.types import INPUTS_RECIPE

from .samples import make_record, make_spec

HASHES = {"portable": "a" * 16}
FRESH = make_record(template_hash="a" * 16, inputs=INPUTS_RECIPE)
OLD_TEXT = make_record(template_hash="b" * 16, inputs=INPUTS_RECIPE)
NO_TEXT = make_record(template_hash="c" * 16, spec=make_spec(tokens=8))


def write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [to_json(r).encode() for r in (OLD_TEXT, FRESH, NO_TEXT)]
    return write(tmp_path / "card.jsonl", [*lines[:2], b'{"damaged', lines[2]])


def archived(path: Path) -> list[bytes]:
    return gzip.decompress(archive_path(path).read_bytes()).splitlines()


def test_moves_what_does_not_count_and_nothing_else(file: Path) -> None:
    done = archive_records(file, HASHES)
    assert (done.moved, done.kept) == (2, 2)
    assert file.read_bytes().splitlines() == [to_json(FRESH).encode(), b'{"damaged']
    assert archived(file) == [to_json(OLD_TEXT).encode(), to_json(NO_TEXT).encode()]
    before = archive_path(file).read_bytes()
    assert archive_records(file, HASHES).moved == 0
    assert archive_path(file).read_bytes() == before


def test_outdated_inputs_go_too(tmp_path: Path) -> None:
    outdated = make_record(template_hash="a" * 16, spec=make_spec(layout="bf16_d576", page=0), inputs=None)
    assert outdated.outdated  # bf16 decode times of recipe 1 do not count
    file = write(tmp_path / "card.jsonl", [to_json(outdated).encode(), to_json(FRESH).encode()])
    assert archive_records(file, HASHES).moved == 1
    assert archived(file) == [to_json(outdated).encode()]


def test_a_later_call_adds_to_the_archive(file: Path) -> None:
    archive_records(file, HASHES)
    archive_records(file, {"portable": "d" * 16})  # the text changed once more
    assert archived(file) == [to_json(r).encode() for r in (OLD_TEXT, NO_TEXT, FRESH)]
    assert file.read_bytes() == b'{"damaged\n'


def test_a_crash_between_the_two_files_loses_and_doubles_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def crash(path: Path, lines: list[bytes]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "replace_file", crash)
        with pytest.raises(KeyboardInterrupt):
            archive_records(file, HASHES)
    assert file.read_bytes() == before and len(archived(file)) == 2
    archive_records(file, HASHES)
    assert len(archived(file)) == 2 and file.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    "bytes_there",
    [b"no gzip", gzip.compress(b"a line\n", mtime=0)[:-9], b"\x1f\x8b\x08\x00"],
    ids=["no gzip", "cut off", "a header"],  # not the bytes: processes of one run must name a test alike
)
def test_an_archive_that_cannot_be_read_changes_nothing(file: Path, bytes_there: bytes) -> None:
    before = file.read_bytes()
    archive_path(file).parent.mkdir()
    archive_path(file).write_bytes(bytes_there)
    with pytest.raises(RecordError, match=r"card\.jsonl\.gz is damaged"):
        archive_records(file, HASHES)
    assert file.read_bytes() == before and archive_path(file).read_bytes() == bytes_there


def test_a_file_where_the_folder_should_be_is_a_sentence(file: Path) -> None:
    before = file.read_bytes()
    (file.parent / "archive").write_text("in the way")
    with pytest.raises(RecordError, match="cannot be made"):
        archive_records(file, HASHES)
    assert file.read_bytes() == before


def test_merge_takes_an_archive_back(file: Path) -> None:
    names = {record_id(r) for r in RecordStore(file).load().records}
    archive_records(file, HASHES)
    merge([archive_path(file)], file)
    assert {record_id(r) for r in load_records(file)[0]} == names


def test_the_tables_do_not_change(tmp_path: Path) -> None:
    """What is archived of the shipped records is what no entry comes from."""
    shipped = Path(__file__).resolve().parents[2] / "configs" / "records" / "h200.jsonl"
    records = RecordStore(shipped).load().records[-3000:] + [OLD_TEXT]
    file = write(tmp_path / "h200.jsonl", [to_json(r).encode() for r in records])
    before = build(records, archs=["sm90"]).files
    assert archive_records(file, template_hashes()).moved >= 1
    assert build(RecordStore(file).load().records, archs=["sm90"]).files == before


def test_the_command(file: Path) -> None:
    command = [sys.executable, "-m", "kgen", "records", "archive", "--json", "--file", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    [row] = json.loads(run.stdout)["files"]
    assert row == {"file": "card.jsonl", "moved": 3, "kept": 1, "archive": "card.jsonl.gz"}  # no template is "aaaa..."
    shown = subprocess.run(
        [*command[:4], "list", "--json", "--file", str(archive_path(file))], capture_output=True, text=True, timeout=120
    )
    assert json.loads(shown.stdout)["files"][0]["records"] == 3


def test_a_packed_file_is_only_read(file: Path, tmp_path: Path) -> None:
    """A rewrite or an added line would leave a .gz that nothing reads."""
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    before = packed.read_bytes()
    for write_to in (
        lambda: archive_records(packed, HASHES),
        lambda: merge([file], packed),
        lambda: RecordStore(packed).append(FRESH),
        lambda: RecordStore(packed).compact(),
        lambda: merge([file], tmp_path / "new.jsonl.gz"),
        lambda: RecordStore(tmp_path / "new.jsonl.gz").append(FRESH),
    ):
        with pytest.raises(RecordError, match=r"\.jsonl\.gz is packed and can only be read"):
            write_to()
    assert packed.read_bytes() == before and not (tmp_path / "new.jsonl.gz").exists()
    assert not archive_path(packed).exists() and not jsonl.damaged_path(packed).exists()


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "here" / "card.jsonl"
    link.parent.mkdir()
    link.symlink_to(file)
    assert archive_records(link, HASHES).moved == 2
    assert link.is_symlink() and file.read_bytes().splitlines() == [to_json(FRESH).encode(), b'{"damaged']
    assert len(archived(link)) == 2


def test_merge_takes_files_of_one_name(tmp_path: Path) -> None:
    """Two machines with the same card both write h200.jsonl."""
    for folder, record in (("one", FRESH), ("two", NO_TEXT)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "h200.jsonl", [to_json(record).encode()])
    into = tmp_path / "into.jsonl"
    assert merge([tmp_path / name / "h200.jsonl" for name in ("one", "two")], into).added == 2
    assert {record_id(r) for r in load_records(into)[0]} == {record_id(FRESH), record_id(NO_TEXT)}


def test_a_layout_that_is_not_known_stays(tmp_path: Path) -> None:
    """A newer kgen wrote it: no command may stop at it, move it or drop it."""
    newer = jsonl.seal(
        json.loads(to_json(OLD_TEXT).replace('"layout":"v32"', '"layout":"v9"'), object_hook=without_crc)
    )
    assert '"v9"' in newer
    file = write(tmp_path / "card.jsonl", [newer.encode(), to_json(FRESH).encode()])
    before = file.read_bytes()
    assert archive_records(file, HASHES).moved == 0
    loaded = RecordStore(file).load()
    assert loaded.records == [FRESH] and "the layout 'v9'" in loaded.set_aside[0].reason
    assert not RecordStore(file).compact() and newer.encode() in file.read_bytes().splitlines()
    assert sorted(file.read_bytes().splitlines()) == sorted(before.splitlines())


def test_a_merge_into_a_file_of_compile_results_takes_nothing_out_of_it(tmp_path: Path) -> None:
    line = jsonl.seal([1, "a compile result"]).encode()
    source, into = write(tmp_path / "a.jsonl", [to_json(FRESH).encode()]), write(tmp_path / "compile.jsonl", [line])
    merge([source], into)
    assert sorted(into.read_bytes().splitlines()) == sorted([line, to_json(FRESH).encode()])
    assert not jsonl.damaged_path(into).exists()


def without_crc(value: dict[str, object]) -> dict[str, object]:
    return {name: each for name, each in value.items() if name != "crc"}

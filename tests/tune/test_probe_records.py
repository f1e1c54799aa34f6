"""Compile results: many lines, read fast, with the guarantees of all record files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kgen import jsonl
from kgen.records import ProbeRecord, ProbeStore, probe_key
from kgen.types import Failure, LaunchOptions, ResourceUse

USE = ResourceUse(83968, 168, 0, 0, "wgmma", 40000)
FAILED = Failure("compile", "CompilationError: at 3:4: no.")


@pytest.fixture
def store(tmp_path: Path) -> ProbeStore:
    return ProbeStore(tmp_path / "compile-sm90.jsonl")


def test_round_trip_and_the_last_line_counts(store: ProbeStore) -> None:
    assert store.load().results == {}
    store.append([ProbeRecord("a", USE), ProbeRecord("b", FAILED)])
    store.append([ProbeRecord("a", FAILED)])
    store.append([])
    assert store.load().results == {"a": FAILED, "b": FAILED} and store.load().set_aside == []
    assert store.path.read_text().splitlines()[0].startswith('[1,"a",83968,168,0,0,"wgmma",40000,"')


def test_warps_of_partitions_are_kept_in_lines_that_an_older_kgen_lets_lie(store: ProbeStore) -> None:
    many = ResourceUse(200_000, 168, 0, 0, "wgmma", 40000, 12)
    store.append([ProbeRecord("a", many), ProbeRecord("b", USE)])
    assert store.load().results == {"a": many, "b": USE}
    assert [line[:3] for line in store.path.read_text().splitlines()] == ["[2,", "[1,"]


def test_no_paths(store: ProbeStore) -> None:
    store.append([ProbeRecord("a", Failure("compile", "ptxas fatal in /tmp/user/k.ptx"))])
    assert "/tmp" not in store.path.read_text() and "k.ptx" in store.path.read_text()


def test_forty_thousand_lines_load(store: ProbeStore) -> None:
    store.append([ProbeRecord(f"{number:032x}", USE if number % 5 else FAILED) for number in range(40_000)])
    assert len(store.load().results) == 40_000
    assert store.path.stat().st_size < 40_000 * 100


@pytest.mark.parametrize(
    "line",
    [
        [2, "k", 1],
        [1, "k"],
        [1, 5, 1, 1, 1, 1, "x", 1],
        [1, "k", 1, 1, 1, 1, "x", "1"],
        [1, "k", 1, 1, True, 1, "x", 1],
        [1, "k", "odd", "x"],
        [1, "k", "compile", 3],
        [1, "k", 1, 1, 1, 1, "x", 1, 1],
        [2, "k", 1, 1, 1, 1, "x", 1],
        [2, "k", 1, 1, 1, 1, "x", 1, None],
        [3, "k", 1, 1, 1, 1, "x", 1, 1],
        {"v": 1},
    ],
)
def test_strict_reading(store: ProbeStore, line: Any) -> None:
    store.path.write_text(jsonl.seal(line) + "\n")
    load = store.load()
    assert load.results == {} and len(load.set_aside) == 1


def test_damage_never_raises_and_never_invents(store: ProbeStore) -> None:
    records = [ProbeRecord(f"k{number}", USE if number % 3 else FAILED) for number in range(30)]
    store.append(records)
    data = store.path.read_bytes()
    known = {record.key: record.result for record in records}
    rng = random.Random(4)
    for _ in range(300):
        damaged = bytearray(data[: rng.randrange(len(data))])
        for _ in range(rng.randrange(4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        store.path.write_bytes(bytes(damaged))
        assert store.load().results.items() <= known.items()


def test_compact(store: ProbeStore) -> None:
    store.append([ProbeRecord("b", USE), ProbeRecord("a", USE), ProbeRecord("b", FAILED), ProbeRecord("old", USE)])
    with open(store.path, "ab") as file:
        file.write(b"junk\n" + jsonl.seal([9, "new", 1, 1]).encode())
    assert [aside.text for aside in store.compact(keep=["a", "b"])] == ["junk"]
    assert store.load().results == {"a": USE, "b": FAILED}
    assert [aside.damaged for aside in store.load().set_aside] == [False]
    assert jsonl.damaged_path(store.path).read_text() == "junk\n"


def test_probe_key_differs_when_anything_differs() -> None:
    base: dict[str, Any] = dict(
        module_text="x",
        constexprs={"A": 1},
        signature={"p": "*bf16"},
        options=LaunchOptions(4, 2),
        cc=120,
        triton="3.6.0",
    )
    changes: list[dict[str, Any]] = [
        {"module_text": "y"},
        {"constexprs": {"A": 2}},
        {"constexprs": {"A": True}},
        {"constexprs": {"B": 1}},
        {"signature": {"p": "*fp16"}},
        {"options": LaunchOptions(8, 2)},
        {"options": LaunchOptions(4, 3)},
        {"options": LaunchOptions(4, 2, 168)},
        {"cc": 121},
        {"triton": "3.9.0"},
    ]
    keys = {probe_key(**base), *(probe_key(**{**base, **change}) for change in changes)}
    assert len(keys) == 1 + len(changes)
    assert probe_key(**{**base, "constexprs": {"B": 2, "A": 1}}) == probe_key(
        **{**base, "constexprs": {"A": 1, "B": 2}}
    )

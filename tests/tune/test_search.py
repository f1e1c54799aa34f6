"""Searches: no point twice, the records are the truth, the study is disposable (B68, B70, B71, B73, B74)."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from kgen import storage
from kgen.errors import ConfigError
from kgen.search import ExhaustiveSearch, SearchPart, TpeSearch, make_search, valid_first
from kgen.types import Candidate, LaunchOptions, Scalar

from .samples import make_candidate


@dataclass(frozen=True)
class FakeAxis:
    name: str
    values: tuple[Scalar, ...]
    ordinal: bool = True


AXES = (
    FakeAxis("block_h", (16, 32, 64)),
    FakeAxis("block_k", (16, 32, 64, 128)),
    FakeAxis("splits", (1, 2, 4, 8, 16)),
    FakeAxis("fused", (True, False), ordinal=False),
    FakeAxis("only", (1,)),
    FakeAxis("num_warps", (2, 4, 8)),
    FakeAxis("num_stages", (1, 2, 3)),
)


def grid(family: str = "portable") -> list[Candidate]:
    out = []
    for h, k, splits, fused, only, warps, stages in itertools.product(*(axis.values for axis in AXES)):
        tunables = dict(block_h=h, block_k=k, splits=splits, fused=fused, only=only)
        if int(h or 0) * int(k or 0) <= 4096:  # a restriction
            out.append(Candidate.make(family, tunables, LaunchOptions(int(warps or 0), int(stages or 0))))
    return out


def cost(candidate: Candidate) -> float:
    h, k, splits = (int(candidate[name] or 0) for name in ("block_h", "block_k", "splits"))
    slow = abs(h - 32) / 8 + abs(k - 64) / 16 + abs(splits - 8) / 2 + 2 * bool(candidate["fused"])
    return 10.0 + slow + abs(candidate.launch.num_warps - 4) + candidate.launch.num_stages


FEASIBLE = grid()
PART = SearchPart(AXES, FEASIBLE)


def tpe(**options: object) -> TpeSearch:
    search = make_search([PART], **{"known": {}, **options})  # type: ignore[arg-type]
    assert isinstance(search, TpeSearch)
    return search


def drive(search: TpeSearch, count: int, fails: bool = False) -> dict[Candidate, float | None]:
    seen: dict[Candidate, float | None] = {}
    for _ in range(count):
        candidate = search.ask(0)
        assert candidate is not None and candidate not in seen and candidate in FEASIBLE
        seen[candidate] = None if fails and candidate["fused"] else cost(candidate)
        search.tell(candidate, seen[candidate])
    return seen


def best(seen: dict[Candidate, float | None]) -> float:
    return min(us for us in seen.values() if us is not None)


def test_exhaustive_gives_every_point_once_first_ones_first() -> None:
    few = FEASIBLE[:20]
    search = make_search([SearchPart(AXES, few)], known={few[3]: 1.0}, first=[few[9], few[9], make_candidate()])
    assert isinstance(search, ExhaustiveSearch)
    asked = [candidate for _ in range(19) if (candidate := search.ask(0))]
    assert asked[0] == few[9] and set(asked) == set(few) - {few[3]} and search.ask(0) is None
    search.release(few[5])
    assert search.ask(0) == few[5] and search.ask(0) is None


def test_tpe_never_repeats_and_finds_a_good_point() -> None:
    seen = drive(tpe(), 90)
    chance = random.Random(0).sample([cost(c) for c in FEASIBLE], 90)
    assert best(seen) <= min(chance)
    assert best(seen) <= 1.1 * min(map(cost, FEASIBLE))


def test_tpe_ends_when_all_points_are_taken() -> None:
    few = FEASIBLE[::40]
    search = make_search([SearchPart(AXES, few)], known={few[0]: None}, exhaustive_limit=0)
    asked = []
    while (candidate := search.ask(0)) is not None:
        asked.append(candidate)
        search.tell(candidate, cost(candidate))
    assert len(asked) == len(few) - 1 and set(asked) == set(few[1:])
    assert search.hits >= 0 and search.ask(0) is None


def test_failed_and_infeasible_points_are_pruned_not_failed() -> None:
    search = tpe()
    drive(search, 40, fails=True)
    states = {trial.state.name for trial in search._study.get_trials()}
    assert states == {"COMPLETE", "PRUNED"}


def test_first_candidates_come_first_and_are_valid() -> None:
    first = [FEASIBLE[7], make_candidate(block_k=float("nan")), FEASIBLE[3], FEASIBLE[7], make_candidate(block_k=5)]
    assert valid_first(first, FEASIBLE) == [FEASIBLE[7], FEASIBLE[3]]  # B73
    search = tpe(first=first)
    assert [search.ask(0), search.ask(0)] == [FEASIBLE[7], FEASIBLE[3]]


def test_workers_have_their_own_seeds_and_never_share_a_point() -> None:
    search = tpe(workers=4)
    running = [search.ask(worker) for worker in range(4)]
    assert len(set(running)) == 4
    alone = [tpe(seed=5, first_worker=worker).ask(0) for worker in range(3)]
    assert len(set(alone)) > 1  # B71: base + worker
    assert tpe(seed=5).ask(0) == tpe(seed=5).ask(0)


def test_released_point_comes_again() -> None:
    search = tpe()
    candidate = search.ask(0)
    assert candidate is not None
    search.release(candidate)
    rest = drive(search, len(FEASIBLE) // 8)
    assert candidate in search._open or candidate in rest


def test_telling_a_finished_trial_is_tolerated() -> None:
    messages: list[str] = []
    search = tpe(message=messages.append)
    candidate = search.ask(0)
    assert candidate is not None
    trial = search._trials[candidate]
    search._study.tell(trial, 1.0)
    search.tell(candidate, 2.0)
    search.tell(candidate, 2.0)
    assert messages == []  # the study need not be rebuilt for it


def test_two_families_take_turns_and_the_faster_gets_more() -> None:
    other = [Candidate.make("sm90_ws", {"block_k": k}, LaunchOptions(8, s)) for k in (64, 128) for s in (1, 2, 3)]
    axes = (FakeAxis("block_k", (64, 128)), FakeAxis("num_stages", (1, 2, 3)))
    search = make_search([PART, SearchPart(axes, other)], known={other[0]: 5.0})
    families = []
    for _ in range(12):
        candidate = search.ask(0)
        assert candidate is not None and candidate != other[0]
        families.append(candidate.family)
        search.tell(candidate, 3.0 if candidate.family == "sm90_ws" else cost(candidate))
    assert families.count("sm90_ws") == 5 and families[:6].count("sm90_ws") >= 3  # all of the faster one, early


def test_axes_must_cover_the_candidates() -> None:
    odd = Candidate.make("portable", {**dict(FEASIBLE[0].tunables), "block_k": 48}, LaunchOptions(4, 2))
    with pytest.raises(ConfigError, match="no axis lists"):
        make_search([SearchPart(AXES, [odd])], known={}, exhaustive_limit=0)
    with pytest.raises(ConfigError, match="tell its candidates apart"):
        make_search([SearchPart(AXES[:2], FEASIBLE)], known={})
    with pytest.raises(ConfigError, match="two search parts"):
        make_search([PART, PART], known={})


# ---- storages -------------------------------------------------------------------------------------------------------


def trials(search: TpeSearch) -> int:
    return sum(trial.state.name == "COMPLETE" for trial in search._study.get_trials())


def test_the_study_is_rebuilt_from_records(tmp_path: Path) -> None:
    url = f"journal:{tmp_path}/study.journal"
    first = tpe(storage=url)
    seen = drive(first, 25)
    before = trials(first)
    again = tpe(storage=url, known=seen)
    assert trials(again) == before >= 25  # nothing is added twice
    (tmp_path / "study.journal").unlink()
    lost = tpe(storage=url, known=seen)
    assert trials(lost) == 25
    assert not set(drive(lost, 20)) & set(seen)


@pytest.mark.parametrize("damage", ["junk", "truncated", "merged", "flipped", "zeros"])
def test_a_damaged_journal_is_renamed_and_rebuilt(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "study.journal"
    seen = drive(tpe(storage=f"journal:{path}"), 12)
    data = path.read_bytes()
    middle = data.index(b"\n", len(data) // 2)
    path.write_bytes(
        {
            "junk": b"\xff\x00 no json\n" + data,
            "truncated": data[: middle - 5] + data[middle:],
            "merged": data[:middle] + data[middle + 1 :],
            "flipped": data[: middle // 2] + b"\x00" + data[middle // 2 + 1 :],
            "zeros": data + b"\x00" * 64 + b"\n" + data[:50] + b"\n",
        }[damage]
    )
    damaged = path.read_bytes()
    messages: list[str] = []
    search = tpe(storage=f"journal:{path}", known=seen, message=messages.append)
    assert trials(search) == 12
    assert len(messages) == 1 and "study.journal.corrupt-1" in messages[0]
    assert (tmp_path / "study.journal.corrupt-1").read_bytes().startswith(damaged)  # B74: kept
    drive(search, 5)


def test_damage_in_the_middle_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    messages: list[str] = []
    search = tpe(storage=f"journal:{path}", message=messages.append)
    drive(search, 5)
    candidate = search.ask(0)
    assert candidate is not None
    assert trials(search) >= 5
    with open(path, "ab") as file:
        file.write(b"{half a li\n\n")
    search.tell(candidate, 12.0)
    assert "corrupt-1" in messages[0] and trials(search) == 6
    assert search._known[candidate] == 12.0


def test_grpc_before_a_journal_is_refused() -> None:
    for url, served in (("grpc+journal:x", None), ("grpc://host:1", "journal:x"), ("journal+grpc://host:1", None)):
        with pytest.raises(ConfigError, match="PostgreSQL behind the proxy"):
            storage.check_storage(url, served)
    storage.check_storage("grpc://host:1", "postgresql://db/x")
    storage.check_storage("grpc://host:1")
    storage.check_storage("postgresql+psycopg2://u:p@db/x")
    storage.check_storage(None)


def test_unknown_storages_are_refused_without_the_password() -> None:
    with pytest.raises(ConfigError, match="no study storage") as caught:
        storage.check_storage("redis://me:secret@host/0")
    assert "secret" not in str(caught.value) and "journal:FILE" in str(caught.value)
    with pytest.raises(ConfigError, match="no study storage"):
        tpe(storage="study.db")


def test_quarantine_never_overwrites(tmp_path: Path) -> None:
    url = f"journal:{tmp_path}/s"
    for number in (1, 2):
        (tmp_path / "s").write_text(str(number))
        assert storage.quarantine_journal(url) == tmp_path / f"s.corrupt-{number}"
    assert storage.quarantine_journal(url) is None and storage.quarantine_journal(None) is None

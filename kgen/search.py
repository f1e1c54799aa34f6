"""Which candidate to try next: all of them when they are few, else Optuna's TPE over ordinal axes.

A search never gives a candidate twice. The records are the truth: an Optuna study is rebuilt from them whenever it is
missing, behind or damaged, so a journal may be deleted at any time.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kgen.errors import ConfigError
from kgen.grid import AxisLike, Grid
from kgen.storage import import_optuna, open_storage, quarantine_journal
from kgen.types import Candidate

T = TypeVar("T")
_TRIES = 12


@dataclass(frozen=True)
class SearchPart:
    """The feasible candidates of one family, and the axes that they differ in."""

    axes: Sequence[AxisLike]
    feasible: Sequence[Candidate]


class Search(Protocol):
    """`ask` for a candidate, then `tell` its median in µs (None: it failed), or `release` it to be asked for later."""

    @property
    def strategy(self) -> str:
        """exhaustive or tpe."""
        ...

    @property
    def hits(self) -> int:
        """Proposals that were known already and therefore not tried again."""
        ...

    def ask(self, worker: int) -> Candidate | None:
        """A candidate that nobody has, or None when all are taken."""
        ...

    def tell(self, candidate: Candidate, median_us: float | None) -> None: ...

    def release(self, candidate: Candidate) -> None: ...


Known = Mapping[Candidate, float | None]
"""Median in µs of what was measured, None for what failed."""


def make_search(
    parts: Sequence[SearchPart],
    *,
    known: Known,
    first: Iterable[Candidate] = (),
    exhaustive_limit: int = 128,
    seed: int = 0,
    workers: int = 1,
    first_worker: int = 0,
    storage: str | None = None,
    study_name: str = "kgen",
    message: Callable[[str], None] = lambda text: None,
) -> Search:
    """Exhaustive when there are at most `exhaustive_limit` candidates, else TPE.

    `first` are tried before all others (the incumbent, neighbours' winners); those that are not feasible are left out.
    """
    parts = [part for part in parts if part.feasible]
    feasible = [candidate for part in parts for candidate in part.feasible]
    first = valid_first(first, feasible)
    if len(feasible) <= exhaustive_limit:
        return ExhaustiveSearch(feasible, known, first)
    families = [part.feasible[0].family for part in parts]
    if len(set(families)) != len(families):
        raise ConfigError("A family occurs in two search parts: give each family one part.")
    seeds = range(seed + first_worker, seed + first_worker + workers)
    searches: dict[str, Search] = {
        family: TpeSearch(part, known, first, seeds, storage, f"{study_name} {family}", message)
        for family, part in zip(families, parts, strict=True)
    }
    return next(iter(searches.values())) if len(searches) == 1 else FamilySearch(searches, known, first)


def valid_first(first: Iterable[Candidate], feasible: Iterable[Candidate]) -> list[Candidate]:
    """The candidates to start with: feasible ones, each once, none with a NaN (which equals nothing, itself
    included).
    """
    allowed = set(feasible)
    clean = (c for c in first if not any(isinstance(v, float) and math.isnan(v) for _, v in c.tunables))
    return [candidate for candidate in dict.fromkeys(clean) if candidate in allowed]


class ExhaustiveSearch:
    """Every candidate once, in the order given, `first` before the others."""

    strategy = "exhaustive"

    def __init__(self, feasible: Sequence[Candidate], known: Known, first: Sequence[Candidate] = ()) -> None:
        self.hits = 0
        self._queue = deque(c for c in dict.fromkeys([*first, *feasible]) if c not in known)

    def ask(self, worker: int) -> Candidate | None:
        return self._queue.popleft() if self._queue else None

    def tell(self, candidate: Candidate, median_us: float | None) -> None:
        pass

    def release(self, candidate: Candidate) -> None:
        self._queue.append(candidate)


class FamilySearch:
    """One search for each family: every third point goes to the family that was tried least, the others to the
    fastest.
    """

    strategy = "tpe"

    def __init__(self, searches: Mapping[str, Search], known: Known, first: Sequence[Candidate]) -> None:
        self._searches = searches
        self._first = deque(first)
        self._asked = dict.fromkeys(searches, 0)
        self._best = dict.fromkeys(searches, math.inf)
        for candidate, median_us in known.items():
            self._note(candidate, median_us)

    @property
    def hits(self) -> int:
        return sum(search.hits for search in self._searches.values())

    def ask(self, worker: int) -> Candidate | None:
        for family in self._order():
            candidate = self._searches[family].ask(worker)
            if candidate is not None:
                self._asked[family] += 1
                return candidate
        return None

    def tell(self, candidate: Candidate, median_us: float | None) -> None:
        self._note(candidate, median_us)
        self._searches[candidate.family].tell(candidate, median_us)

    def release(self, candidate: Candidate) -> None:
        self._searches[candidate.family].release(candidate)

    def _note(self, candidate: Candidate, median_us: float | None) -> None:
        if median_us is not None and candidate.family in self._best:
            self._best[candidate.family] = min(self._best[candidate.family], median_us)

    def _order(self) -> list[str]:
        families = list(self._searches)
        if self._first:  # each search starts with its own of these, in this order
            wanted = self._first.popleft().family
            return sorted(families, key=lambda family: family != wanted)
        if sum(self._asked.values()) % 3 == 0:
            return sorted(families, key=self._asked.__getitem__)
        return sorted(families, key=lambda family: (self._best[family], self._asked[family]))


class TpeSearch:
    """Optuna's TPE over the indices of axis values; one sampler per worker, each with its own seed.

    Infeasible and failed points are told as pruned, so that the sampler learns to stay away; after some fruitless
    proposals the nearest candidate that is left is taken.
    """

    strategy = "tpe"

    def __init__(
        self,
        part: SearchPart,
        known: Known,
        first: Sequence[Candidate],
        seeds: Sequence[int],
        storage: str | None,
        study_name: str,
        message: Callable[[str], None],
    ) -> None:
        self.hits = 0
        self._optuna = import_optuna()
        self._grid = Grid(part.axes, part.feasible)
        self._known = {c: us for c, us in known.items() if c in self._grid.params}
        self._open = {c: None for c in self._grid.params if c not in self._known}  # an ordered set
        self._first = deque(c for c in first if c in self._open)
        self._trials: dict[Candidate, Any] = {}
        self._random = random.Random(seeds[0])
        self._samplers = [self._sampler(seed, len(seeds)) for seed in seeds]
        self._storage, self._name, self._message = storage, study_name, message
        self._study = self._opened_study()

    def ask(self, worker: int) -> Candidate | None:
        candidate = self._pick(worker) if self._open else None
        if candidate is not None:
            del self._open[candidate]
        return candidate

    def tell(self, candidate: Candidate, median_us: float | None) -> None:
        self._open.pop(candidate, None)
        self._guarded(lambda: self._tell(self._trials.pop(candidate, None), candidate, median_us))
        self._known[candidate] = median_us  # last: a rebuilt study would hold it twice

    def release(self, candidate: Candidate) -> None:
        self._open[candidate] = None
        trial = self._trials.pop(candidate, None)
        if trial is not None:
            self._guarded(lambda: self._close(trial, None))

    def _pick(self, worker: int) -> Candidate:
        while self._first:
            candidate = self._first.popleft()
            if candidate in self._open:
                return candidate
        near: Candidate | None = None
        for _ in range(_TRIES):
            picked, wanted = self._guarded(lambda: self._propose(worker))
            if picked is not None:
                return picked
            near = self._grid.nearest(wanted, self._sample_open())
        assert near is not None
        return near

    def _propose(self, worker: int) -> tuple[Candidate | None, dict[str, int]]:
        """One proposal of the sampler: the candidate when it can be tried, and its coordinates."""
        self._study.sampler = self._samplers[worker % len(self._samplers)]
        trial = self._study.ask()
        wanted = self._grid.suggest(trial)
        candidate = self._grid.candidate(wanted)
        if candidate in self._open:
            assert candidate is not None
            self._trials[candidate] = trial
            return candidate, wanted
        self.hits += candidate is not None
        self._close(trial, self._known.get(candidate) if candidate is not None else None)
        return None, wanted

    def _sample_open(self) -> list[Candidate]:
        candidates = list(self._open)
        return candidates if len(candidates) <= 2000 else self._random.sample(candidates, 2000)

    def _tell(self, trial: Any, candidate: Candidate, median_us: float | None) -> None:
        if trial is not None:
            self._close(trial, median_us)
        else:
            self._study.add_trial(self._frozen(candidate, median_us))

    def _close(self, trial: Any, median_us: float | None) -> None:
        pruned = self._optuna.trial.TrialState.PRUNED
        if median_us is None:
            self._study.tell(trial, state=pruned, skip_if_finished=True)
        else:
            self._study.tell(trial, median_us, skip_if_finished=True)

    def _frozen(self, candidate: Candidate, median_us: float | None) -> Any:
        states = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            state=states.PRUNED if median_us is None else states.COMPLETE,
            params=self._grid.params[candidate],
            distributions=self._grid.distributions(),
            value=median_us,
        )

    def _sampler(self, seed: int, workers: int) -> Any:
        return self._optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=workers > 1)

    # ---- the study is disposable ----

    def _opened_study(self) -> Any:
        try:
            return self._synced_study(self._storage)
        except ConfigError:
            raise
        except Exception as error:
            return self._rebuilt_study(error)

    def _synced_study(self, storage: str | None) -> Any:
        study = self._optuna.create_study(
            storage=open_storage(storage), study_name=self._name, direction="minimize", load_if_exists=True
        )
        seen = {
            tuple(sorted(trial.params.items()))
            for trial in study.get_trials(deepcopy=False)
            if trial.state.is_finished()
        }
        missing = [c for c in self._known if tuple(sorted(self._grid.params[c].items())) not in seen]
        study.add_trials([self._frozen(candidate, self._known[candidate]) for candidate in missing])
        return study

    def _rebuilt_study(self, error: Exception) -> Any:
        """A study from the records alone, after the storage failed; a damaged journal is renamed, never deleted."""
        cause = f"{type(error).__name__}: {error}"
        moved = quarantine_journal(self._storage)
        if moved is None:
            self._storage = None
            self._message(f"The study storage failed ({cause}); the search goes on in memory, from the records.")
        else:
            self._message(
                f"The study journal is damaged ({cause}); it was renamed to {moved} and rebuilt from the records."
            )
        self._trials.clear()
        return self._synced_study(self._storage)

    def _guarded(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except Exception as error:
            self._study = self._rebuilt_study(error)
            return act()

"""Candidates as points of a grid: the index of each axis value, for samplers that step along ordinal axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kgen.errors import ConfigError
from kgen.storage import import_optuna
from kgen.types import Candidate, Scalar


class AxisLike(Protocol):
    """What is needed of an axis of `kgen.space`; `ordinal` values are ordered, so that neighbours resemble each
    other.
    """

    @property
    def name(self) -> str: ...
    @property
    def values(self) -> Sequence[Scalar]: ...
    @property
    def ordinal(self) -> bool: ...


class Grid:
    """The feasible candidates of one family by their coordinates; axes with a single value are left out."""

    def __init__(self, axes: Sequence[AxisLike], feasible: Sequence[Candidate]) -> None:
        self._axes = [axis for axis in axes if len(axis.values) > 1]
        index = {axis.name: {(type(v), v): i for i, v in enumerate(axis.values)} for axis in self._axes}
        self.params: dict[Candidate, dict[str, int]] = {}
        for candidate in feasible:
            values = {**vars(candidate.launch), **dict(candidate.tunables)}
            try:
                self.params[candidate] = {name: at[type(values[name]), values[name]] for name, at in index.items()}
            except KeyError:
                text = f"The candidate {candidate.slug} has a value that no axis lists: add it to the space."
                raise ConfigError(text) from None
        self._by_key = {_key(params): candidate for candidate, params in self.params.items()}
        if len(self._by_key) != len(self.params):
            raise ConfigError("The axes of a space do not tell its candidates apart: add the axis that they differ in.")

    def suggest(self, trial: Any) -> dict[str, int]:
        """The coordinates that an Optuna trial proposes."""
        return {
            axis.name: trial.suggest_int(axis.name, 0, len(axis.values) - 1)
            if axis.ordinal
            else trial.suggest_categorical(axis.name, list(range(len(axis.values))))
            for axis in self._axes
        }

    def distributions(self) -> dict[str, Any]:
        """What `suggest` draws from, in Optuna's terms."""
        make = import_optuna().distributions
        return {
            axis.name: make.IntDistribution(0, len(axis.values) - 1)
            if axis.ordinal
            else make.CategoricalDistribution(list(range(len(axis.values))))
            for axis in self._axes
        }

    def candidate(self, params: Mapping[str, int]) -> Candidate | None:
        """The feasible candidate at these coordinates, or None."""
        return self._by_key.get(_key(params))

    def nearest(self, wanted: Mapping[str, int], candidates: Sequence[Candidate]) -> Candidate:
        """The candidate with the fewest steps along the axes."""
        return min(candidates, key=lambda candidate: self._steps(wanted, self.params[candidate]))

    def _steps(self, a: Mapping[str, int], b: Mapping[str, int]) -> int:
        apart = [(axis.ordinal, abs(a[axis.name] - b[axis.name])) for axis in self._axes]
        return sum(steps if ordinal else 2 * (steps > 0) for ordinal, steps in apart)


def _key(params: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(params.items()))

"""What a person sees while tuning runs, and what is left when it ends. Everything goes to stderr; stdout is for
results.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from kgen.jobs import Outcome
from kgen.types import Candidate


@dataclass(frozen=True)
class SpecSummary:
    """What came of one spec. Times in µs, durations in s."""

    spec: str
    strategy: str  # exhaustive or tpe
    feasible: int
    known: int  # points that records of earlier runs already had
    tried: int  # points of this run
    failures: tuple[tuple[str, int], ...]  # by kind, of all runs
    rejected: tuple[tuple[str, int], ...]  # by restriction or compile result, before any run
    hits: int  # proposals that were known already
    winner: str | None = None
    winner_us: float | None = None
    incumbent: str | None = None
    incumbent_us: float | None = None
    kept_incumbent: bool = False
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class TuneSummary:
    """The end of a run: a summary for each spec that was reached. `exit_code` is 130 after Ctrl-C, 1 with errors,
    else 0.
    """

    specs: tuple[SpecSummary, ...]
    planned: int
    interrupted: bool
    seconds: float
    store: str  # the file's name
    set_aside: int = 0  # lines of the record file that could not be read

    @property
    def tried(self) -> int:
        return sum(spec.tried for spec in self.specs)

    @property
    def errors(self) -> list[str]:
        return [spec.error for spec in self.specs if spec.error is not None]

    @property
    def exit_code(self) -> int:
        return 130 if self.interrupted else int(bool(self.errors))

    def to_json(self) -> str:
        """One line of JSON with every field and `exit_code`."""
        return json.dumps({**asdict(self), "tried": self.tried, "exit_code": self.exit_code})

    def lines(self) -> list[str]:
        """For people: one line per spec, then the totals."""
        out = [_spec_line(spec) for spec in self.specs]
        left = self.planned - len(self.specs)
        end = f"{self.tried} points tried in {self.seconds:.0f} s, stored in {self.store}."
        if self.interrupted:
            end += " Interrupted: run the same command again to go on."
        elif left:
            end += f" The budget ended before {left} of {self.planned} specs: run again to go on."
        return [*out, end]


def _spec_line(spec: SpecSummary) -> str:
    if spec.error is not None:
        return f"{spec.spec}: {spec.error}"
    if spec.winner is None or spec.winner_us is None:
        return f"{spec.spec}: nothing measured yet"
    text = f"{spec.spec}: {spec.winner_us:.2f} µs {spec.winner}"
    if spec.kept_incumbent:
        return text + " (incumbent kept: nothing beat it by more than the noise)"
    if spec.incumbent_us is not None and spec.incumbent != spec.winner:
        return text + f" (incumbent took {spec.incumbent_us:.2f} µs)"
    return text


class Reporter(Protocol):
    """Told about every step of a run; it never changes what happens."""

    def spec_started(self, slug: str, total: int | None, known: int, strategy: str) -> None:
        """`total` points will be tried (None: until the time is over), of which `known` are already recorded."""
        ...

    def trial(self, candidate: Candidate, outcome: Outcome) -> None: ...

    def message(self, text: str) -> None: ...

    def spec_done(self, summary: SpecSummary) -> None: ...

    def close(self) -> None: ...


class NullReporter:
    """Says nothing."""

    def spec_started(self, slug: str, total: int | None, known: int, strategy: str) -> None:
        pass

    def trial(self, candidate: Candidate, outcome: Outcome) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def spec_done(self, summary: SpecSummary) -> None:
        pass

    def close(self) -> None:
        pass


class Tally:
    """The counts of the current spec."""

    def __init__(self, slug: str, total: int | None, known: int) -> None:
        self.slug, self.total, self.done, self.fresh = slug, total, known, 0
        self.failures: Counter[str] = Counter()
        self.best: Candidate | None = None
        self.best_us = float("inf")
        self.start = time.monotonic()

    def add(self, candidate: Candidate, outcome: Outcome) -> bool:
        """Count a trial; whether it is the best so far."""
        self.done += 1
        self.fresh += 1
        if outcome.failure is not None:
            self.failures[outcome.failure.kind] += 1
            return False
        assert outcome.measurement is not None
        if outcome.measurement.median_us >= self.best_us:
            return False
        self.best, self.best_us = candidate, outcome.measurement.median_us
        return True

    def text(self) -> str:
        rate = self.fresh / max(time.monotonic() - self.start, 1e-9)
        parts = [f"{self.done}/{self.total}" if self.total is not None else str(self.done), f"{rate:.2f} trials/s"]
        if self.total is not None and self.fresh:
            parts.append(f"{max(0, self.total - self.done) / rate:.0f} s left")
        if self.best is not None:
            parts.append(f"best {self.best_us:.2f} µs {self.best.slug}")
        parts += [f"{count} {kind}" for kind, count in sorted(self.failures.items())]
        return ", ".join(parts)


class PlainReporter(NullReporter):
    """Lines for logs: each new best, and at most one line every `every_s` seconds."""

    def __init__(self, stream: TextIO | None = None, every_s: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self._every_s = every_s
        self._tally = Tally("", None, 0)
        self._last = 0.0

    def spec_started(self, slug: str, total: int | None, known: int, strategy: str) -> None:
        self._tally = Tally(slug, total, known)
        self._last = time.monotonic()
        points = "points until the time is over" if total is None else f"{total} points"
        self._print(f"{slug}: {strategy}, {points}, {known} known")

    def trial(self, candidate: Candidate, outcome: Outcome) -> None:
        better = self._tally.add(candidate, outcome)
        if better or time.monotonic() - self._last >= self._every_s:
            self._last = time.monotonic()
            self._print(f"{self._tally.slug}: {self._tally.text()}")

    def message(self, text: str) -> None:
        self._print(text)

    def spec_done(self, summary: SpecSummary) -> None:
        self._print(_spec_line(summary))

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveReporter(NullReporter):
    """A live status line on a terminal, with finished specs above it. Needs rich."""

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._tally = Tally("", None, 0)
        self._live.start()

    def spec_started(self, slug: str, total: int | None, known: int, strategy: str) -> None:
        self._tally = Tally(slug, total, known)
        self._show()

    def trial(self, candidate: Candidate, outcome: Outcome) -> None:
        self._tally.add(candidate, outcome)
        self._show()

    def message(self, text: str) -> None:
        self._console.print(self._text(text))

    def spec_done(self, summary: SpecSummary) -> None:
        self._console.print(self._text(_spec_line(summary)))

    def close(self) -> None:
        self._live.stop()

    def _show(self) -> None:
        self._live.update(self._text(f"{self._tally.slug}: {self._tally.text()}"))

    def _text(self, text: str) -> Any:
        from rich.text import Text

        return Text(text)  # no markup: a slug may hold brackets


def make_reporter(stream: TextIO | None = None) -> Reporter:
    """Live on a terminal where rich is installed, plain lines otherwise."""
    stream = stream or sys.stderr
    if stream.isatty():
        try:
            return LiveReporter(stream)
        except ImportError:
            pass
    return PlainReporter(stream)

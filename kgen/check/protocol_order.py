"""Check of a cluster's barrier protocol: what is ordered before what in every interleaving, instead of all interleavings.

Two CTAs have too many interleavings to visit. But nobody chooses: each partition does the same steps whatever the others do, and
a wait depends on nothing but its barrier's phase. So one run says which arrivals make up which phase and which phase each wait
was for, and from that follows an order of steps: a partition's own steps in a row, what happens in the background behind its
issue, and a wait behind all that completed its phase and the ones before. Two checks show that no interleaving deviates from it:

* arrivals: whatever counts in a phase comes behind all that completed the phase before, so that a phase is always made of the same;
* lapped: a wait for phase k begins when phase k - 1 is complete, so that it cannot take phase k - 2 for its own, and phase k + 1
  cannot complete before it has returned.

That they suffice, by induction: let the steps done so far be closed under the order. They fill the phases of a barrier one after
the other, so that what the barrier holds follows from them. The next step is done behind all that is ordered before it: for a wait
anything else would mean that it returned with another phase of the same parity, an earlier or a later one, which "lapped" excludes.
And where steps are left, one of them can be done, so that there is no deadlock. Hence the sets of steps that can have been done
are exactly the closed ones, and two uses of the same bytes can go on at once exactly if neither's end is ordered before
the other's beginning:

* race: two such uses, one of them writing; own: the same within a partition;
* early, ended: something said to a CTA that may not have started, or may have ended; a copy from a CTA that may have ended.

Bytes count as arrivals do: a phase is complete when its arrivals and the bytes that these expect have come. What is said to the
other CTA comes at any later time, a partition's arrivals at one barrier in their order; but a meeting waits for the arrivals that
were sent before (its arrive is a release).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from .gluon_model import Barrier, Event, Trace
from .protocol_agents import Atoms, Fault, key_of


@dataclass(eq=False)
class Step:
    """A wait, or something that counts at a barrier (arrivals; bytes: expected, or below 0 those that come), or neither."""

    number: int
    name: str
    event: Event | None
    barrier: Barrier | None = None
    waits: bool = False
    parity: int = 0
    arrivals: int = 0
    bytes: int = 0
    after: list[Step] = field(default_factory=list)
    phase: int = -1  # complete when its wait returned, or which this belongs to
    before: int = 0  # bits: the steps that are ordered before, and itself

    @property
    def words(self) -> str:
        assert self.event is not None
        return f"{self.name} in line {self.event.site}"


@dataclass(eq=False)
class Use:
    """A use of some atoms of shared memory by trace `owner`: it begins at any time after a step, and is over once another is done
    (None: never). `event`, `end_event`: positions in the trace; `apart`: goes on in the background."""

    owner: int
    words: str
    writes: bool
    place: int  # the allocation
    atoms: int
    begin: Step
    event: int
    apart: bool = False
    end: Step | None = None
    end_event: int = 1 << 30


class Order:
    """The steps and uses of some traces; the barrier operations of lines in `without` are left out."""

    def __init__(self, traces: Sequence[Trace], atoms: Atoms, without: Collection[int] = ()) -> None:
        self.traces = traces
        self._atoms = atoms
        self._without = without
        self.steps: list[Step] = []
        self.uses: list[Use] = []
        self.posts: list[
            tuple[int, Step, Step, bool]
        ] = []  # CTA that is spoken to, issue, landing, whether it is a copy
        self.starts = {cta: self._step("", None) for cta in sorted({trace.cta for trace in traces})}
        self.threads = [self._thread(i, trace) for i, trace in enumerate(traces)]

    def _step(self, name: str, event: Event | None, *after: Step) -> Step:
        step = Step(len(self.steps), name, event, after=list(after))
        self.steps.append(step)
        return step

    def _counts(self, step: Step, arrivals: int, size: int = 0) -> Step:
        assert step.event is not None
        step.barrier, step.arrivals, step.bytes = step.event.barrier, arrivals, size
        return step

    def _thread(self, owner: int, trace: Trace) -> list[Step]:
        """The steps of a partition in their order, the first of which is the start of its CTA."""
        steps = [self.starts[trace.cta]]
        open_: dict[int, Use] = {}  # by number of the access
        copies: list[Use] = []  # cp.async that no arrive covers yet
        ending: list[Use] = []  # over with the next step
        fired: list[Step] = []
        posts: list[Step] = []

        def step(event: Event) -> Step:
            made = self._step(trace.name, event, steps[-1])
            steps.append(made)
            for use in ending:
                use.end = made
            ending.clear()
            return made

        for at, event in enumerate(trace.events):
            if event.kind in ("begin", "copy"):
                use = self._use(owner, event, at, steps[-1], event.kind == "copy")
                open_[event.number] = use
                if use.apart:
                    copies.append(use)
            elif event.kind in ("end", "copied"):
                use = open_.pop(event.number)
                use.apart, use.end_event = False, at
                ending.append(use)
                copies = [copy for copy in copies if copy is not use]
            elif event.site in self._without:
                continue
            elif event.kind == "wait":
                made = step(event)
                made.barrier, made.waits, made.parity = event.barrier, True, event.number
            elif event.kind == "fire":
                landing = self._step(trace.name, event, step(event), *fired[-1:])
                fired.append(self._counts(landing, event.number))
                for use in copies:
                    use.end = landing
                copies = []
            elif event.kind == "post":
                issue = step(event)
                before = [post for post in posts if post.barrier is event.barrier]  # of one thread, at one address
                landing = self._counts(self._step(trace.name, event, issue, *before[-1:]), 1)
                posts.append(landing)
                self.posts.append((1 - trace.cta, issue, landing, False))
            elif event.kind == "send":
                self._send(owner, event, at, step(event))
            elif event.kind == "meet":
                made = self._counts(step(event), 1)
                made.after += posts
                posts = []
                made = step(event)
                made.barrier, made.waits, made.parity = event.barrier, True, event.number
            else:
                self._counts(step(event), event.number, event.size)
        return steps

    def _send(self, owner: int, event: Event, at: int, issue: Step) -> None:
        landing = self._counts(self._step(issue.name, event, issue), 0, -event.size)
        cta = self.traces[owner].cta
        self.posts.append((1 - cta, issue, landing, True))
        assert event.region is not None and event.target is not None
        for region, writes in ((event.region, False), (event.target, True)):
            verb = "copies to the other CTA's" if writes else "has a copy read"
            words = f"{verb} {region.allocation.name} (line {event.site})"
            self.uses.append(
                Use(owner, words, writes, id(region.allocation), self._atoms[key_of(region)], issue, at, True, landing)
            )

    def _use(self, owner: int, event: Event, at: int, begin: Step, apart: bool) -> Use:
        assert event.region is not None
        verb = "copies to" if apart else "writes" if event.writes else "reads"
        words = f"{verb} {event.region.allocation.name} (line {event.site})"
        place, atoms = id(event.region.allocation), self._atoms[key_of(event.region)]
        self.uses.append(Use(owner, words, event.writes, place, atoms, begin, at, apart))
        return self.uses[-1]

    # ---------------------------------------------------------------------------------- one run

    def check(self) -> Fault | None:
        return self._run() or self._arrivals() or self._lapped() or self._remote() or self._races()

    def _run(self) -> Fault | None:
        """Do all steps once, each as soon as it can be done; their phases and their order follow."""
        self.parts: dict[Barrier, list[int]] = defaultdict(lambda: [0, 0])  # bits of the steps of each phase, from 1 on
        reached: dict[Barrier, list[int]] = defaultdict(lambda: [0])  # bits of all that lies before each complete phase
        state: dict[Barrier, list[int]] = defaultdict(lambda: [0, 0])  # arrivals and bytes of the phase that is filling
        left = {step: len(step.after) for step in self.steps}
        followers = defaultdict(list)
        for step in self.steps:
            for before in step.after:
                followers[before].append(step)
        ready = [step for step in self.steps if not left[step]]
        waiting: dict[Barrier, list[Step]] = defaultdict(list)
        while ready:
            step = ready.pop()
            barrier = step.barrier
            if barrier is not None and step.waits:
                phases = len(reached[barrier]) - 1
                if phases & 1 == step.parity:
                    waiting[barrier].append(step)
                    continue
                step.phase = phases
                step.before |= reached[barrier][phases]
            for before in step.after:
                step.before |= before.before
            step.before |= 1 << step.number
            if barrier is not None and not step.waits:
                fault = self._count(step, barrier, state[barrier], reached[barrier])
                if fault:
                    return fault
                ready += waiting.pop(barrier, [])
            for follower in followers[step]:
                left[follower] -= 1
                if not left[follower]:
                    ready.append(follower)
        stuck = [step for steps in waiting.values() for step in steps]
        return Fault("deadlock", self._deadlock(stuck, reached, state)) if stuck else None

    def _count(self, step: Step, barrier: Barrier, filling: list[int], reached: list[int]) -> Fault | None:
        if not step.arrivals and not step.bytes:
            return None
        step.phase = len(reached)
        parts = self.parts[barrier]
        parts[step.phase] |= 1 << step.number
        filling[0] += step.arrivals
        filling[1] += step.bytes
        if filling[0] > barrier.count:
            return Fault(
                "arrivals",
                f"{step.words} brings {step.arrivals} arrivals to {barrier.name}, where "
                f"{barrier.count - filling[0] + step.arrivals} of {barrier.count} are missing.",
            )
        if filling[0] == barrier.count and filling[1] < 0:
            return Fault(
                "arrivals", f"{step.words} makes {-filling[1]} bytes more in a phase of {barrier.name} than it expects."
            )
        if filling == [barrier.count, 0]:
            everything = reached[-1]
            for number in bits_of(parts[step.phase]):
                everything |= self.steps[number].before
            reached.append(everything)
            parts.append(0)
            filling[:] = [0, 0]
        return None

    # ---------------------------------------------------------------------------------- all runs

    def _arrivals(self) -> Fault | None:
        for barrier, parts in self.parts.items():
            for phase in range(2, len(parts)):
                for number in bits_of(parts[phase]):
                    step = self.steps[number]
                    missing = parts[phase - 1] & ~step.before
                    if missing:
                        other = self.steps[next(bits_of(missing))]
                        return Fault(
                            "arrivals",
                            f"{step.words} may count in phase {phase - 1} of {barrier.name}, before {other.words} does.",
                        )
        return None

    def _lapped(self) -> Fault | None:
        for step in self.steps:
            if not step.waits:
                continue
            barrier = step.barrier
            assert barrier is not None
            parts = self.parts[barrier]
            start = step.after[0].before
            early = step.phase > 1 and parts[step.phase - 1] & ~start
            following = step.phase + 1
            complete = following < len(parts) - 1
            late = complete and not any(self.steps[n].before >> step.number & 1 for n in bits_of(parts[following]))
            if early or late:
                return Fault(
                    "lapped",
                    f"{step.words} waits for parity {step.parity} of {barrier.name}, which may be "
                    f"{'two phases behind' if early else 'a phase further'} by then.",
                )
        return None

    def _remote(self) -> Fault | None:
        for cta, issue, landing, copies in self.posts:
            what = f"{landing.words} {'copies' if copies else 'arrives'} to CTA {cta}"
            if not issue.before >> self.starts[cta].number & 1:
                return Fault("early", f"{what}, which may not have its barriers yet.")
            for there in {cta, 1 - cta} if copies else {cta}:
                ends = (steps[-1] for steps, trace in zip(self.threads, self.traces, strict=True) if trace.cta == there)
                if not any(end.before >> landing.number & 1 for end in ends):
                    return Fault("ended", f"{what}, when CTA {there} may have ended.")
        return None

    def _races(self) -> Fault | None:
        places: dict[int, list[Use]] = defaultdict(list)
        for one in self.uses:
            for two in places[one.place]:
                if one.atoms & two.atoms and (one.writes or two.writes):
                    first, second = (two, one) if two.event <= one.event else (one, two)
                    same = one.owner == two.owner
                    if self._apart_in_own(first, second) if same else self._over(one, two) or self._over(two, one):
                        continue
                    names = [self.traces[use.owner].name for use in (first, second)]
                    if same and not (first.apart and first.end):
                        sentence = f"{names[0]} {second.words} while its own {first.words} is not known to be over."
                        return Fault("own", sentence)
                    return Fault("race", f"{names[0]} {first.words} while {names[1]} {second.words}.")
            places[one.place].append(one)
        return None

    @staticmethod
    def _over(one: Use, two: Use) -> bool:
        """Whether one is over when two begins, in every run."""
        return one.end is not None and bool(two.begin.before >> one.end.number & 1)

    def _apart_in_own(self, first: Use, second: Use) -> bool:
        """Of two uses of one partition, the first of which was begun earlier."""
        if first.event == second.event:
            return True  # both ends of a copy
        if first.apart:
            return self._over(first, second)
        return first.end_event < second.event

    def _deadlock(self, stuck: list[Step], reached: dict[Barrier, list[int]], state: dict[Barrier, list[int]]) -> str:
        words = []
        for step in stuck:
            barrier = step.barrier
            assert barrier is not None
            arrived, size = state[barrier]
            coming = f", {size} bytes missing" if size > 0 else ""
            words.append(
                f"{step.words} waits for parity {step.parity} of {barrier.name} ({len(reached[barrier]) - 1} phases complete, "
                f"{arrived} of {barrier.count} arrivals{coming})"
            )
        return "Deadlock: " + "; ".join(words) + "."


def bits_of(word: int) -> Iterator[int]:
    while word:
        low = word & -word
        yield low.bit_length() - 1
        word ^= low

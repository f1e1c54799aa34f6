"""What one program does in the protocol tests, and its traces, which several tests look at.

One program serves all items, so that rings and parities go round several times and items of different lengths follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kgen.check.gluon_model import Trace
from kgen.check.protocol import Protocol

from .forms import usual
from .running import Form, traces_of


@dataclass(frozen=True)
class Work:
    """What one program does: an item per token and split."""

    lengths: tuple[int, ...]
    splits: int = 1
    extra: tuple[int, ...] = ()

    @property
    def slug(self) -> str:
        return "-".join(map(str, self.lengths + self.extra)) + f"x{self.splits}"


WORKS = (
    Work((64,)),
    Work((200, 130)),
    Work((64,) * 6),
    Work((200, 0, 64, 300)),
    Work((300, 70), splits=3),
    Work((580, 600)),
)
LONG = Work((2240,))
"""More tiles than any ring has places."""
DUAL_WORKS = (Work((100, 0, 70), 1, (64, 130, 0)), Work((200, 64), 3, (100, 30)))


def works_of(layout: str, form: Form) -> tuple[Work, ...]:
    if form.family == "sm90_rs_fp8" and dict(form.tunables)["block_h"] == 16:  # its barriers are those of 32 heads
        return (*WORKS[:2], WORKS[4], *(DUAL_WORKS[:1] if layout == "v4" else ()))
    return WORKS + (DUAL_WORKS if layout == "v4" else ()) + ((LONG,) if form in usual(layout) else ())


@cache
def traces(form: Form, layout: str, work: Work) -> list[Trace]:
    # a form that is not persistent serves one item per program: here the first
    return traces_of(form, layout, work.lengths, work.splits, work.extra)


@cache
def protocol(form: Form, layout: str, work: Work) -> Protocol:
    return Protocol(traces(form, layout, work))

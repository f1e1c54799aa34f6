"""How a matrix reaches every tier of the tables: calls that are aligned or not, with or without a stated scale range.

The cases themselves come with q and indices as slices of wider buffers, which the Hopper families do not serve. Of every
three cases one stays so, one is aligned, and one is aligned and states the range of its caches' scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kgen.runtime.families import FAMILIES
from kgen.verify_cases import VerifyCase, cases_of

STATED = ("stated", True)
"""Flag of a case whose call states the scale range that its caches' bytes have."""

_WITH_SCALES = FAMILIES["sm90_ws_fp8"].layouts
_HOPPER = FAMILIES["sm90_few"].layouts


def formed_cases(suite: str, device: str) -> list[VerifyCase]:
    """The cases of a suite in their three forms; the full one has every core case once more in the form that asks most, and
    the few of the sanitizer are all there in every form. A kernel may have another form for calls that do not ask for lse
    (`families.exact_sums`): some of the cases that state their scales are there without it as well."""
    cases = in_turns(cases_of(suite, device))
    if suite == "sanitizer":
        few = cases_of(suite, device)
        cases = few + [form(case) for case in few if case.spec.layout in _HOPPER for form in (aligned, asking_most)]
    if suite == "full":
        core = [case for case in cases_of("core", device) if case.spec.layout in _HOPPER]
        cases += [replace(most, suite="hopper", slug=f"hopper/{most.slug}") for most in map(asking_most, core)]
    asked = [case for case in cases if STATED in case.flags and {("return_lse", True)} == _special(case)]
    cases += [without_lse(case) for case in asked[:: 1 if suite == "sanitizer" else 3]]
    return list({case.slug: case for case in cases}.values())


def in_turns(cases: Sequence[VerifyCase]) -> list[VerifyCase]:
    forms = (lambda case: case, aligned, asking_most)
    return [forms[place % 3](case) for place, case in enumerate(cases)]


def aligned(case: VerifyCase) -> VerifyCase:
    """The case with contiguous q and indices."""
    if not case.spec.q_pad:
        return case
    spec = replace(case.spec, q_pad=False)
    return replace(case, spec=spec, slug=f"{case.slug}/aligned")


def _special(case: VerifyCase) -> set[tuple[str, object]]:
    """Flags of a case but for those that `without_lse` leaves alone."""
    return {flag for flag in case.flags if flag not in (STATED, ("return_max_logits", True), ("own_out", True))}


def without_lse(case: VerifyCase) -> VerifyCase:
    """The case with a call that does not ask for lse."""
    flags = tuple(flag for flag in case.flags if flag != ("return_lse", True))
    suite = case.suite if case.suite == "sanitizer" else "no_lse"
    return replace(case, flags=flags, suite=suite, slug=f"no_lse/{case.slug}")


def asking_most(case: VerifyCase) -> VerifyCase:
    """Aligned, and stating its scales where a kernel could use that."""
    case = aligned(case)
    if case.spec.layout not in _WITH_SCALES:
        return case
    return replace(case, flags=(*case.flags, STATED), slug=f"{case.slug}/stated")

"""Which calls a candidate may serve. A table keeps the fastest of each tier, so the finals of a tuning run need each one's."""

from __future__ import annotations

from collections.abc import Callable

from kgen.runtime.families import FAMILIES
from kgen.types import Candidate


def is_fp16(candidate: Candidate) -> bool:
    """Whether a candidate keeps latents in fp16, which a caller must allow by stating a scale range."""
    return dict(candidate.tunables).get("latent") == "fp16"


def is_gluon(candidate: Candidate) -> bool:
    """Whether a candidate needs an aligned call, a GPU and a Triton inside its family's range."""
    family = FAMILIES.get(candidate.family)
    return family is not None and family.gluon


def is_clustered(candidate: Candidate) -> bool:
    """Whether a candidate is launched in clusters of blocks, for which the range of Tritons is narrower than for other Gluon."""
    family = FAMILIES.get(candidate.family)
    return family is not None and family.ctas > 1


TIERS: tuple[Callable[[Candidate], bool], ...] = (
    lambda candidate: True,
    lambda candidate: not is_fp16(candidate),
    lambda candidate: not is_clustered(candidate),
    lambda candidate: not is_clustered(candidate) and not is_fp16(candidate),
    lambda candidate: not is_gluon(candidate),
)
"""What may serve: anything; a call without a stated scale range; the same two where clusters cannot be launched; any call and any
Triton (and its interpreter)."""

"""Whether a row's goal is met: ours against the best peer, or against what the card can do at all. No torch here.

The best peer is the fastest that was timed in this run. Where the fastest peer of the row's table was not among them (it cannot
be imported here), its number from that other run counts as well, and the smaller of both is judged against. A goal is also met
at 1.08 x the ceiling measured in the same run (bytes or arithmetic), because no peer could ask for more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.rows import Row

CEILING_MARGIN = 1.08
MAX_ERROR = 4e-3  # relative, of the sampled rows: bf16 output rounding alone is 1.7e-3
SIDE_BY_SIDE, OTHER_RUN = "side by side", "another run"


def judge(
    row: Row, ours_us: float, peers: Mapping[str, float], ceiling_us: float | None, error: float = 0.0
) -> dict[str, Any]:
    """The fields of a result row that say how it stands.

    `peers`: µs by name of those timed in this run. `goal_met` is None when there was nothing to judge against.
    """
    best = min(peers, key=lambda name: peers[name]) if peers else None
    found: dict[str, Any] = {
        "best_peer": best,
        "best_peer_us": round(peers[best], 2) if best else None,
        "ratio_side_by_side": round(ours_us / peers[best], 3) if best else None,
        "reference_peer": row.reference.peer if row.reference else None,
        "reference_us": row.reference.us if row.reference else None,
    }
    against: tuple[float, str] | None = (peers[best], f"{best}, {SIDE_BY_SIDE}") if best else None
    reference = row.reference
    if reference is not None and reference.peer not in peers and (against is None or reference.us < against[0]):
        against = reference.us, f"{reference.peer}, {OTHER_RUN}{', L2-warm there' if reference.l2_warm else ''}"
    ratio = None if against is None else ours_us / against[0]
    found["judged_against"] = against[1] if against else None
    found["ratio"] = None if ratio is None else round(ratio, 3)
    of_ceiling = None if ceiling_us is None else ours_us / ceiling_us
    found["of_ceiling"] = None if of_ceiling is None else round(of_ceiling, 3)
    if row.goal is None or row.goal[0] != "ratio":
        return found
    found["goal"] = f"<= {row.goal[1]} of the best peer"
    return found | verdict(ratio, row.goal[1], of_ceiling, error)


def verdict(ratio: float | None, goal: float, of_ceiling: float | None, error: float) -> dict[str, Any]:
    """`goal_met`, and `met_by`: "ratio" or "ceiling" where it is."""
    if not error <= MAX_ERROR:  # a NaN error is one too
        return {"goal_met": False, "met_by": None}
    if ratio is not None and ratio <= goal:
        return {"goal_met": True, "met_by": "ratio"}
    if of_ceiling is not None and of_ceiling <= CEILING_MARGIN:
        return {"goal_met": True, "met_by": "ceiling"}
    return {"goal_met": None if ratio is None else False, "met_by": None}


def judge_alone(row: Row, solo_us: float, tflops_solo: float) -> dict[str, Any]:
    """Goals in TFLOP/s or µs are judged on our own time alone."""
    if row.goal is None or row.goal[0] == "ratio":
        return {}
    kind, number = row.goal
    met = tflops_solo >= number if kind == "tflops" else solo_us <= number
    return {"goal": f"{'>=' if kind == 'tflops' else '<='} {number} {kind}", "goal_met": met}

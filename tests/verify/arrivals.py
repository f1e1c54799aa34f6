"""The racecheck form of a kernel: every thread of a partition arrives at an mbarrier.

The shipped text lets one thread arrive for the others, behind a bar.sync. compute-sanitizer's racecheck orders by mbarriers the
accesses of threads that arrive themselves, and reports those of all others (docs/verification.md), so that it can judge the kernels
in this form alone: the same accesses, barriers, phases and waits, every count times 1024 and every arrival made by all threads.

    PYTHONPATH=.:tests python -m verify.arrivals --suite sanitizer --shard I/N     # kgen.verify_child with such kernels
"""

from __future__ import annotations

import re
import sys
from typing import Any

UNIT = 1024
"""What an arrival of the shipped text counts here: T threads make it in T arrivals that count UNIT / T each."""

_MEET = re.compile(r"^\s*bar(?:rier)?\.(?:cta\.)?sync\s+(?P<id>\S+), (?P<threads>\d+);")
_FIRST = re.compile(r"^\s*setp\.eq\.[bsu]32\s+(?P<mine>%p\d+), %r\d+, 0;")
_INIT = re.compile(r"^(?P<head>.*mbarrier\.init\.shared::cta\.b64 \[[^\]]+\], )(?P<count>\d+);")
_ONE = re.compile(
    r"^\s*@(?P<mine>%p\d+) mbarrier\.arrive\.shared::cta\.b64 _, \[(?P<at>[^\]]+)\](?:, (?P<count>\d+))?;"
)
_EXPECT = re.compile(
    r"^\s*@(?P<mine>%p\d+) mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64 _, \[(?P<at>[^\]]+)\], (?P<bytes>\w+);"
)
_COPIES = re.compile(r"^\s*cp\.async\.mbarrier\.arrive\.noinc\.shared(?:::cta)?\.b64\s+\[(?P<at>[^\]]+)\];")
_PEER = re.compile(r"^\s*@p mbarrier\.arrive\.shared::cluster\.b64 _, \[to\];")
_KEPT = re.compile(r"fence\.mbarrier_init|mbarrier\.try_wait|mbarrier::complete_tx|^\s*(?://|\.loc|\.file|\.b8|$)")


def every_thread_arrives(ptx: str) -> tuple[str, int]:
    """PTX in this form, and how many arrivals of one thread it had.

    ValueError where it names an mbarrier in a way that is not known, or one thread arrives where no threads have met before.
    """
    made: list[str] = []
    meeting = ("", 0)  # number of the named barrier and threads of the last bar.sync
    first: set[str] = set()
    found = 0
    for line in ptx.split("\n"):
        if hit := _MEET.match(line):
            meeting = (hit["id"], int(hit["threads"]))
        elif hit := _FIRST.match(line):
            first.add(hit["mine"])
        if hit := _INIT.match(line):
            made.append(f"{hit['head']}{int(hit['count']) * UNIT};")
        elif hit := _ONE.match(line) or _EXPECT.match(line):
            found += 1
            if "expect_tx" in line and hit["bytes"] != "0":  # without bytes it is an arrival like others
                made.append(
                    f"@{hit['mine']} mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{hit['at']}], {hit['bytes']};"
                )
            count = int(hit.groupdict().get("count") or 1) * _share(meeting, line)
            made += _by_all(
                f"mbarrier.arrive.shared::cta.b64 _, [{hit['at']}], {count};",
                hit["mine"],
                hit["mine"] in first,
                meeting,
            )
        elif _PEER.match(line):
            found += 1
            made.append(f"mbarrier.arrive.shared::cluster.b64 _, [to], {_share(meeting, line)};")
        elif hit := _COPIES.match(line):  # every thread does so already; its copies make the last of its arrivals
            made += [f"mbarrier.arrive.shared::cta.b64 _, [{hit['at']}], {UNIT - 1};", line]
        elif "mbarrier" in line and not _KEPT.search(line):
            raise ValueError(f"not known: {line.strip()}")
        else:
            made.append(line)
    return "\n".join(made), found


def _share(meeting: tuple[str, int], line: str) -> int:
    """What the arrival of each thread counts."""
    _, threads = meeting
    if not threads or UNIT % threads:
        raise ValueError(f"no meeting of 2, 4, 8 ... threads before {line.strip()}")
    return UNIT // threads


def _by_all(arrive: str, mine: str, first: bool, meeting: tuple[str, int]) -> list[str]:
    """The arrival by all threads: where the predicate `mine` says more than which thread it is (it is then true in one thread or
    in none), by all or none of them."""
    if first:
        return [arrive]
    name, threads = meeting
    return [f"{{ .reg .pred %arrive; bar.red.or.pred %arrive, {name}, {threads}, {mine}; @%arrive {arrive} }}"]


def install() -> None:
    """Have Triton compile every kernel of this process in this form, under other keys in its cache."""
    from triton.backends.nvidia.compiler import CUDABackend

    stages_of, hash_of = CUDABackend.add_stages, CUDABackend.hash

    def add_stages(self: Any, stages: Any, options: Any, language: Any) -> None:
        stages_of(self, stages, options, language)
        ptx = stages["ptx"]
        stages["ptx"] = lambda source, metadata: every_thread_arrives(ptx(source, metadata))[0]

    CUDABackend.add_stages = add_stages
    CUDABackend.hash = lambda self: f"{hash_of(self)}-every-thread-arrives"


if __name__ == "__main__":
    from kgen import verify_child

    install()
    sys.exit(verify_child.main())

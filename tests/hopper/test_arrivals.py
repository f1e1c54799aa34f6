"""What stands before an arrival in the machine's order: read from the PTX, since the model of Gluon and the proof of the protocols
take an arrival for that of all threads of a partition, where one thread makes it.

Of the split form of every family, as its search begins with it; sm90_few also with two consumers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

from kgen.archs import load_arch
from kgen.build import attention_job
from kgen.runtime.families import FAMILIES
from kgen.space import spaces_of
from kgen.starts import starting_points
from kgen.types import KernelSpec
from tests.verify.arrivals import UNIT, every_thread_arrives

ARCH = load_arch("sm90")
COMPILE = """
import json, sys
from kgen import compile_child
compile_child._resources = lambda compiled, num_warps: {"ptx": compiled.asm["ptx"]}
print(json.dumps(compile_child._compile(json.load(sys.stdin))))
"""
SHARED = re.compile(r"\b(?:ld|st)\.shared|\bwgmma\.mma_async|\bcp\.async\.(?:ca|cg)\.shared|\bbar\.sync")
ARRIVAL = re.compile(r"\bmbarrier\.arrive(?:\.expect_tx)?\.shared(?:::cta)?\.b64\b")
FORMS = {family: {} for family in ("sm90_ws", "sm90_ws_fp8", "sm90_pair_fp8", "sm90_rs_fp8", "sm90_cluster_fp8")} | {
    "sm90_few": {"consumers": 1},
    "sm90_few of two": {"consumers": 2},
}

BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


@cache
def ptx(form: str) -> list[str]:
    family = form.partition(" ")[0]
    spec = KernelSpec("sm90", "v4", 128, 128, 256, 4, 512, 64)
    if "v4" not in FAMILIES[family].layouts:
        spec = KernelSpec("sm90", "bf16_d512", 128, 512, 0, 4)
    points = starting_points(spec, spaces_of("sm90")[family], ARCH, ARCH.device("h200"))
    point = next(p for p in points if int(p["splits"] or 1) > 1 and FORMS[form].items() <= dict(p.tunables).items())
    job: dict[str, Any] = asdict(attention_job(spec, point, ARCH.cc))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(job), env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout.splitlines()[-1])
    assert "ptx" in answer, answer
    return answer["ptx"].splitlines()  # type: ignore[no-any-return]


def faults(lines: list[str]) -> tuple[list[str], int]:
    """Arrivals before which some thread of the partition may still be at work in shared memory, and how many there are."""
    last, found, arrivals = "", [], 0
    for number, line in enumerate(lines):
        if ARRIVAL.search(line) and ".noinc" not in line:
            arrivals += 1
            if "bar.sync" not in last:
                found.append(f"line {number}: {line.strip()} behind {last.strip() or 'nothing'}")
        elif SHARED.search(line):
            last = line
    return found, arrivals


def test_every_family_is_read() -> None:
    assert {form.partition(" ")[0] for form in FORMS} == {name for name, family in FAMILIES.items() if family.gluon}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_the_warps_meet_before_one_thread_arrives_for_them(form: str) -> None:
    lines = ptx(form)
    found, arrivals = faults(lines)
    assert found == [] and arrivals >= 3
    meetings = [i for i, line in enumerate(lines) if "bar.sync" in line]
    unseen = [i for i in meetings if not faults(lines[:i] + lines[i + 1 :])[0]]
    assert len(meetings) - len(unseen) >= arrivals // 2  # that one is missing is seen


@pytest.mark.parametrize("form", sorted(FORMS))
def test_where_the_merge_is_let_go(form: str) -> None:
    """Before the first product, or where the launcher counts on it (`lets_go_late`) behind the last one of the partition that
    does it, which is the last in the text."""
    text = "\n".join(ptx(form))
    products = [match.start() for match in re.finditer(r"\bwgmma\.mma_async", text)]
    gone = [match.start() for match in re.finditer(r"griddepcontrol\.launch_dependents", text)]
    assert len(gone) == 1 and products
    if FAMILIES[form.partition(" ")[0]].lets_go_late:
        assert gone[0] > products[-1]
    else:
        assert gone[0] < products[0]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_the_form_for_racecheck_has_every_arrival_made_by_all(form: str) -> None:
    """`tests/verify/arrivals.py` on what is compiled: nothing is left that one thread does, and all counts grow by the same."""
    lines = ptx(form)
    made, found = every_thread_arrives("\n".join(lines))
    one = [line for line in lines if "mbarrier.arrive" in line and ".noinc" not in line]
    assert found == len(one) >= 3 and all("@" in line for line in one)
    arrives = re.compile(r"(@\S+ )?mbarrier\.arrive\.shared::(?:cta|cluster)\.b64 _, \[[^\]]+\], (\d+);")
    shares = [arrives.search(line) for line in made.split("\n") if "mbarrier.arrive" in line and ".noinc" not in line]
    assert all(share is not None and share[1] in (None, "@%arrive ") for share in shares)
    assert {int(share[2]) for share in shares if share is not None} <= {UNIT - 1, UNIT // 128, UNIT // 256}
    inits = re.compile(r"mbarrier\.init\S* \[[^\]]+\], (\d+);")
    assert [int(n) for n in inits.findall(made)] == [UNIT * int(n) for n in inits.findall("\n".join(lines))]
    assert max(int(n) for n in inits.findall(made)) < 1 << 20  # what an mbarrier can count


def overlaid(lines: list[str]) -> tuple[list[int], int]:
    """Where barriers lie in the place of what is handed over at warp_specialize, and how many words of that there are."""
    at: dict[str, int] = {}
    barriers: list[int] = []
    handed: list[tuple[int, int]] = []
    last = max(i for i, line in enumerate(lines) if "mbarrier.init" in line)
    for number, line in enumerate(lines):
        if base := re.match(r"\s*mov\.b32\s+(%r\d+), global_smem;", line):
            at[base[1]] = 0
        elif (add := re.match(r"\s*add\.s32\s+(%r\d+), (%r\d+), (\d+);", line)) and add[2] in at:
            at[add[1]] = at[add[2]] + int(add[3])
        elif init := re.search(r"mbarrier\.init\S* \[(%r\d+)\]", line):
            barriers.append(at[init[1]])
        elif number > last and ("setmaxnreg" in line or "barrier.sync" in line):
            break
        elif number > last and (store := re.search(r"st\.shared(?:\.v(\d))?\.(b\d+)\s+\[global_smem\+(\d+)\]", line)):
            handed.append((int(store[3]), int(store[1] or 1) * BYTES[store[2]]))
    return [b for b in barriers if any(b < start + size and start < b + 8 for start, size in handed)], len(handed)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_no_barrier_lies_where_something_is_handed_over(form: str) -> None:
    """As one does that no partition uses: PTX wants an mbarrier's memory to be used for nothing else, and racecheck stops at it."""
    lines = ptx(form)
    found, handed = overlaid(lines)
    assert found == [] and handed >= 1
    last = max(i for i, line in enumerate(lines) if "mbarrier.init" in line)
    store = next(i for i in range(last, len(lines)) if "st.shared" in lines[i])
    word = re.search(r"global_smem\+(\d+)", lines[store])
    assert word is not None
    dead = [
        "mov.b32 %r999999, global_smem;",
        f"add.s32 %r999998, %r999999, {word[1]};",
        "mbarrier.init.shared [%r999998], 1;",
    ]
    assert overlaid(lines[:last] + dead + lines[last:])[0] == [int(word[1])]

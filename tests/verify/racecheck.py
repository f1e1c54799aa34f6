"""compute-sanitizer's racecheck over the sanitizer suite, a process per Hopper kernel, and what it reports by line of a module.

    PYTHONPATH=.:tests python -m verify.racecheck --tool PATH/compute-sanitizer --jobs 16 --record FILE [--resume]
    PYTHONPATH=.:tests python -m verify.racecheck --unseen FILE

Not a pytest file: CI has no GPU. The kernels run in the form that the tool can follow (`arrivals.py`), or with --as-shipped as they
are; a kernel of each family also with a planted fault, which must be reported (`racecheck_plan.py`). Only the emitted attention and
merge kernels are instrumented; torch's run as they are. Options that are not known here go to the tool.

Prints a line per process as it ends and one per pair of lines that the tool takes for a race, and keeps the record as it goes.
Exit code: 0 nothing is reported but what was planted, and every case ran; 1 something is reported, a case failed or a planted fault
was not reported; 3 something did not end. --resume adds to a record, and runs only what that has not seen. --unseen runs nothing:
it says of which kernels of the emitted package the record has no clean run, and writes that into it. docs/verification.md says
which version of the tool follows what.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .racecheck_plan import Work, fingerprint, plan, plant

KERNELS = ("attention_kernel", "combine_kernel")
"""Names of the emitted kernels that serve a call of attention."""

FIRST_PORT, PORTS = 20000, 20
"""The tool talks to its process through a port, of which processes side by side must have different ones."""

_HEAD = re.compile(
    r"^=+ (?P<level>Error|Warning|Info): Race reported between (?P<kind>Read|Write) access at (?P<site>.+?)\s*$"
)
_MORE = re.compile(r"^=+\s+and (?P<kind>Read|Write) access at (?P<site>.+?) \[(?P<hazards>\d+) hazards\]")
_SITE = re.compile(r"^(?P<kernel>\w+)(?:\(.*\))?\+0x[0-9a-f]+(?: in (?P<line>\S+))?$")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_OTHER = re.compile(r"^=+ (?!COMPUTE-SANITIZER|RACECHECK SUMMARY)(?P<said>\S.*)$")


@dataclass(frozen=True)
class Pair:
    """Two accesses that the tool takes for unordered: each a kind and a line of a module, or its kernel where it has no lines."""

    level: str
    first: str
    second: str


@dataclass(frozen=True)
class Log:
    """What one process of the tool wrote. `ended`: its summary is there. `said`: sentences of the tool that report no race."""

    pairs: Counter[Pair]
    ended: bool
    said: tuple[str, ...] = ()


def parsed(text: str) -> Log:
    """The reports of a log, hazards added up by pair."""
    pairs: Counter[Pair] = Counter()
    said: list[str] = []
    level, first, ended = "", "", False
    for line in text.splitlines():
        if head := _HEAD.match(line):
            level, first = head["level"], f"{head['kind']} {_place(head['site'])}"
        elif more := _MORE.match(line):
            pairs[Pair(level, first, f"{more['kind']} {_place(more['site'])}")] += int(more["hazards"])
        elif _SUMMARY.search(line):
            ended = True
        elif other := _OTHER.match(line):
            said.append(other["said"].strip())
    return Log(pairs, ended, tuple(said))


def _place(site: str) -> str:
    """`file:line` of "kernel+0x120 in file:line", or the kernel's name."""
    found = _SITE.match(site.strip())
    return site if found is None else found["line"] or found["kernel"]


def command(tool: str, work: Work, at: int, shipped: bool, extra: Sequence[str] = ()) -> list[str]:
    """The tool's command line for the `at`-th process."""
    names = [word for kernel in KERNELS for word in ("--kernel-name", f"kernel_substring={kernel}")]
    options = ["--tool", "racecheck", "--show-backtrace", "no", "--print-limit", "1000", *names, *extra]
    if work.block is not None and "--racecheck-filter-cluster-id" not in extra:
        options += ["--racecheck-filter-cluster-id", str(work.block)]
    options += ["--port", str(FIRST_PORT + PORTS * at)]
    child = [str(Path(__file__).with_name("racecheck_child.py")), *(["--as-shipped"] if shipped else [])]
    return [tool, *options, sys.executable, *child, *(case.slug for case in work.cases)]


def control_command(tool: str, program: Path, name: str, at: int) -> list[str]:
    """The tool's command line for one of `racecheck_controls.cu`."""
    options = ["--tool", "racecheck", "--show-backtrace", "no", "--print-limit", "1000"]
    return [tool, *options, "--port", str(FIRST_PORT + PORTS * at), str(program), name]


def run(line: Sequence[str], log: Path, until: float, environment: dict[str, str] | None = None) -> tuple[int, float]:
    """Run a command line and leave its log; exit code (-9: it was stopped) and seconds."""
    begin = time.monotonic()
    if begin >= until:
        return -9, 0.0
    with log.open("w") as out:
        child = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
        try:
            code = child.wait(timeout=until - begin)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            code = -9
    return code, time.monotonic() - begin


# ---------------------------------------------------------------------------------------------- the record


FORM = "every thread arrives"


def outcome(work: Work, log: Path, code: int, seconds: float, run: int = 0) -> dict[str, Any]:
    """What a record has of a process. `run`: which of the record's runs it belongs to."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = parsed(text)
    return {
        "run": run,
        "kernels": [fingerprint(kernel) for kernel in work.kernels],
        "cases": [case.slug for case in work.cases],
        "passed": len(re.findall(r"^case passed ", text, re.M)),
        "planted": work.planted,
        "block": work.block,
        "ended": found.ended and code != -9,
        "exit_code": code,
        "seconds": round(seconds, 1),
        "hazards": sum(found.pairs.values()),
        "pairs": [asdict(pair) | {"hazards": number} for pair, number in found.pairs.most_common()],
        "said": [f"{times} x {said[:150]}" for said, times in Counter(found.said).most_common(3)],
    }


def clean(process: dict[str, Any]) -> bool:
    """Whether every case of a process passed, it ended by itself and nothing was reported."""
    ran = process["ended"] and process["exit_code"] == 0 and process["passed"] == len(process["cases"]) > 0
    return bool(ran and not process["hazards"] and not process["pairs"])


def line_of(kernel: dict[str, Any]) -> str:
    return f"{kernel['module']} {kernel['code']} {kernel['constants']}"


def unseen(record: dict[str, Any], works: Sequence[Work]) -> list[str]:
    """Kernels of a plan, as they are emitted now, of which the record has no clean run of these cases in the form for the tool."""
    seen = set()
    for process in record["processes"]:
        if clean(process) and not process["planted"] and record["runs"][process["run"]]["form"] == FORM:
            seen |= {(line_of(kernel), slug) for kernel in process["kernels"] for slug in process["cases"]}
    missing = set()
    for work in works:
        for kernel in () if work.planted else work.kernels:
            line = line_of(fingerprint(kernel))
            if not {(line, case.slug) for case in work.cases} <= seen:
                missing.add(line)
    return sorted(missing)


def unreported(record: dict[str, Any], works: Sequence[Work]) -> list[str]:
    """Families of a plan of which no planted fault was reported."""
    reported = {process["planted"] for process in record["processes"] if process["hazards"]}
    return sorted({work.planted for work in works} - reported - {""})


def summed_up(record: dict[str, Any], works: Sequence[Work]) -> dict[str, Any]:
    return record | {"unseen": unseen(record, works), "unreported": unreported(record, works)}


def left(record: dict[str, Any], works: Sequence[Work]) -> list[Work]:
    """What is to run yet."""
    lines, families = unseen(record, works), unreported(record, works)
    return [
        work
        for work in works
        if work.planted in families
        or any(line_of(fingerprint(kernel)) in lines for kernel in work.kernels if not work.planted)
    ]


def write(record: dict[str, Any], to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    half = to.with_name(f"{to.name}.half")
    half.write_text(json.dumps(record, indent=1) + "\n")
    half.replace(to)


def head_of(tool: str, jobs: int, shipped: bool, extra: Sequence[str]) -> dict[str, Any]:
    """What a record says of the whole run."""
    import torch

    from kgen.verify import environment_here
    from kgen.verify_child import subject_of

    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"Version (\S+)", said)
    environment = environment_here("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "tool": version[1] if version else "",
        "form": "as shipped" if shipped else FORM,
        "options": list(extra),
        "jobs": jobs,
        "environment": environment,
        "subject": subject_of("generated", environment),
    }


# ---------------------------------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m verify.racecheck", description=__doc__)
    made.add_argument("--tool", default="compute-sanitizer", help="the tool's executable")
    made.add_argument("--jobs", type=int, default=4, help="processes at a time")
    made.add_argument("--only", default="", metavar="REGEX", help="only processes whose name it is found in")
    made.add_argument(
        "--budget", type=float, default=3600.0, metavar="S", help="seconds after which processes are stopped"
    )
    made.add_argument("--each", type=float, default=3600.0, metavar="S", help="seconds that one process may take")
    made.add_argument(
        "--controls", type=Path, metavar="PROGRAM", help="racecheck_controls.cu, compiled: run these instead"
    )
    made.add_argument("--as-shipped", action="store_true", help="the kernels as they are")
    made.add_argument("--out", type=Path, default=Path(".kgen/racecheck"), help="folder of the logs")
    made.add_argument("--record", type=Path, metavar="FILE", help="where to keep the record")
    made.add_argument("--resume", action="store_true", help="add to the record, and run only what it has not seen")
    made.add_argument("--unseen", type=Path, metavar="FILE", help="say what this record has not seen, and run nothing")
    args, extra = made.parse_known_args(argv)
    if args.jobs < 1 or not args.budget >= 0 or not args.each >= 0:
        made.error("--jobs must be above zero, --budget and --each not below")
    if args.unseen is not None:
        record = summed_up(json.loads(args.unseen.read_text()), plan())
        write(record, args.unseen)
        print("\n".join(record["unseen"] or ["Every kernel of the suite, as it is emitted, has a clean run."]))
        return 0
    if args.controls is not None and not os.access(args.controls, os.X_OK):
        made.error(f"{args.controls} is no program: compile racecheck_controls.cu with nvcc and name what it makes")
    tool = shutil.which(args.tool)
    if tool is None:
        print(f"No {args.tool} here: name it with --tool.", file=sys.stderr)
        return 3
    until = time.monotonic() + args.budget
    args.out.mkdir(parents=True, exist_ok=True)
    if args.controls is not None:
        if extra:
            made.error(f"not for controls: {' '.join(extra)}")
        return controls(tool, args, until)
    whole = plan()
    works = [work for work in whole if re.search(args.only, work.name)]
    record: dict[str, Any] = {"runs": [], "processes": []}
    if args.resume:
        if args.record is None or not args.record.is_file():
            made.error("--resume wants --record with a record that is there")
        record = json.loads(args.record.read_text())
        works = [work for work in works if work in left(record, whole)]
    number = len(record["runs"])
    record["runs"].append(head_of(tool, args.jobs, args.as_shipped, extra) | {"seconds": 0.0})
    lock, begin = threading.Lock(), time.monotonic()

    def one(at: int) -> dict[str, Any]:
        work, log = works[at], args.out / f"{works[at].name}.txt"
        log.unlink(missing_ok=True)
        environment = dict(os.environ)
        limit = min(until, time.monotonic() + args.each)
        try:
            if work.planted:
                folder = plant(work, args.out / f"{work.name}.package").resolve()
                environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
            code, seconds = run(command(tool, work, at, args.as_shipped, extra), log, limit, environment)
        except ValueError as error:  # there is no place for the fault: the others are run all the same
            log.write_text(f"========= {error}\n")
            code, seconds = 1, 0.0
        found = outcome(work, log, code, seconds, number)
        with lock:
            record["processes"].append(found)
            mine = record["runs"][number]
            mine["seconds"] = round(time.monotonic() - begin, 1)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that have ended
            mine["cpu_seconds"] = round(used.ru_utime + used.ru_stime, 1)
            if args.record is not None:
                write(summed_up(record, whole), args.record)
            tell(work.name, found, mine["seconds"])
        return found

    with ThreadPoolExecutor(args.jobs) as pool:
        ended = list(pool.map(one, range(len(works))))
    return close(ended)


def tell(name: str, found: dict[str, Any], at: float) -> None:
    """A line for a process that has ended, and one for each pair of lines that is reported."""
    cases = f"{found['passed']} of {len(found['cases'])} cases passed"
    state = f"{found['hazards']} hazards" if found["ended"] else f"did not end, {found['hazards']} hazards"
    print(
        f"{at:.0f} s: {name}: {state}, {cases}, exit code {found['exit_code']} after {found['seconds']:.0f} s",
        flush=True,
    )
    for pair in found["pairs"][:12]:
        print(f"    {pair['level']}: {pair['first']} and {pair['second']}: {pair['hazards']} hazards", flush=True)
    for sentence in found["said"]:
        print(f"    {sentence}", flush=True)


def close(ended: Sequence[dict[str, Any]]) -> int:
    """Print what a run comes to; its exit code."""
    real = [found for found in ended if not found["planted"]]
    faults = [found for found in ended if found["planted"]]
    unended = sum(not found["ended"] for found in real) + sum(not f["ended"] and not f["hazards"] for f in faults)
    reported = sum(bool(found["hazards"]) for found in real)
    failed = sum(found["ended"] and not found["hazards"] and not clean(found) for found in real)
    missed = sum(found["ended"] and not found["hazards"] for found in faults)
    print(
        f"{sum(map(clean, real))} of {len(real)} processes clean, {sum(found['passed'] for found in real)} cases passed, "
        f"{reported} with hazards, {failed} with a failed case; {sum(bool(f['hazards']) for f in faults)} of {len(faults)} "
        f"planted faults reported; {unended} did not end."
    )
    return 1 if reported or failed or missed else 3 if unended else 0


def controls(tool: str, args: argparse.Namespace, until: float) -> int:
    """Run the controls and print what is reported of each; 0 if that is every one that is unordered by its name, and no other."""
    names = subprocess.run([args.controls.resolve()], capture_output=True, text=True, check=True).stdout.split()
    lines = [control_command(tool, args.controls, name, at) for at, name in enumerate(names)]
    logs = [args.out / f"{name}.txt" for name in names]
    with ThreadPoolExecutor(args.jobs) as pool:
        ran = list(pool.map(run, lines, logs, [until] * len(lines)))
    wrong = 0
    for path, (code, seconds) in zip(logs, ran, strict=True):
        log = parsed(path.read_text(errors="replace")) if path.exists() else Log(Counter(), False)
        right = log.ended and code == 0 and bool(log.pairs) == path.stem.startswith("unordered")
        wrong += not right
        found = f"{sum(log.pairs.values())} hazards" if log.ended else f"did not end, exit code {code}"
        print(f"{path.stem}: {found}{'' if right else ' (not so)'}, {seconds:.0f} s")
        for sentence, times in Counter(log.said).most_common(2):
            print(f"    {times} x {sentence[:150]}")
    print(f"{len(logs) - wrong} of {len(logs)} controls are judged rightly.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

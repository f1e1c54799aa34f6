"""compute-sanitizer's racecheck over the sanitizer suite, one kernel per process, and what it reports by line of an emitted module.

    PYTHONPATH=.:tests python -m verify.racecheck --tool PATH/compute-sanitizer --jobs 14

Not a pytest file: CI has no GPU. The kernels run in the form that the tool can follow (`arrivals.py`), or with --as-shipped as they
are. Only the emitted attention and merge kernels are instrumented; torch's run as they are. Options that are not known here go to
the tool. Prints one line per process and one per pair of lines that the tool takes for a race. Exit code: 0 nothing is reported and
every case ran, 1 something is reported or a case failed, 3 something did not end. docs/verification.md says which version of the
tool follows what.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

KERNELS = ("attention_kernel", "combine_kernel")
"""Names of the emitted kernels that serve a call of attention."""

SHARDS = 64
"""No fewer than the suite has kernels, so that no process has two."""

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


def command(tool: str, shard: str, shipped: bool, extra: Sequence[str] = ()) -> list[str]:
    """The tool's command line for one share of the suite."""
    child = ["-m", "kgen.verify_child"] if shipped else [str(Path(__file__).with_name("arrivals.py"))]
    names = [word for kernel in KERNELS for word in ("--kernel-name", f"kernel_substring={kernel}")]
    options = ["--tool", "racecheck", "--show-backtrace", "no", "--print-limit", "1000", *names, *extra]
    return [tool, *options, sys.executable, *child, "--suite", "sanitizer", "--shard", shard]


def control_command(tool: str, program: Path, name: str) -> list[str]:
    """The tool's command line for one of `racecheck_controls.cu`."""
    return [tool, "--tool", "racecheck", "--show-backtrace", "no", "--print-limit", "1000", str(program), name]


def run(line: Sequence[str], log: Path, until: float) -> tuple[int, float]:
    """Run a command line and leave its log; exit code (-9: it was stopped) and seconds."""
    begin = time.monotonic()
    if begin >= until:
        return -9, 0.0
    with log.open("w") as out:
        child = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(timeout=until - begin)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            code = -9
    return code, time.monotonic() - begin


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m verify.racecheck", description=__doc__)
    made.add_argument("--tool", default="compute-sanitizer", help="the tool's executable")
    made.add_argument("--jobs", type=int, default=4, help="processes at a time")
    made.add_argument("--shards", type=int, default=SHARDS, help="shares of the suite")
    made.add_argument(
        "--budget", type=float, default=3600.0, metavar="S", help="seconds after which processes are stopped"
    )
    made.add_argument(
        "--controls", type=Path, metavar="PROGRAM", help="racecheck_controls.cu, compiled: run these instead"
    )
    made.add_argument("--as-shipped", action="store_true", help="the kernels as they are")
    made.add_argument("--out", type=Path, default=Path(".kgen/racecheck"), help="folder of the logs")
    args, extra = made.parse_known_args(argv)
    if args.jobs < 1 or args.shards < 1 or not args.budget >= 0:
        made.error("--jobs and --shards must be above zero, --budget not below")
    if args.controls is not None and not os.access(args.controls, os.X_OK):
        made.error(f"{args.controls} is no program: compile racecheck_controls.cu with nvcc and name what it makes")
    tool = shutil.which(args.tool)
    if tool is None:
        print(f"No {args.tool} here: name it with --tool.", file=sys.stderr)
        return 3
    args.out.mkdir(parents=True, exist_ok=True)
    if args.controls is not None:
        names = subprocess.run([args.controls.resolve()], capture_output=True, text=True, check=True).stdout.split()
        if extra:
            made.error(f"not for controls: {' '.join(extra)}")
        lines = [control_command(tool, args.controls, name) for name in names]
    else:
        names = [str(part) for part in range(args.shards)]
        lines = [command(tool, f"{name}/{args.shards}", args.as_shipped, extra) for name in names]
    logs = [args.out / f"{name}.txt" for name in names]
    until = time.monotonic() + args.budget
    with ThreadPoolExecutor(args.jobs) as pool:
        ran = list(pool.map(run, lines, logs, [until] * len(lines)))
    return tell(logs, ran) if args.controls is None else tell_controls(logs, ran)


def tell(logs: Sequence[Path], ran: Sequence[tuple[int, float]]) -> int:
    """Print what the logs of a run hold; the exit code of the whole."""
    total: Counter[Pair] = Counter()
    ended, failed, cases = 0, 0, 0
    for path, (code, seconds) in zip(logs, ran, strict=True):
        text = path.read_text(errors="replace") if path.exists() else ""
        log = parsed(text)
        passed = [int(number) for number in re.findall(r"^sanitizer: (\d+) passed", text, re.M)]
        ended += log.ended and code != -9
        failed += code not in (0, -9) and not log.pairs
        cases += sum(passed)
        total += log.pairs
        print(
            f"{path.stem}: exit code {code} after {seconds:.0f} s, {sum(passed)} cases, {len(log.pairs)} pairs"
            + ("" if log.ended else ", did not end")
        )
        for sentence, times in Counter(log.said).most_common(3):
            print(f"    {times} x {sentence[:150]}")
    for pair, hazards in total.most_common():
        print(f"{pair.level}: {pair.first} and {pair.second}: {hazards} hazards")
    print(f"{ended} of {len(ran)} processes ended, {cases} cases passed, {len(total)} pairs of lines reported.")
    return 1 if total or failed else 0 if ended == len(ran) else 3


def tell_controls(logs: Sequence[Path], ran: Sequence[tuple[int, float]]) -> int:
    """Print what is reported of each control; 0 if that is every one that is unordered by its name, and no other."""
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

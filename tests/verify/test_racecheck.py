"""What stands in a log of racecheck, and the form of a kernel in which every thread arrives."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import generated
from generated.sm90 import table
from kgen.check.gluon_model.machine import Barrier, Machine
from kgen.check.gluon_model.memory import Shared
from kgen.render import render_module
from kgen.runtime.families import FAMILIES
from kgen.verify_forms import formed_cases
from kgen.verify_shards import kernels_of
from tests.hopper.forms import FORMS
from tests.hopper.running import Form, traces_of

from . import arrivals, racecheck, racecheck_plan

GENERATED = Path(str(generated.__file__)).parent

LOG = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attention_kernel+0x4b60 in sm90_few_v4.py:302
=========     and Read access at attention_kernel+0x2a0 in sm90_few_v4.py:361 [4040 hazards]
=========     and Read access at attention_kernel+0x310 in sm90_few_v4.py:361 [8 hazards]
=========     and Write access at attention_kernel+0x13bd0 in sm90_few_v4.py:818 [64 hazards]
=========
========= Warning: Race reported between Read access at void ring<(int)1>(int *)+0x290
=========     and Write access at void ring<(int)1>(int *)+0x780 [1016 hazards]
=========
========= Warning: Maximum number of hazards reached.
sanitizer: 3 passed
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_reports_are_added_up_by_line() -> None:
    log = racecheck.parsed(LOG)
    few = "Write sm90_few_v4.py:302"
    assert log.pairs == {
        racecheck.Pair("Error", few, "Read sm90_few_v4.py:361"): 4048,
        racecheck.Pair("Error", few, "Write sm90_few_v4.py:818"): 64,
        racecheck.Pair("Warning", "Read void ring<(int)1>(int *)+0x290", "Write void ring<(int)1>(int *)+0x780"): 1016,
    }
    assert log.ended and log.said == ("Warning: Maximum number of hazards reached.",)
    assert not racecheck.parsed(LOG.replace("SUMMARY", "")).ended


def stub(folder: Path, text: str, code: int = 0) -> str:
    """A tool that says `text`, and that the cases it is given passed where it says TELL."""
    said, tool = folder / "said", folder / "tool"
    said.write_text(text)
    tool.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && {{ echo "Version 2026.4.0.0 (build 1)"; exit 0; }}
printf '%s\\n' "$@" > {folder}/line
for word in "$@"; do case "$word" in sanitizer/*|no_lse/*) grep -q TELL {said} && echo "case passed $word";; esac; done
cat {said}
exit {code}
"""
    )
    tool.chmod(0o755)
    return str(tool)


CLEAN = "TELL\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
FEW = "^..-sm90_few_v4$"


def run(folder: Path, tool: str, *more: str) -> tuple[int, dict[str, Any]]:
    """The command on the processes of sm90_few_v4, and its record."""
    line = ["--tool", tool, "--only", FEW, "--out", str(folder / "logs"), "--record", str(folder / "record.json")]
    return racecheck.main([*line, *more]), json.loads((folder / "record.json").read_text())


@pytest.mark.parametrize(
    ("text", "code", "ends"),
    [
        (CLEAN, 0, 0),
        (LOG, 0, 1),
        (CLEAN, 1, 1),
        (CLEAN.replace("TELL", ""), 0, 1),
        ("TELL\n", 0, 3),
        ("", -9, 3),
    ],
    ids=["clean", "reported", "a case failed", "a case is missing", "no summary", "killed"],
)
def test_only_what_ended_and_is_clean_counts_as_clean(tmp_path: Path, text: str, code: int, ends: int) -> None:
    tool = stub(tmp_path, text, max(code, 0))
    found, record = run(tmp_path, tool, "--budget", "60" if code >= 0 else "0")
    assert found == ends
    mine = [work for work in racecheck_plan.plan() if re.search(FEW, work.name)]
    assert len(record["processes"]) == len(mine) >= 2
    few = set(map(racecheck.line_of, prints(mine)))
    others = set(map(racecheck.line_of, prints(real()))) - few
    assert set(record["unseen"]) == (others if ends == 0 else others | few)  # what was not run is unseen as well


def prints(works: Sequence[racecheck_plan.Work]) -> list[dict[str, Any]]:
    return [racecheck_plan.fingerprint(kernel) for work in works for kernel in work.kernels]


def real() -> list[racecheck_plan.Work]:
    return [work for work in racecheck_plan.plan() if not work.planted]


def test_a_process_that_takes_too_long_is_stopped_alone(tmp_path: Path) -> None:
    tool = stub(tmp_path, CLEAN)
    Path(tool).write_text(Path(tool).read_text().replace("cat", "case $* in *none*) ;; *) sleep 20;; esac\ncat"))
    found, record = run(tmp_path, tool, "--each", "1.5", "--jobs", "9")
    ended = {process["ended"] for process in record["processes"]}
    assert found == 3 and ended <= {True, False} and False in ended and record["runs"][0]["seconds"] < 15


def test_a_record_is_of_texts_and_cases(tmp_path: Path) -> None:
    """Another text of a module, other constants or a case more is not what was seen."""
    _, record = run(tmp_path, stub(tmp_path, CLEAN))
    mine = [work for work in racecheck_plan.plan() if re.search(FEW, work.name)]
    assert racecheck.unseen(record, mine) == []
    for process in record["processes"]:
        process["kernels"][0]["code"] = "0" * 16
    assert len(racecheck.unseen(record, mine)) == len(mine)
    _, record = run(tmp_path, stub(tmp_path, CLEAN))
    record["processes"][0]["cases"].pop()
    assert len(racecheck.unseen(record, mine)) == 1
    _, record = run(tmp_path, stub(tmp_path, CLEAN))
    record["processes"][0]["planted"] = "sm90_few"
    assert len(racecheck.unseen(record, mine)) == 1


def test_what_a_record_has_not_seen_is_written_into_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, record = run(tmp_path, stub(tmp_path, CLEAN))
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record | {"unseen": []}))
    assert racecheck.main(["--unseen", str(path)]) == 0
    assert json.loads(path.read_text()) == record and record["unseen"]
    assert capsys.readouterr().out.count("sm90_rs_fp8_v32 ") == sum(
        "sm90_rs_fp8_v32 " in line for line in record["unseen"]
    )


def test_a_record_is_added_to(tmp_path: Path) -> None:
    """With --resume only what had no clean run is run, as another run of the record; without it the record begins anew."""
    tool = stub(tmp_path, CLEAN)
    _, record = run(tmp_path, tool)
    many = len(record["processes"])
    record["processes"][0]["ended"] = False
    (tmp_path / "record.json").write_text(json.dumps(record))
    found, record = run(tmp_path, tool, "--resume")
    assert found == 0 and [process["run"] for process in record["processes"]] == [0] * many + [1]
    assert [run_of["form"] for run_of in record["runs"]] == [racecheck.FORM] * 2
    assert record["processes"][0]["kernels"] == record["processes"][-1]["kernels"]
    for run_of in record["runs"]:
        run_of["form"] = "as shipped"  # which says nothing of a clean kernel
    assert len(racecheck.unseen(record, real())) == len({racecheck.line_of(kernel) for kernel in prints(real())})
    assert len(run(tmp_path, tool)[1]["runs"]) == 1


@pytest.mark.parametrize(("text", "ends"), [(LOG, 0), (CLEAN, 1)], ids=["reported", "not reported"])
def test_a_planted_fault_must_be_reported(tmp_path: Path, text: str, ends: int) -> None:
    line = ["--tool", stub(tmp_path, text), "--only", "planted-sm90_few", "--out", str(tmp_path / "logs")]
    assert racecheck.main(line) == ends
    package = next((tmp_path / "logs").glob("*.package")) / "generated"
    changed = [
        p.name for p in package.rglob("*.py") if p.read_bytes() != (GENERATED / p.relative_to(package)).read_bytes()
    ]
    assert len(changed) == 1 and changed[0].startswith("sm90_few_")


def test_a_fault_without_a_place_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(racecheck_plan.PLANTS, "sm90_few", ("no such text", ""))
    line = [
        "--tool",
        stub(tmp_path, CLEAN),
        "--only",
        "planted-sm90_few|^..-sm90_few_bf16_d512$",
        "--out",
        str(tmp_path / "logs"),
    ]
    assert racecheck.main([*line, "--record", str(tmp_path / "record.json")]) == 3
    found = {process["planted"]: process for process in json.loads((tmp_path / "record.json").read_text())["processes"]}
    assert (
        racecheck.clean(found[""])
        and not found["sm90_few"]["ended"]
        and "there 0 times" in found["sm90_few"]["said"][0]
    )


@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if family.gluon))
def test_a_fault_can_be_planted_in_every_text_of_a_family(family: str) -> None:
    for layout in FAMILIES[family].layouts:
        text = render_module(family, layout, "sm90")
        changed = racecheck_plan.planted(text, family)
        compile(changed, family, "exec")
        assert len(text.splitlines()) - len(changed.splitlines()) == 1


def test_every_kernel_of_the_suite_has_a_process_and_every_family_a_fault() -> None:
    works = racecheck_plan.plan()
    suite = formed_cases("sanitizer", "cuda")
    served = [kernel for work in real() for kernel in work.kernels]
    assert set(kernels_of(suite, "generated", "sm90", "h200")) <= set(served) and len(set(served)) == len(served)
    assert {kernel.module for kernel in served} >= {e.module for e in table.ENTRIES if e.module.startswith("sm90_")}
    slugs = [case.slug for work in real() for case in work.cases]
    assert len(set(slugs)) == len(slugs) and set(slugs) >= {racecheck_plan.smaller(case).slug for case in suite}
    assert all(len(work.kernels) == 1 for work in works if "sm90_" in work.name)
    assert {work.planted for work in works} - {""} == {name for name, family in FAMILIES.items() if family.gluon}
    assert len({work.name for work in works}) == len(works)


def test_fewer_tokens_reach_the_same_kernel_and_several_items() -> None:
    suite = formed_cases("sanitizer", "cuda")
    smaller = [racecheck_plan.smaller(case) for case in suite]
    assert kernels_of(suite, "generated", "sm90", "h200") == kernels_of(smaller, "generated", "sm90", "h200")
    changed = [new for old, new in zip(suite, smaller, strict=True) if old != new]
    assert len(changed) >= 3
    for case in changed:
        programs = 66 if case.spec.heads > 64 else 132  # clusters, or blocks of 64 heads each
        assert case.spec.tokens >= programs + racecheck_plan.BLOCK + 1 and case.spec.topk >= 3 * 128


def test_the_tool_gets_our_kernels_alone_and_the_rest_of_the_line(tmp_path: Path) -> None:
    tool = stub(tmp_path, CLEAN)
    run(tmp_path, tool, "--racecheck-num-workers", "2")
    words = (tmp_path / "line").read_text().split("\n")
    assert [words[i + 1] for i, word in enumerate(words) if word == "--kernel-name"] == [
        f"kernel_substring={name}" for name in racecheck.KERNELS
    ]
    assert words[words.index("--racecheck-num-workers") + 1] == "2"
    assert words.index("--racecheck-num-workers") < words.index(sys.executable)


def test_of_many_tokens_one_block_is_looked_at() -> None:
    for at, work in enumerate(racecheck_plan.plan()):
        line = racecheck.command("tool", work, at, False)
        assert ("--racecheck-filter-cluster-id" in line) == any(case.spec.tokens > 24 for case in work.cases)
        assert line[line.index("--port") + 1] == str(20000 + 20 * at)
        assert line[-len(work.cases) :] == [case.slug for case in work.cases]


def test_controls_are_judged_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "controls"
    program.write_text("#!/bin/sh\nprintf 'ordered_a\\nunordered_b\\n'\n")
    program.chmod(0o755)
    line = ["--tool", stub(tmp_path, CLEAN), "--controls", str(program), "--out", str(tmp_path / "logs")]
    assert racecheck.main(line) == 1  # a race that is not reported
    assert "unordered_b: 0 hazards (not so)" in capsys.readouterr().out
    assert racecheck.main([*line[:1], stub(tmp_path, LOG), *line[2:]]) == 1  # and one that is none
    assert "ordered_a: 5128 hazards (not so)" in capsys.readouterr().out


PTX = """	setp.eq.b32 	%p6, %r5, 0;
	// begin inline asm
	@%p6 mbarrier.init.shared::cta.b64 [%r43], 129;
	bar.sync 	2, 128;
	@%p6 mbarrier.arrive.shared::cta.b64 _, [%r53];
	@%p7 mbarrier.arrive.shared::cta.b64 _, [%r54], 2;
	cp.async.mbarrier.arrive.noinc.shared.b64 	[global_smem+16448];
	@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r55], 16384;
	@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r56], 0;
	mbarrier.try_wait.parity.shared.b64 complete, [%r51], %r52;"""


def test_every_thread_makes_its_share_of_an_arrival() -> None:
    made, found = arrivals.every_thread_arrives(PTX)
    lines = [line.strip() for line in made.split("\n")]
    assert found == 4
    assert "@%p6 mbarrier.init.shared::cta.b64 [%r43], 132096;" in lines  # 129 arrivals of 1024
    assert "mbarrier.arrive.shared::cta.b64 _, [%r53], 8;" in lines  # by 128 threads
    assert any(
        "bar.red.or.pred %arrive, 2, 128, %p7; @%arrive mbarrier.arrive.shared::cta.b64 _, [%r54], 16;" in x
        for x in lines
    )
    copies = lines.index("cp.async.mbarrier.arrive.noinc.shared.b64 	[global_smem+16448];")
    assert lines[copies - 1] == "mbarrier.arrive.shared::cta.b64 _, [global_smem+16448], 1023;"
    assert "@%p6 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r55], 16384;" in lines
    assert "mbarrier.arrive.shared::cta.b64 _, [%r55], 8;" in lines
    assert "mbarrier.arrive.shared::cta.b64 _, [%r56], 8;" in lines and not any("[%r56], 0" in line for line in lines)
    assert lines[-1] == PTX.split("\n")[-1].strip()


@pytest.mark.parametrize(
    "text",
    [
        "	@%p6 mbarrier.arrive.shared::cta.b64 _, [%r53];",  # nobody has met
        "	bar.sync 	2, 96;\n	@%p6 mbarrier.arrive.shared::cta.b64 _, [%r53];",  # 1024 / 96
        "	mbarrier.arrive.shared::cta.b64 %rd1, [%r53];",
        "	mbarrier.arrive_drop.shared::cta.b64 _, [%r53];",
    ],
)
def test_what_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not known|no meeting"):
        arrivals.every_thread_arrives(text)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--jobs", "0"], "above zero"),
        (["--each", "nan"], "above zero"),
        (["--budget", "nan"], "above zero"),
        (["--controls", "no_such_program"], "is no program"),
        (["--resume"], "a record that is there"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        racecheck.main(["--tool", sys.executable, *words])
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def unused_barriers(form: Form, layout: str, splits: int, monkeypatch: pytest.MonkeyPatch, text: str) -> int:
    """How many of the barriers that CTA 0 initialises no partition names."""
    made: dict[Machine, list[Barrier]] = {}
    init = Machine.init_barrier

    def noted(self: Machine, shared: Shared, count: int) -> None:
        init(self, shared, count)
        made.setdefault(self, []).append(list(self.barriers.values())[-1])

    with monkeypatch.context() as patch:
        patch.setattr(Machine, "init_barrier", noted)
        traces = traces_of(form, layout, (200, 130), splits, (70, 130) if layout == "v4" else (), text=text)
    named = {id(event.barrier) for trace in traces for event in trace.events}
    first = next(iter(made.values()))
    return sum(id(barrier) not in named for barrier in first)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("layout", ["v32", "v4"])
def test_a_cluster_initialises_no_barrier_that_it_does_not_use(
    layout: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is handed over at warp_specialize would lie in its place, and racecheck stops at that (docs/verification.md)."""
    forms = [form for form in FORMS[layout] if form.family == "sm90_cluster_fp8"]
    assert {dict(form.tunables)["latent"] for form in forms} == {"bf16", "fp16"}
    for form in forms:
        text = form.text(layout)
        assert unused_barriers(form, layout, splits, monkeypatch, text) == 0
        more = text.replace("    free_q = new_barrier(2)\n", "    free_q = new_barrier(2)\n    new_barrier(1)\n")
        assert unused_barriers(form, layout, splits, monkeypatch, more) == 1


RECORD = GENERATED.parent / "bench" / "results" / "racecheck.json"
DOCS = GENERATED.parent / "docs" / "verification.md"


def test_the_record_says_what_it_has_not_seen() -> None:
    """Of the package as it is emitted: other code, other constants or another case count as not seen. Where tables have changed,
    `python -m verify.racecheck --unseen bench/results/racecheck.json` says so in the record, and docs/verification.md must, too."""
    record, works = json.loads(RECORD.read_text()), racecheck_plan.plan()
    assert record == racecheck.summed_up(record, works)
    hopper = [line for line in map(racecheck.line_of, prints(real())) if line.startswith("sm90_")]
    missing = [line for line in record["unseen"] if line.startswith("sm90_")]
    assert f"in {len(hopper) - len(missing)} of the suite's {len(hopper)} Hopper kernels" in DOCS.read_text()


def test_the_record_is_clean_but_for_what_was_planted() -> None:
    """And so it would have shown a race: of most families a planted one was reported."""
    record = json.loads(RECORD.read_text())
    for run_of in record["runs"]:
        assert run_of["form"] == racecheck.FORM and run_of["environment"]["gpu"] == "NVIDIA H200"
        assert tuple(map(int, run_of["tool"].split(".")[:2])) >= (2026, 4)  # older ones do not follow barrier.sync
    assert not [process["pairs"] for process in record["processes"] if process["hazards"] and not process["planted"]]
    assert sum(racecheck.clean(process) for process in record["processes"]) >= 30
    gluon = {name for name, family in FAMILIES.items() if family.gluon}
    assert set(record["unreported"]) < gluon and len(gluon) - len(record["unreported"]) >= 4

"""What stands in a log of racecheck, and the form of a kernel in which every thread arrives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kgen.check.gluon_model.machine import Barrier, Machine
from kgen.check.gluon_model.memory import Shared
from tests.hopper.forms import FORMS
from tests.hopper.running import Form, traces_of

from . import arrivals, racecheck

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
    """A tool that says `text`."""
    said, tool = folder / "said", folder / "tool"
    said.write_text(text)
    tool.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/line\ncat {said}\nexit {code}\n")
    tool.chmod(0o755)
    return str(tool)


CLEAN = "sanitizer: 3 passed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("text", "code", "ends"),
    [(CLEAN, 0, 0), (LOG, 0, 1), (CLEAN, 1, 1), ("sanitizer: 3 passed\n", 0, 3), ("", -9, 3)],
    ids=["clean", "reported", "a case failed", "no summary", "killed"],
)
def test_only_what_ended_and_is_clean_counts_as_clean(tmp_path: Path, text: str, code: int, ends: int) -> None:
    tool = stub(tmp_path, text, code if code >= 0 else 0)
    budget = "60" if code >= 0 else "0"
    assert (
        racecheck.main(["--tool", tool, "--shards", "2", "--out", str(tmp_path / "logs"), "--budget", budget]) == ends
    )


def test_the_tool_gets_our_kernels_alone_and_the_rest_of_the_line(tmp_path: Path) -> None:
    tool = stub(tmp_path, CLEAN)
    racecheck.main(
        ["--tool", tool, "--shards", "1", "--out", str(tmp_path / "logs"), "--racecheck-filter-cluster-id", "3"]
    )
    words = (tmp_path / "line").read_text().split("\n")
    assert [words[i + 1] for i, word in enumerate(words) if word == "--kernel-name"] == [
        f"kernel_substring={name}" for name in racecheck.KERNELS
    ]
    assert words[words.index("--racecheck-filter-cluster-id") + 1] == "3"
    assert words.index("--racecheck-filter-cluster-id") < words.index(sys.executable)


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
        (["--shards", "-1"], "above zero"),
        (["--budget", "nan"], "above zero"),
        (["--controls", "no_such_program"], "is no program"),
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

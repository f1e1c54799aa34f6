"""Verification: run an attention on cases, compare with the float64 reference, keep every result as it comes.

A results file holds two lines for a case: "started" before it runs and "done" after it. So a killed run goes on where
it was, and a case that ends its process twice is known by its "started" lines: it is recorded as failed ("crash"). A case
that Ctrl-C stops is "withdrawn": that was not its doing. Processes may share a file.
Lines name their subject, what was verified on which machine: results of other kernels are never taken for these.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kgen import jsonl
from kgen.archs import load_arch, match_device
from kgen.check import Inputs, compare_any, deepinfer_rule, make_case, references, roundings, tolerance_for
from kgen.environment import STATIC, current_environment, without_paths
from kgen.verify_cases import VerifyCase

GUARD_ROWS = 2
CANARY = 0x7FA5
"""Bits of a bf16 NaN that no kernel writes."""

MAX_ATTEMPTS = 2
"""A case that was started so often without a result is taken to end its process."""

_LN2 = 0.6931471805599453
_POINTS = 1 << 26  # tokens * heads * keys of a reference
_KEYS = 1 << 19  # tokens * keys of a reference

_MEMORY_TRIES, _MEMORY_WAIT_S, _MEMORY_KEPT = 5, 4.0, 4 << 30
"""How often a case is tried that finds no memory, seconds between, and cached bytes above which a case's blocks are freed."""


Results = tuple[Tensor, Tensor | None, Tensor | None]
"""out, then lse and max_logits or None."""


class Attention(Protocol):
    """What is verified. Writes into `out` when that keyword is given; the other flags are those of the case."""

    def __call__(self, inputs: Inputs, **flags: Any) -> Results: ...


@dataclass(frozen=True)
class CaseResult:
    """What came of a case. `kind` of a failure: wrong, canary, unwritten, unstable, refused, error or crash."""

    slug: str
    suite: str
    ok: bool
    kind: str
    sentence: str
    tolerance: str
    seconds: float
    worst: dict[str, dict[str, float]] = field(default_factory=dict)  # tensor -> name of an error -> its size

    def line(self, subject: str) -> str:
        return jsonl.seal({"event": "done", "subject": subject, **asdict(self)})


@dataclass
class VerifySummary:
    """Counts, failures and the worst errors of a run, earlier results of its file included."""

    planned: int
    results: list[CaseResult] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str = ""  # why cases are left, in a sentence
    poisoned: bool = False  # the CUDA context is lost: go on in a new process
    subject: str = ""  # fingerprint of what was verified and where

    @property
    def failures(self) -> list[CaseResult]:
        return [result for result in self.results if not result.ok]

    @property
    def left(self) -> int:
        return self.planned - len(self.results)

    @property
    def ok(self) -> bool:
        return not self.failures and self.left == 0

    def suites(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for result in self.results:
            count = counts.setdefault(result.suite, {"passed": 0, "failed": 0})
            count["passed" if result.ok else "failed"] += 1
        return counts

    def worst(self) -> dict[str, dict[str, dict[str, float]]]:
        """Tolerance row -> tensor -> the largest of each error over the cases that passed."""
        table: dict[str, dict[str, dict[str, float]]] = {}
        for result in self.results:
            for tensor, errors in result.worst.items() if result.ok else ():
                row = table.setdefault(result.tolerance, {}).setdefault(tensor, {})
                for name, value in errors.items():
                    row[name] = max(row.get(name, 0.0), value)
        return table

    def to_json(self) -> dict[str, Any]:
        return {
            "planned": self.planned, "done": len(self.results), "ok": self.ok, "suites": self.suites(),
            "failures": [asdict(result) for result in self.failures], "worst": self.worst(),
            "environment": self.environment, "subject": self.subject, "seconds": round(self.seconds, 2), "stopped": self.stopped,
        }  # fmt: skip

    def lines(self) -> list[str]:
        lines = [f"{suite}: {n['passed']} passed, {n['failed']} failed" for suite, n in self.suites().items()]
        for name, tensors in self.worst().items():
            for tensor, e in tensors.items():
                far = f", {e['from_truth']:.1e} from the truth" if "from_truth" in e else ""
                lines.append(
                    f"worst of {name} {tensor}: needs abs {e['needed_abs']:.1e} beside rel, cosine {e['cos_diff']:.1e}{far}"
                )
        lines += [f"FAILED {result.slug} ({result.kind}): {result.sentence}" for result in self.failures]
        if self.stopped:
            lines.append(self.stopped)
        if self.left:
            lines.append(f"{self.left} of {self.planned} cases are left: run again with the same results file.")
        elif not self.failures:
            lines.append(f"All {self.planned} cases passed.")
        return lines


def verify(
    cases: Iterable[VerifyCase],
    attention: Attention,
    device: str,
    *,
    resume_file: Path | None = None,
    budget_s: float | None = None,
    repeat: int = 1,
    rows_limit: int | None = None,
    subject: str = "",
    on_result: Callable[[CaseResult], None] | None = None,
) -> VerifySummary:
    """Run the cases that `resume_file` has no result of. Stops at a CUDA error (the case is recorded as a crash) and
    when the budget is spent; results that the file holds count in any case. `repeat`: every case runs so often and must
    give the same bits each time. `rows_limit`: at most so many rows of a case are compared. `subject`: fingerprint of
    what is verified; only its results count.
    """
    begin = time.monotonic()
    todo = list(cases)
    done, attempts = read_results(resume_file, subject)
    summary = VerifySummary(len(todo), environment=environment_here(device), subject=subject)

    def keep(result: CaseResult) -> None:
        summary.results.append(result)
        _append(resume_file, result.line(subject))
        if on_result is not None:
            on_result(result)

    for case in todo:
        if case.slug in done:
            summary.results.append(done[case.slug])
            continue
        if attempts.get(case.slug, 0) >= MAX_ATTEMPTS:
            keep(_failed(case, "crash", f"The process ended {attempts[case.slug]} times inside this case."))
            continue
        if summary.stopped or (budget_s is not None and time.monotonic() - begin > budget_s):
            summary.stopped = f"The budget of {budget_s:g} s is spent."
            continue  # what the file holds of later cases counts all the same
        _append(resume_file, jsonl.seal({"event": "started", "subject": subject, "slug": case.slug}))
        try:
            result, summary.poisoned = _guarded(case, attention, device, repeat, rows_limit)
        except KeyboardInterrupt:
            _append(resume_file, jsonl.seal({"event": "withdrawn", "subject": subject, "slug": case.slug}))
            raise
        keep(result)
        if summary.poisoned:
            summary.stopped = f"Stopped at a CUDA error in {case.slug}: the rest needs a new process."
            break
    summary.seconds = time.monotonic() - begin
    return summary


def _append(path: Path | None, line: str) -> None:
    if path is not None:
        jsonl.append_lines(path, [line])


def read_results(path: Path | None, subject: str = "") -> tuple[dict[str, CaseResult], dict[str, int]]:
    """(results by slug, how often each case was started) of one subject in a file; damaged and odd lines are skipped."""
    done: dict[str, CaseResult] = {}
    attempts: dict[str, int] = {}
    for value, _ in jsonl.scan(jsonl.read_bytes(path), dict).values if path is not None else ():
        event, slug = value.pop("event", ""), str(value.get("slug"))
        if value.pop("subject", "") != subject:
            continue
        if event in ("started", "withdrawn"):
            attempts[slug] = attempts.get(slug, 0) + (1 if event == "started" else -1)
        elif event == "done" and (result := _result_of(value)) is not None:
            done[slug] = result
    return done, attempts


def _result_of(value: dict[str, Any]) -> CaseResult | None:
    """What a whole line holds; None where it is no result as this kgen writes them, so that its case runs again."""
    try:
        result = CaseResult(**value)
    except TypeError:
        return None
    sound = isinstance(result.slug, str) and isinstance(result.ok, bool) and isinstance(result.worst, dict)
    tensors = result.worst.values() if sound else ()
    sound = sound and all(isinstance(t, dict) and {"max_abs", "needed_abs", "cos_diff"} <= t.keys() for t in tensors)
    return result if sound else None


def environment_here(device: str) -> dict[str, Any]:
    """The environment of a summary: no host name, no path."""
    if device == "cpu":
        return asdict(current_environment(os.environ.get("KGEN_ARCH", "sm90"), STATIC)) | {"gpu": "Triton interpreter"}
    major, minor = torch.cuda.get_device_capability()
    arch = load_arch(f"sm{major}{minor}")
    found = match_device(arch, torch.cuda.get_device_name())
    return asdict(current_environment(arch.name, found.name if found else "unknown"))


# ---------------------------------------------------------------------------------------------- one case


def _guarded(
    case: VerifyCase, attention: Attention, device: str, repeat: int, rows_limit: int | None
) -> tuple[CaseResult, bool]:
    """(result, whether the CUDA context is lost): whatever is raised becomes a failure."""
    try:
        return _with_memory(lambda: run_case(case, attention, device, repeat, rows_limit)), False
    except torch.cuda.OutOfMemoryError as error:
        return _failed(case, "error", f"Out of memory, {_MEMORY_TRIES} times: {error}"), False
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if device != "cpu" and _context_lost():
            return _failed(case, "crash", text), True
        return _failed(case, "refused" if type(error).__name__ == "Unsupported" else "error", text), False


def _with_memory(run: Callable[[], CaseResult]) -> CaseResult:
    """Processes that share a GPU can use up its memory for a while: cached blocks are given back, and it is tried again."""
    for _ in range(_MEMORY_TRIES - 1):
        try:
            return run()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            time.sleep(_MEMORY_WAIT_S)
        finally:
            if torch.cuda.is_available() and torch.cuda.memory_reserved() > _MEMORY_KEPT:
                torch.cuda.empty_cache()
    return run()


def _context_lost() -> bool:
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception:
        return True
    return False


def _failed(case: VerifyCase, kind: str, text: str, seconds: float = 0.0) -> CaseResult:
    text = without_paths(" ".join(text.split()))[:400]
    return CaseResult(case.slug, case.suite, False, kind, text, tolerance_for(case.spec).name, seconds)


def run_case(
    case: VerifyCase, attention: Attention, device: str, repeat: int = 1, rows_limit: int | None = None
) -> CaseResult:
    """The attention first, into NaN between canaries; then the reference: it cannot leave right answers behind."""
    begin = time.monotonic()
    inputs = make_case(case.spec, device)
    flags = dict(case.flags)
    own = bool(flags.pop("own_out", False))
    buffer, out = poisoned_out(inputs, wide=case.spec.q_pad)

    def call() -> Results:
        buffer.view(torch.int16).fill_(CANARY)
        if not own:
            return attention(inputs, out=out, **flags)
        # freed at once: allocators give the same memory, still full of NaN, to the next tensor of this size
        torch.full((inputs.tokens, inputs.heads, 512), float("nan"), dtype=torch.bfloat16, device=device)
        return attention(inputs, **flags)

    def failed(kind: str, text: str) -> CaseResult:
        return _failed(case, kind, text, round(time.monotonic() - begin, 4))

    found = call()
    for _ in range(repeat - 1):
        first = tuple(None if x is None else x.clone() for x in found)
        found = call()
        if not all(same_bits(a, b) for a, b in zip(first, found, strict=True)):
            return failed("unstable", "Two runs of the same call differ.")
    if device != "cpu":
        torch.cuda.synchronize()
    if not canaries_whole(buffer, inputs):
        return failed("canary", "Rows or heads beside the output were overwritten.")
    if not own and inputs.tokens and found[0].data_ptr() != out.data_ptr():
        return failed("wrong", "The result is not the tensor that was passed as out.")
    return _judged(case, inputs, found, begin, rows_limit)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors hold the same bits (NaN included), or both are missing."""
    if a is None or b is None:
        return a is b
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind).view(a.shape))


def _judged(case: VerifyCase, inputs: Inputs, found: Results, begin: float, rows_limit: int | None) -> CaseResult:
    rows = sampled_rows(inputs, rows_limit)
    heads, flags, tolerance = inputs.heads, dict(case.flags), tolerance_for(case.spec)
    known = references(inputs, roundings(tolerance, inputs, stated=bool(flags.get("stated"))), rows)
    out = found[0].reshape(inputs.tokens, heads, 512)
    lse, top = (None if x is None else x.reshape(inputs.tokens, heads) for x in found[1:])
    if lse is not None and flags.get("lse_base") == "2":
        lse = lse * _LN2
    if flags.get("facade"):  # FlashMLA's convention for a row without a valid key
        known = {k: replace(r, lse=r.lse.masked_fill(r.lse.isneginf(), float("inf"))) for k, r in known.items()}
    missing = [n for n, x in (("lse", lse), ("max_logits", top)) if (x is None) == bool(flags.get(f"return_{n}"))]
    if missing:
        return _failed(case, "wrong", f"{' and '.join(missing)} asked for and missing, or the other way round.")
    if rows is not None:
        if case.spec.scale_rule != "nan_scale" and bool(out.isnan().any()):
            return _failed(case, "unwritten", "NaN in a row that is not among the sampled ones, or there.")
        out, lse, top = out[rows], None if lse is None else lse[rows], None if top is None else top[rows]
    report = compare_any(known, tolerance, out, lse, top)
    ok, sentence = report.ok, report.sentence
    if case.suite == "deepinfer":
        within, units = deepinfer_rule(out, known["exact"])
        ok, sentence = ok and within, f"{sentence} {units:.2f} of 2 units of DeepInfer's rule."
    worst = {t.name: {"max_abs": t.max_abs, "needed_abs": t.needed_abs, "cos_diff": t.cos_diff} for t in report.tensors}
    for name, far in report.from_truth.items():
        worst[name]["from_truth"] = far
    kind, seconds = "" if ok else "wrong", round(time.monotonic() - begin, 4)
    return CaseResult(case.slug, case.suite, ok, kind, sentence, tolerance.name, seconds, worst)


def poisoned_out(inputs: Inputs, wide: bool) -> tuple[Tensor, Tensor]:
    """(buffer full of canaries, the part of it that is the output): rows before and behind, with `wide` a head too."""
    heads = inputs.heads + int(wide)
    shape = (inputs.tokens + 2 * GUARD_ROWS, heads, 512)
    buffer = torch.full(shape, CANARY, dtype=torch.int16, device=inputs.q.device).view(torch.bfloat16)
    out = buffer[GUARD_ROWS : GUARD_ROWS + inputs.tokens, : inputs.heads]
    if inputs.q.dim() == 4:
        out = out.view(inputs.q.shape[0], inputs.s_q, inputs.heads, 512)
    return buffer, out


def canaries_whole(buffer: Tensor, inputs: Inputs) -> bool:
    bits = buffer.view(torch.int16)
    around = (bits[:GUARD_ROWS], bits[GUARD_ROWS + inputs.tokens :], bits[:, inputs.heads :])
    return all(bool((part == CANARY).all()) for part in around)


def sampled_rows(inputs: Inputs, limit: int | None = None) -> Tensor | None:
    """Flat token numbers to compare: None for all, else the first, the last and an even choice between."""
    extra = inputs.extra_indices.shape[-1] if inputs.extra_indices is not None else 0
    keys = inputs.indices.shape[-1] + extra
    count = max(8, min(_POINTS // (inputs.heads * keys), _KEYS // keys))
    count = count if limit is None else min(count, max(1, limit))
    if inputs.tokens <= count:
        return None
    # more tokens than samples, so that no two of them round to the same token
    return torch.linspace(0, inputs.tokens - 1, count, device=inputs.q.device, dtype=torch.float64).long()

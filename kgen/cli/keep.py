"""kgen records and kgen doctor: what is kept, and whether this machine may add to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Optional

import typer

from kgen.cli.common import FOUND, Json, app, command, local_gpu, show
from kgen.config import config_root
from kgen.errors import RecordError

records_app = typer.Typer(help="List, show, merge and archive tuning records.", no_args_is_help=True)
app.add_typer(records_app, name="records")


def _files(path: Path | None) -> list[Path]:
    if path is not None:
        if not path.is_file():
            raise RecordError(f"There is no record file {path}.")
        return [path]
    return sorted(p for p in (config_root() / "records").glob("*.jsonl") if not p.name.startswith("compile-"))


@command("list", records_app)
def list_command(
    file: Optional[Path] = typer.Option(None, help="One file; default: all of configs/records."),
    as_json: bool = Json,
) -> int:
    """Files, how many records of which kind, damaged lines."""
    from kgen.records import RecordStore

    rows: list[dict[str, Any]] = []
    for path in _files(file):
        loaded = RecordStore(path).load()
        kinds = Counter(r.failure.kind if r.failure else r.status for r in loaded.records)
        specs = len({r.spec for r in loaded.records})
        aside = [{"line": a.line_no, "reason": a.reason} for a in loaded.set_aside]
        rows.append(
            {"file": path.name, "records": len(loaded.records), "specs": specs, "kinds": dict(kinds), "aside": aside}
        )
    lines = []
    for row in rows:
        kinds_text = ", ".join(f"{n} {kind}" for kind, n in sorted(row["kinds"].items()))
        lines.append(f"{row['file']}: {row['records']} records of {row['specs']} specs ({kinds_text})")
        lines += [f"  line {a['line']} set aside: {a['reason']}" for a in row["aside"]]
    show({"files": rows}, lines or ["No records yet: kgen tune makes them."], as_json)
    return FOUND if any(row["aside"] for row in rows) else 0


@command("show", records_app)
def show_command(
    slug: str = typer.Argument(..., help="A spec's slug."),
    file: Optional[Path] = typer.Option(None, help="One file; default: all of configs/records."),
    top: int = typer.Option(10, min=1, help="How many candidates."),
    as_json: bool = Json,
) -> int:
    """The candidates of one spec, fastest first, then why others failed."""
    from kgen.records import RecordStore, winner

    found = [r for path in _files(file) for r in RecordStore(path).load().records if r.spec.slug == slug]
    if not found:
        raise RecordError(f"No record is of spec {slug!r}: kgen records list names the files, kgen list the specs.")
    timed = sorted((r for r in found if r.measurement), key=lambda r: r.measurement.median_us if r.measurement else 0.0)
    best = winner(found)
    lines = [f"{slug}: {len(found)} records, {len(timed)} timed"]
    for record in timed[:top]:
        time = record.measurement
        assert time is not None
        mark = "*" if best is not None and record is best else " "
        old = ", outdated inputs" if record.outdated else ""
        lines.append(
            f" {mark} {time.median_us:9.2f} µs ±{100 * time.spread:.1f} % {time.method:22s} "
            f"{record.environment.gpu}, Triton {record.environment.triton}{old}: {record.candidate.slug}"
        )
    lines += [
        f"   static, estimated {r.estimate_us:.1f} µs: {r.candidate.slug}" for r in found if r.estimate_us is not None
    ]
    failures = Counter((r.failure.kind, r.failure.message) for r in found if r.failure)
    lines += [f"   {n} {kind}: {message}" for (kind, message), n in failures.most_common(top)]
    show({"spec": slug, "records": found}, lines, as_json)
    return 0


@command("merge", records_app)
def merge_command(
    sources: list[Path] = typer.Argument(..., help="Record files from other machines."),
    into: Path = typer.Option(..., help="The file that takes them in."),
    as_json: bool = Json,
) -> int:
    """Import records of other machines; duplicates are dropped, conflicts are settled and named."""
    from kgen.records import merge

    missing = [path for path in sources if not path.is_file()]
    if missing:
        raise RecordError(f"There is no record file {missing[0]}.")
    result = merge(sources, into)
    facts = {name: value for name, value in vars(result).items()}
    show(
        result,
        [f"{name.replace('_', ' ')}: {len(v) if isinstance(v, (list, tuple)) else v}" for name, v in facts.items()],
        as_json,
    )
    return 0


@command("archive", records_app)
def archive_command(
    file: Optional[Path] = typer.Option(None, help="One file; default: all of configs/records."),
    as_json: bool = Json,
) -> int:
    """Move records of earlier templates and inputs, which count for nothing, to archive/NAME.gz beside the file."""
    from kgen.archive import archive_records
    from kgen.emit import template_hashes

    hashes = template_hashes()
    done = {path.name: archive_records(path, hashes) for path in _files(file)}
    rows = [{"file": name, "moved": d.moved, "kept": d.kept, "archive": d.file.name} for name, d in done.items()]
    lines = [
        f"{name}: {d.moved} records moved to {d.file.parent.name}/{d.file.name}, {d.kept} stay"
        for name, d in done.items()
    ]
    show({"files": rows}, lines or ["No records yet: kgen tune makes them."], as_json)
    return 0


@command("doctor")
def doctor_command(as_json: bool = Json) -> int:
    """Versions, GPU, compiler, overriding environment variables, stale and foreign records."""
    from kgen.cli.doctor import examine

    findings, facts = examine(local_gpu())
    lines = [f"{name:12s} {value}" for name, value in facts.items()]
    lines += [""] + [f"! {finding}" for finding in findings] if findings else ["", "Nothing to object to."]
    show({"facts": facts, "findings": findings}, lines, as_json)
    return FOUND if findings else 0

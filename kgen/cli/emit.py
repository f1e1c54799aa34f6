"""kgen emit: records -> generated/."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from kgen.cli.common import FOUND, Json, command, show


@command("emit")
def emit_command(
    out: Path = typer.Option(Path("generated"), help="Folder to write; only a folder that kgen emitted is replaced."),
    package: str = typer.Option("generated", help="Name under which the folder will be imported."),
    check: bool = typer.Option(False, "--check", help="Write nothing; exit 1 if the folder is not what would be written."),
    as_json: bool = Json,
) -> int:  # fmt: skip
    """Write the dispatch package from the records, or check that it is up to date."""
    from kgen import emit
    from kgen.select import summary

    records, warnings = emit.read_records()
    for warning in warnings:
        print(f"kgen: {warning}", file=sys.stderr)
    emission = emit.build(records, package)
    counts = {arch: summary(entries) for arch, entries in emission.tables.items()}
    lines = [f"{arch}: " + ", ".join(f"{n} {name}" for name, n in count.items()) for arch, count in counts.items()]
    if check:
        different = emit.differences(emission, out)
        verdict = (
            f"{out} is what kgen emit would write."
            if not different
            else f"Run kgen emit; it would change {len(different)} of its files."
        )
        show({"differences": different, "tables": counts}, [*lines, *different, verdict], as_json)
        return FOUND if different else 0
    changed = emit.write(emission, out)
    size = sum(len(text) for text in emission.files.values())
    lines.append(f"{len(changed)} files changed of {len(emission.files)} ({size / 1024:.0f} KiB) in {out}.")
    show({"changed": changed, "tables": counts, "bytes": size}, lines, as_json)
    return 0

"""kgen list, inspect and explain: what can be tuned, what a space holds, which entry serves a shape and why."""

from __future__ import annotations

from typing import Optional

import typer

from kgen.cli.common import Json, arch_or_here, command, show
from kgen.cli.specs import choose_specs, spec_from_shape
from kgen.errors import ConfigError
from kgen.runtime.table import Entry


@command("list")
def list_command(
    arch: str = typer.Option("sm90", help="sm90, sm100, sm120 or sm121."),
    model: list[str] = typer.Option([], help="dsv32, glm5, dsv4 or dsv41; repeatable. Default: all."),
    every: bool = typer.Option(False, "--all", help="All specs, not only the anchors."),
    as_json: bool = Json,
) -> int:
    """The slugs of the specs of models on an arch."""
    from kgen.archs import load_arch

    specs = choose_specs(load_arch(arch).name, model, [], every)
    show({"specs": [spec.slug for spec in specs]}, [spec.slug for spec in specs], as_json)
    return 0


@command("inspect")
def inspect_command(
    arch: Optional[str] = typer.Option(None, help="sm90, sm100, sm120 or sm121; default: this machine's GPU."),
    model: str = typer.Option("dsv4", help="dsv32, glm5, dsv4 or dsv41."),
    as_json: bool = Json,
) -> int:
    """The search space of a model's specs: how many points fit, why others do not, and what is not known yet."""
    from kgen.inspect import inspect
    from kgen.static_run import probe_store

    target = arch_or_here(arch)
    report = inspect(model, target.name, probe_store(target.name))
    show(report, report.lines(), as_json)
    return 0


@command("explain")
def explain_command(
    arch: str = typer.Option(..., help="sm90, sm100, sm120 or sm121."),
    layout: str = typer.Option(..., help="bf16_d576, bf16_d512, v32, v4, v41_footer or v41_inline."),
    heads: int = typer.Option(..., min=1, max=128),
    topk: int = typer.Option(..., min=1),
    tokens: int = typer.Option(..., min=1),
    page: int = typer.Option(0, min=0), extra_topk: int = typer.Option(0, min=0), extra_page: int = typer.Option(0, min=0),
    device: Optional[str] = typer.Option(None, help="Device class, such as h200; default: none, as on an unknown GPU."),
    fp16: bool = typer.Option(False, "--fp16", help="A call that states a scale_range inside [6e-5, 146]."),
    unaligned: bool = typer.Option(False, "--unaligned", help="A call that the Gluon families do not take."),
    against: int = typer.Option(5, min=0, help="How many other entries to give reasons for, the nearest first."),
    as_json: bool = Json,
) -> int:  # fmt: skip
    """Which entry of the checked-in tables serves a shape, why, and what would serve without it."""
    from kgen import emit
    from kgen.runtime.select import select
    from kgen.runtime.table import Shape

    spec = spec_from_shape(arch, layout, heads, topk, page, tokens, extra_topk, extra_page)
    records, _ = emit.read_records()
    entries = emit.build(records, archs=[arch]).tables[arch]
    stated = fp16 and spec.kv.fp8
    shape = Shape(spec.layout, heads, topk, page, tokens, extra_topk, extra_page, stated, not unaligned)
    choice = select(entries, shape, device)
    if choice is None:
        raise ConfigError(f"No entry of {arch} serves {spec.slug}: kgen tune --static --arch {arch} makes one.")
    runner_up = select(entries, shape, device, exclude=(choice.entry,))
    reasons = [(describe(entry), sentence) for entry, sentence in choice.rivals[:against]]
    value = {
        "shape": shape, "entry": choice.entry, "exact": choice.exact, "why": choice.why, "fallback": choice.fallback,
        "runner_up": runner_up.entry if runner_up else None, "reasons_against": reasons,
    }  # fmt: skip
    lines = [f"entry      {describe(choice.entry)}", f"why        {choice.why}"]
    if choice.fallback:
        lines.append(f"fallback   {choice.fallback}")
    lines.append(f"runner-up  {describe(runner_up.entry) if runner_up else 'none'}")
    lines += [f"not        {name}: {sentence}" for name, sentence in reasons]
    show(value, lines, as_json)
    return 0


def describe(entry: Entry) -> str:
    """One line for an entry: its shape, its kernel and where it comes from."""
    extra = f"+{entry.extra_topk[1]}" if entry.dual else ""
    source = entry.provenance
    time = (
        f"{source.us} µs at {source.anchor_tokens} tokens on {source.gpu}" if source.us is not None else "never timed"
    )
    constants = " ".join(f"{name}={int(v) if isinstance(v, bool) else v}" for name, v in entry.config.tunables)
    last = "up" if entry.tokens[1] >= 2**31 - 1 else str(entry.tokens[1])
    return (
        f"{entry.layout} h{entry.heads} k{entry.topk[1]}{extra} p{entry.page or 'any'} t{entry.tokens[0]}-{last}: "
        f"{entry.module} {constants} warps={entry.config.num_warps} stages={entry.config.num_stages} [{source.source}, {time}]"
    )

"""Questions about shapes, without a call: what would serve them and why, how much workspace, and compiling ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from . import launch
from .call import AttentionCall
from .families import combine_tile, exact_sums, known_family
from .layouts import LAYOUTS
from .lookup import PACKAGE, choose
from .select import Choice, token_breaks
from .table import Entry, Shape
from .target import MAX_CLUSTER, default_target, known_arch, load_table, target_of
from .validate import Unsupported, build_call


@dataclass(frozen=True)
class Explanation:
    """Why an entry serves a shape.

    `runner_up`: the entry that would be chosen if this one were not in the table, or None. `against`: every other
    entry of the table with the sentence that rules it out, the nearest first.
    """

    shape: Shape
    arch: str
    device_class: str | None
    entry: Entry
    exact: bool
    why: str
    fallback: str | None
    runner_up: Entry | None
    runner_up_why: str | None
    against: tuple[tuple[Entry, str], ...]

    def __str__(self) -> str:
        lines = [
            f"shape      {self.arch} {_shape_words(self.shape)}, device class {self.device_class or 'unknown'}",
            f"entry      {_entry_words(self.entry)}",
            *_words_with_lse(self.entry),
            f"why        {self.why}",
            f"time       {_time_words(self.entry)}",
            f"fallback   {self.fallback or 'none'}",
            f"runner-up  {_entry_words(self.runner_up) if self.runner_up else 'none'}",
        ]
        if self.runner_up is not None:
            lines += [f"           {self.runner_up_why}", f"           {_time_words(self.runner_up)}"]
        lines.append(f"the other {len(self.against)}:" if self.against else "no other entry")
        lines += [f"  {_entry_words(entry)}: {sentence}" for entry, sentence in self.against]
        return "\n".join(lines)


def explain(shape: Shape, *, arch: str | None = None, device_class: str | None = None) -> Explanation:
    """The look-up for `shape`, with reasons. Without `arch`: for the current device.

    Raises `Unsupported` when no entry serves the shape, `NoTarget` when there is no device and no arch is named.
    """
    arch, device_class, cluster = _resolve(arch, device_class)
    choice = choose(arch, device_class, shape, cluster=cluster)
    try:
        second: Choice | None = choose(arch, device_class, shape, exclude=(choice.entry,), cluster=cluster)
    except Unsupported:
        second = None
    return Explanation(
        shape=shape,
        arch=arch,
        device_class=device_class,
        entry=choice.entry,
        exact=choice.exact,
        why=choice.why,
        fallback=choice.fallback,
        runner_up=second.entry if second else None,
        runner_up_why=second.why if second else None,
        against=tuple(choice.rivals),
    )


def workspace_size(shape: Shape, *, arch: str | None = None, device_class: str | None = None) -> int:
    """Bytes of workspace that serve every token count from 1 to `shape.tokens`, aligned or not, with a stated scale range or
    without; 0 when the keys are never split.

    One buffer of that size may be shared by all layers of a stream. Without `arch`: for the current device.
    """
    arch, device_class, cluster = _resolve(arch, device_class)
    forms = [replace(shape, fp16=fp16, aligned=aligned) for fp16 in (False, True) for aligned in (True, False)]
    sizes = (
        launch.scratch_bytes(at, choice.entry, choice.exact)
        for form in forms
        for at, choice in _up_to(form, arch, device_class, cluster)
    )
    return max(sizes, default=0)


def warmup(shapes: Iterable[Shape], *, device: torch.device | str | None = None) -> int:
    """Compile what `shapes` need at every token count from 1 to `shape.tokens`; returns the number of launches made.

    Launches each kernel once on empty rows, on the current CUDA device unless `device` is given, for calls with and without
    lse. It assumes what an engine does: last dims of heads x d contiguous, pages of the writers' size, tensors that start at
    a multiple of 16 bytes. To be sure of another form, make the real call once. Not to be called in a CUDA graph capture.
    """
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    target = target_of(place)
    launches = 0
    for shape in shapes:
        done = set()
        for at, choice in _up_to(shape, target.arch, target.device_class, target.cluster):
            scratch = launch.scratch_bytes(at, choice.entry, choice.exact)
            rows = at.tokens * at.heads
            plan = launch.make_plan(at, choice.entry, choice.exact)
            # few rows have another merge, whatever the number of parts, and few programs launch theirs early
            early = launch.merges_early(plan, at.tokens, at.heads)
            merge = (combine_tile(rows, plan.splits, plan.parts), early) if scratch else None
            for lse in (False, True):
                asked = replace(at, lse=lse)
                config = launch.make_plan(asked, choice.entry, choice.exact).config  # one kernel has two forms
                splits = scratch // rows  # bytes of scratch per row: as many as there are parts
                variant = (choice.entry, config, choice.exact, splits, merge)
                if variant not in done:
                    done.add(variant)
                    _run_empty(asked, target.arch, choice, place)
        launches += len(done)
    return launches


def _run_empty(shape: Shape, arch: str, choice: Choice, place: torch.device) -> None:
    call = empty_call(shape, place)
    if place.type == "cuda":
        with torch.cuda.device(place):
            launch.run(call, arch, choice.entry, choice.exact, None, PACKAGE)
    else:
        launch.run(call, arch, choice.entry, choice.exact, None, PACKAGE)


def _up_to(shape: Shape, arch: str, device_class: str | None, cluster: int) -> Iterator[tuple[Shape, Choice]]:
    """Every token count from 1 to `shape.tokens` with its choice."""
    if shape.tokens < 1:
        return
    table = load_table(arch)
    breaks = token_breaks(table.entries if table else (), shape)
    for first, end in zip(breaks, [*breaks[1:], shape.tokens + 1], strict=True):
        # not `serve`: nobody asked for these counts
        choice = choose(arch, device_class, replace(shape, tokens=first), cluster=cluster)
        for tokens in range(first, end):
            yield replace(shape, tokens=tokens), choice


def empty_call(shape: Shape, device: torch.device) -> AttentionCall:
    """A call of `shape` whose rows have no key. All rows share the memory of one row of q and of out: a stride of 0 is
    a multiple of 16, as the real ones are, so Triton compiles the same kernel."""
    layout, heads, tokens = LAYOUTS[shape.layout], shape.heads, shape.tokens
    indices = torch.full((tokens, shape.topk), -1, dtype=torch.int32, device=device)
    lengths = torch.zeros(tokens, dtype=torch.int32, device=device)
    extra = None
    if shape.dual:
        extra = torch.full((tokens, shape.extra_topk), -1, dtype=torch.int32, device=device)
    call = build_call(
        torch.zeros((1, heads, layout.d_qk), dtype=torch.bfloat16, device=device),
        _empty_cache(shape.layout, shape.page, device),
        indices[:1],
        sm_scale=1.0,
        kv_layout=layout.kv_layout,
        topk_length=lengths[:1],
        attn_sink=torch.zeros(heads, dtype=torch.float32, device=device),
        extra_kv=_empty_cache(shape.layout, shape.extra_page, device) if shape.dual else None,
        extra_indices=None if extra is None else extra[:1],
        extra_topk_length=None if extra is None else lengths[:1],
        lse=torch.empty((tokens, heads), dtype=torch.float32, device=device)[:1] if shape.lse else None,
    )
    q_head, out_head = call.q_strides[2], call.out_strides[2]
    return replace(call, tokens=tokens, q_strides=(0, 0, q_head), out_strides=(0, 0, out_head))


def _empty_cache(layout_name: str, page: int, device: torch.device) -> torch.Tensor:
    layout = LAYOUTS[layout_name]
    if not layout.paged:
        return torch.zeros((1, layout.d_qk), dtype=torch.bfloat16, device=device)
    size, stride = layout.token_bytes, layout.page_bytes(page)
    return torch.zeros(stride, dtype=torch.uint8, device=device).as_strided((1, page, 1, size), (stride, size, size, 1))


def _resolve(arch: str | None, device_class: str | None) -> tuple[str, str | None, int]:
    if arch is not None:
        return known_arch(arch), device_class, MAX_CLUSTER
    target = default_target()
    return target.arch, device_class or target.device_class, target.cluster


def _shape_words(shape: Shape) -> str:
    topk = f"{shape.topk}+{shape.extra_topk}" if shape.dual else str(shape.topk)
    page = f"{shape.page}+{shape.extra_page}" if shape.dual else str(shape.page)
    return f"{shape.layout}, {shape.heads} heads, topk {topk}, page {page}, {shape.tokens} tokens"


def _words_with_lse(entry: Entry) -> list[str]:
    """What a call that asks for lse launches instead of the entry's own constants, if anything."""
    family, own = known_family(entry.module, entry.layout), entry.config.tunables
    other = own if family is None else exact_sums(family, own)
    changed = " ".join(f"{name}={value}" for name, value in other if (name, value) not in own)
    return [f"with lse   {changed}"] if changed else []


def _entry_words(entry: Entry) -> str:
    def span(bounds: tuple[int, int]) -> str:
        low, high = bounds
        return str(low) if low == high else f"{low}.." if high >= 2**31 - 1 else f"{low}..{high}"

    def any_or(page: int | None) -> str:
        return "any" if page is None else str(page)

    topk = f"{span(entry.topk)}+{span(entry.extra_topk)}" if entry.dual else span(entry.topk)
    page = f"{any_or(entry.page)}+{any_or(entry.extra_page)}" if entry.dual else any_or(entry.page)
    config = " ".join(f"{name}={value}" for name, value in entry.config.tunables)
    return (
        f"{entry.module} [{entry.layout}, {entry.heads} heads, topk {topk}, page {page}, tokens {span(entry.tokens)}] "
        f"{config} warps={entry.config.num_warps} stages={entry.config.num_stages}"
    )


def _time_words(entry: Entry) -> str:
    provenance = entry.provenance
    where = f"{provenance.source}, {provenance.gpu or provenance.device_class}, Triton {provenance.triton or 'unknown'}"
    anchor = f" at {provenance.anchor_tokens} tokens" if provenance.anchor_tokens else ""
    if provenance.us is not None:
        share = f", {provenance.roofline:.0%} of the roofline" if provenance.roofline is not None else ""
        return f"{provenance.us:.1f} us{anchor}{share} ({where})"
    if provenance.estimate_us is not None:
        return f"estimated {provenance.estimate_us:.1f} us{anchor}, never timed ({where})"
    return f"never timed ({where})"

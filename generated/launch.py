"""From a validated call and a table entry to kernel launches: constants, grid, scratch. Decides nothing about shapes.

Kernel modules are siblings `<arch>/<module>.py` of this file in an emitted tree; kgen's tuner passes its own modules instead
(`Modules`), so that what is timed is what ships.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import torch

from .call import AttentionCall, CacheView
from .families import (
    Family,
    attention_constants,
    combine_tile,
    exact_sums,
    family_of,
    grid_of,
    merge_starts_early,
    part_type,
    splits_for,
)
from .kernel import Kernel, in_cache, interpreting
from .layouts import D_V, LAYOUTS
from .table import Config, Entry, Shape

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Modules:
    """The kernel modules of one launch."""

    attention: ModuleType
    combine: ModuleType


@dataclass(frozen=True)
class Plan:
    """Constants of one launch: what `warmup` compiles and `run` launches."""

    config: Config
    family: Family
    heads: int  # 0 stands for the generic form, likewise below
    topk: int
    extra_topk: int
    page: int
    extra_page: int
    dual: bool
    splits: int
    parts: str = "fp32"  # type of the parts of a split

    @cached_property
    def constants(self) -> dict[str, Any]:
        exact = {name: getattr(self, name) for name in ("heads", "topk", "extra_topk", "page", "extra_page")}
        tunables = dict(self.config.tunables)
        return attention_constants(self.family, tunables, exact, self.dual, self.splits > 1, interpreting())

    @cached_property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.config.num_warps}
        if not self.family.gluon:
            options["num_stages"] = self.config.num_stages
        if self.config.maxnreg is not None:
            options["maxnreg"] = self.config.maxnreg
        if self.family.ctas > 1:
            options["num_ctas"] = self.family.ctas
        return options

    def grid(self, call: AttentionCall) -> tuple[int, ...]:
        """Programs of the attention kernel for a call."""
        head_blocks = -(-call.heads // int(self.config["block_h"]))
        persistent = bool(self.config.get("persistent", False))
        sms = _sms(call.q.device) if persistent else 0
        return grid_of(self.family, persistent, call.tokens, head_blocks, self.splits, sms)


@lru_cache(maxsize=64)
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=4096)
def make_plan(shape: Shape, entry: Entry, exact: bool) -> Plan:
    """Constants and split count for `shape`. A pure function: every rank and every replay gets the same. The tuned split count
    holds for the anchor's token count (`families.splits_for`)."""
    family, config = family_of(entry.module, entry.layout), entry.config
    config = replace(config, tunables=exact_sums(family, config.tunables)) if shape.lse else config
    special = exact and bool(config.get("specialise", False)) and _one_shape(entry)
    block_k = int(config["block_k"])
    splits = splits_for(
        int(config.get("splits", 1)),
        anchor=entry.provenance.anchor_tokens or entry.tokens[1],
        tokens=max(shape.tokens, 1),
        head_blocks=-(-shape.heads // int(config["block_h"])),
        blocks=-(-shape.topk // block_k) + -(-shape.extra_topk // block_k),
        per_sm=max(1, family.programs_per_sm(config.maxnreg)),
    )
    return Plan(
        config=config,
        family=family,
        heads=shape.heads if special else 0,
        topk=shape.topk if special else 0,
        extra_topk=shape.extra_topk if special else 0,
        page=shape.page if special else 0,
        extra_page=shape.extra_page if special else 0,
        dual=shape.dual,
        splits=splits,
        parts=part_type(family, dict(config.tunables)),
    )


def _one_shape(entry: Entry) -> bool:
    """Whether the entry stands for one width and page: constants of a range would compile a kernel per value."""
    widths = entry.topk[0] == entry.topk[1] and entry.extra_topk[0] == entry.extra_topk[1]
    paged = LAYOUTS[entry.layout].paged
    return widths and not (paged and entry.page is None) and not (entry.dual and entry.extra_page is None)


MAX_PLANS = 8192
"""Plans that are remembered: token counts come and go for as long as an engine runs."""

_plans: dict[tuple[Shape, int, bool], tuple[Entry, Plan]] = {}


def _known_plan(shape: Shape, entry: Entry, exact: bool) -> Plan:
    """`make_plan` without hashing the entry: it is kept alive here, so that its id stays its own."""
    key = (shape, id(entry), exact)
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        found = _plans[key] = (entry, make_plan(shape, entry, exact))
    return found[1]


def plan_scratch_bytes(plan: Plan, tokens: int, heads: int) -> int:
    """Bytes of split-K scratch: normalised outputs, then base-2 lse and maximum of every part."""
    if plan.splits == 1:
        return 0
    rows = tokens * plan.splits * heads
    return rows * D_V * _part_dtype(plan).itemsize + 2 * _stat_bytes(rows)


def _stat_bytes(rows: int) -> int:
    """Bytes of one fp32 per row, rounded up to 16: a part that starts elsewhere would need another compiled kernel."""
    return -(-4 * rows // 16) * 16


def scratch_bytes(shape: Shape, entry: Entry, exact: bool) -> int:
    """Workspace in bytes that `run` needs for this shape; 0 when the keys are not split."""
    return plan_scratch_bytes(make_plan(shape, entry, exact), shape.tokens, shape.heads)


_PART_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _part_dtype(plan: Plan) -> torch.dtype:
    return _PART_DTYPES[plan.parts]


@lru_cache(maxsize=256)
def load_modules(package: str, arch: str, module: str) -> Modules:
    """Import the emitted kernel modules; refuses a module emitted for another arch."""
    modules = Modules(
        importlib.import_module(f"{package}.{arch}.{module}"), importlib.import_module(f"{package}.{arch}.combine")
    )
    for loaded in (modules.attention, modules.combine):
        if arch != loaded.ARCH:
            raise ImportError(f"Module {loaded.__name__} was emitted for {loaded.ARCH}, not {arch}: emit it again.")
    return modules


def call_shape(call: AttentionCall) -> Shape:
    memo = call.memo
    if memo is None:
        return _shape_of(call)
    if memo.shape is None:
        memo.shape = _shape_of(call)
    shape: Shape = memo.shape
    return shape


def _shape_of(call: AttentionCall) -> Shape:
    extra = call.extra
    return Shape(
        layout=call.layout.name,
        heads=call.heads,
        topk=call.main.topk,
        page=call.main.page if call.layout.paged else 0,
        tokens=call.tokens,
        extra_topk=extra.topk if extra else 0,
        extra_page=extra.page if extra else 0,
        fp16=call.fp16,
        aligned=call.aligned,
        lse=call.lse is not None,
    )


def run(
    call: AttentionCall, arch: str, entry: Entry, exact: bool, workspace: torch.Tensor | None, package: str
) -> None:
    """Launch what `entry` says for `call`; outputs are written in place. Never synchronises, never tunes."""
    kernels = None if call.memo is None else call.memo.kernels
    if kernels is not None and kernels.serves(arch, entry, exact, package):
        launch(call, kernels.plan, kernels.modules, workspace)
        return
    launch(call, _known_plan(call_shape(call), entry, exact), load_modules(package, arch, entry.module), workspace)
    if call.memo is not None and call.memo.kernels is not None:
        call.memo.kernels.served = (arch, entry, exact, package)


def was_launched(call: AttentionCall, entry: Entry, exact: bool) -> bool:
    """Whether a call of this form has launched this entry: then its kernels are compiled."""
    kernels = None if call.memo is None else call.memo.kernels
    return kernels is not None and kernels.served is not None and kernels.served[1:3] == (entry, exact)


def is_compiled(call: AttentionCall, arch: str, entry: Entry, exact: bool, package: str) -> bool:
    """Whether every kernel of this call is compiled already on the current device (always true when interpreting)."""
    if interpreting() or call.tokens == 0:
        return True
    plan = make_plan(call_shape(call), entry, exact)
    modules = load_modules(package, arch, entry.module)
    scratch = _scratch_tensors(call, plan, None, meta=True)
    args = attention_args(call, scratch, plan, item_counter(call, plan, meta=True))
    jobs = [(modules.attention.attention_kernel, args, plan.constants | plan.options)]
    if plan.splits > 1:
        jobs.append((modules.combine.combine_kernel, combine_args(call, plan, scratch), combine_constants(plan, call)))
    return all(in_cache(kernel, args, keywords) for kernel, args, keywords in jobs)


Scratch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _scratch_tensors(call: AttentionCall, plan: Plan, workspace: torch.Tensor | None, meta: bool = False) -> Scratch:
    """part_out, part_lse, part_max as views of the workspace (or of one new allocation, from the graph's pool in a capture)."""
    if plan.splits == 1:
        return call.out, call.out, call.out  # never touched
    if meta:
        workspace = torch.empty(0, dtype=torch.uint8, device=call.q.device)  # only types and alignment are looked at
        return (workspace.view(_part_dtype(plan)), workspace.view(torch.float32), workspace.view(torch.float32))
    rows = call.tokens * plan.splits * call.heads
    if workspace is None:  # as below, in fewer steps
        dtype = _part_dtype(plan)
        parts, stats = rows * D_V * dtype.itemsize // 4, _stat_bytes(rows) // 4
        whole = torch.empty(parts + 2 * stats, dtype=torch.float32, device=call.q.device)
        part_out = whole if dtype is torch.float32 else whole.view(dtype)
        return part_out, whole.narrow(0, parts, rows), whole.narrow(0, parts + stats, rows)
    flat = workspace.view(torch.uint8).flatten()
    at = rows * D_V * _part_dtype(plan).itemsize
    second = at + _stat_bytes(rows)
    return (
        flat[:at].view(_part_dtype(plan)),
        flat[at : at + 4 * rows].view(torch.float32),
        flat[second : second + 4 * rows].view(torch.float32),
    )


def launch(call: AttentionCall, plan: Plan, modules: Modules, workspace: torch.Tensor | None = None) -> None:
    """The launches themselves."""
    if call.tokens == 0:
        return
    scratch = _scratch_tensors(call, plan, workspace)
    args = attention_args(call, scratch, plan, item_counter(call, plan))
    kernels = kernels_of(call, plan, modules)
    kernels.attention(args)
    if plan.splits > 1:
        kernels.merge(combine_args(call, plan, scratch))


class Kernels:
    """The kernels of a form of call. `served`: for which look-up they were made, once they were launched."""

    def __init__(self, call: AttentionCall, plan: Plan, modules: Modules) -> None:
        self.plan, self.modules = plan, modules
        self.served: tuple[str, Entry, bool, str] | None = None
        programs = plan.family.programs_per_sm(plan.config.maxnreg) if call.q.is_cuda else 0
        keywords = plan.constants | plan.options
        self.attention = Kernel(modules.attention.attention_kernel, plan.grid(call), keywords, programs)
        if plan.splits > 1:
            constants = combine_constants(plan, call)
            grid = (call.tokens * call.heads, D_V // constants["BLOCK_D"])
            self.merge = Kernel(modules.combine.combine_kernel, grid, constants)

    def serves(self, arch: str, entry: Entry, exact: bool, package: str) -> bool:
        served = self.served
        return served is not None and served[1] is entry and served[::2] == (arch, exact) and served[3] == package


def kernels_of(call: AttentionCall, plan: Plan, modules: Modules) -> Kernels:
    """The kernels of a plan for a call, kept with its form (the tuner tries many plans on one form)."""
    kernels: Kernels | None = None if call.memo is None else call.memo.kernels
    if kernels is None or kernels.plan is not plan or kernels.modules is not modules:
        kernels = Kernels(call, plan, modules)
        if call.memo is not None:
            call.memo.kernels = kernels
    return kernels


def merges_early(plan: Plan, tokens: int, heads: int) -> bool:
    """Whether the merge is launched as a dependent of the attention kernel, in as many programs as that leaves SMs idle."""
    programs = tokens * -(-heads // int(plan.config["block_h"])) * plan.splits
    return merge_starts_early(plan.family, programs)


def combine_constants(plan: Plan, call: AttentionCall) -> dict[str, int]:
    """Constants and options of the merge. Launched early, it waits for the parts by itself. Nothing else is launched so: the
    next call's attention kernel, which may write the same scratch, starts when the merge has ended."""
    parts, dims, warps = combine_tile(call.tokens * call.heads, plan.splits, plan.parts)
    options = {"launch_pdl": True} if merges_early(plan, call.tokens, call.heads) else {}
    return options | {
        "BLOCK_S": parts,
        "BLOCK_D": dims,
        "UPCAST": interpreting(),
        "num_warps": warps,
        "num_stages": 2,
    }


def _lengths(view: CacheView, call: AttentionCall) -> tuple[torch.Tensor, int]:
    return (view.indices, 0) if view.lengths is None else (view.lengths, 1)


def item_counter(call: AttentionCall, plan: Plan, meta: bool = False) -> torch.Tensor | None:
    """What the programs of a dynamic kernel take their items from: a new 0 in each launch, so that launches on other streams,
    replays of a graph (which holds the memset) and one that was aborted do not meet in it."""
    if not (plan.family.counter and plan.config.get("dynamic", False)):
        return None
    if meta:
        return torch.empty(0, dtype=torch.int32, device=call.q.device)  # only its type and alignment are looked at
    return torch.zeros(1, dtype=torch.int32, device=call.q.device)


def attention_args(
    call: AttentionCall, scratch: Scratch, plan: Plan, counter: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """Positional arguments of `attention_kernel`, in its order. A pointer that is not used repeats another tensor, with a
    flag that says so, so that optional arguments do not multiply the compiled variants."""
    main, extra = call.main, call.extra or call.main
    lengths, has_len = _lengths(main, call)
    extra_lengths, has_extra_len = _lengths(extra, call)
    sink = call.attn_sink if call.attn_sink is not None else scratch[1]
    if sink.dtype != torch.float32:
        sink = _placeholder(call)
    lse = call.lse if call.lse is not None else _placeholder(call)
    top = call.max_logits if call.max_logits is not None else _placeholder(call)
    part_out, part_lse, part_max = scratch
    if part_lse.dtype != torch.float32:
        part_lse = part_max = _placeholder(call)
    # fmt: off
    return (
        call.q, main.kv, main.indices, lengths, extra.kv, extra.indices, extra_lengths, sink, call.out, lse, top,
        part_out, part_lse, part_max,
        call.sm_scale * LOG2E, call.lse_scale, call.empty_lse,
        call.heads, call.s_q, main.topk, extra.topk, main.slots, extra.slots, main.page, extra.page,
        call.s_q, has_len, has_extra_len,
        int(call.attn_sink is not None), int(call.lse is not None), int(call.max_logits is not None),
        main.page_stride, extra.page_stride,
        *call.q_strides, main.index_stride_b, main.index_stride_s, extra.index_stride_b, extra.index_stride_s,
        *call.out_strides, *call.lse_strides, *call.max_logits_strides,
        *((call.tokens, plan.splits) if plan.family.gluon else ()),
        *((main.indices if counter is None else counter,) if plan.family.counter else ()),
    )
    # fmt: on


_placeholders: dict[torch.device, torch.Tensor] = {}


def _placeholder(call: AttentionCall) -> torch.Tensor:
    """An fp32 tensor for a pointer that a flag switches off (never dereferenced), one per device."""
    device = call.q.device
    found = _placeholders.get(device)
    if found is None:
        found = call.q.new_empty(4, dtype=torch.float32)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # a capture's memory is its graph's
            _placeholders[device] = found
    return found


def combine_args(call: AttentionCall, plan: Plan, scratch: Scratch) -> tuple[Any, ...]:
    """Positional arguments of `combine_kernel`, in its order."""
    sink = call.attn_sink if call.attn_sink is not None else _placeholder(call)
    lse = call.lse if call.lse is not None else _placeholder(call)
    top = call.max_logits if call.max_logits is not None else _placeholder(call)
    # fmt: off
    return (
        *scratch, sink, call.out, lse, top, call.lse_scale, call.empty_lse,
        call.heads, call.s_q, plan.splits,
        int(call.attn_sink is not None), int(call.lse is not None), int(call.max_logits is not None),
        *call.out_strides, *call.lse_strides, *call.max_logits_strides,
    )
    # fmt: on

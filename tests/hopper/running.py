"""Runs a Hopper template on the CPU model with the launcher's arguments, between canaries, and compares with the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen import render
from kgen.check import CaseSpec, Inputs, Report, Tolerance, compare_any, make_case, references, roundings, tolerance_for
from kgen.check.gluon_model import Trace, run_module, trace_module
from kgen.runtime.call import AttentionCall
from kgen.runtime.families import FAMILIES, grid_of, part_type
from kgen.runtime.launch import LOG2E, Plan, attention_args, item_counter
from kgen.runtime.table import Config
from kgen.runtime.validate import build_call
from kgen.verify import canaries_whole, poisoned_out

ARCH = "sm90"
LN2 = 0.6931471805599453


@dataclass(frozen=True)
class Form:
    """One way to launch a family: its tunables, as a table entry has them (block_h, latent, persistent, and its own)."""

    family: str
    tunables: tuple[tuple[str, Any], ...]

    @staticmethod
    def make(family: str, **tunables: Any) -> Form:
        return Form(family, tuple(tunables.items()))

    def replace(self, **changes: Any) -> Form:
        return Form.make(self.family, **{**dict(self.tunables), **changes})

    def text(self, layout: str) -> str:
        return render.render_module(self.family, layout, ARCH)

    def plan(self, call: AttentionCall, splits: int, exact: bool) -> Plan:
        """What the launcher would make of a table entry. `exact`: page sizes as constants, as a tuned shape has them."""
        config = Config(tunables=self.tunables, num_warps=4, num_stages=1)
        paged = exact and call.layout.paged
        return Plan(
            config=config, family=FAMILIES[self.family], heads=0, topk=0, extra_topk=0,
            page=call.main.page if paged else 0, extra_page=call.extra.page if paged and call.extra else 0,
            dual=call.extra is not None, splits=splits, parts=part_type(FAMILIES[self.family], dict(self.tunables)),
        )  # fmt: skip

    def grid(self, call: AttentionCall, splits: int, programs: int) -> tuple[int, ...]:
        tunables = dict(self.tunables)
        blocks = -(-call.heads // tunables["block_h"])
        persistent = bool(tunables.get("persistent", False))
        return grid_of(FAMILIES[self.family], persistent, call.tokens, blocks, splits, programs * self.ctas)

    @property
    def ctas(self) -> int:
        """Of a program."""
        return FAMILIES[self.family].ctas


def aligned(inputs: Inputs) -> Inputs:
    """q as a slice of a wider buffer of NaN, with strides that are multiples of 16 elements."""
    q = inputs.q
    *rows, heads, d = q.shape
    wide = torch.full((*rows, heads + 1, d + 16), float("nan"), dtype=q.dtype)
    wide[..., :heads, :d] = q
    return inputs.replace(q=wide[..., :heads, :d])


def bound_call(inputs: Inputs) -> tuple[AttentionCall, torch.Tensor]:
    """(the validated call with lse and max_logits, the buffer of canaries around its output)."""
    buffer, out = poisoned_out(inputs, wide=True)
    call = build_call(**inputs.kwargs(), out=out, return_lse=True, return_max_logits=True)
    assert call.lse is not None and call.max_logits is not None
    call.lse.fill_(float("nan"))
    call.max_logits.fill_(float("nan"))
    return call, buffer


def parts_of(call: AttentionCall, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = call.tokens * splits * call.heads
    nan = float("nan")
    return torch.full((rows, 512), nan), torch.full((rows,), nan), torch.full((rows,), nan)


def merge(call: AttentionCall, splits: int, parts: Any) -> None:
    """What combine.py computes, in plain torch."""
    tokens, heads = call.tokens, call.heads
    shape = (tokens, splits, heads)
    lse2, top2 = parts[1].view(shape).double(), parts[2].view(shape).double()
    used = lse2 != float("-inf")
    rows = parts[0].view(*shape, 512).double().masked_fill(~used[..., None], 0.0)
    best = lse2.amax(1)
    shift = best.masked_fill(best == float("-inf"), 0.0)
    weights = torch.exp2(lse2 - shift[:, None])
    total = weights.sum(1)
    sink = torch.full((heads,), float("-inf")) if call.attn_sink is None else call.attn_sink
    denominator = total + torch.exp2(sink.double() * LOG2E - shift)
    empty = ~used.any(1)
    out = (rows * weights[..., None]).sum(1) / denominator[..., None]
    call.out.copy_(out.masked_fill(empty[..., None], 0.0).view(call.out.shape))
    assert call.lse is not None and call.max_logits is not None
    lse = ((shift + torch.log2(total)) * LN2 * call.lse_scale).masked_fill(empty, call.empty_lse)
    top = top2.masked_fill(~used, float("-inf")).amax(1)
    top = torch.where(total == total, top, torch.full_like(top, float("nan")))
    call.lse.copy_(lse.view(call.lse.shape))
    call.max_logits.copy_((top * LN2).view(call.lse.shape))


def report(
    form: Form, spec: CaseSpec, splits: int = 1, *, seed: int = 0, programs: int = 2, exact: bool = True,
    text: str | None = None, api: str = "3.6", tolerance: Tolerance | None = None, inputs: Inputs | None = None,
) -> Report:  # fmt: skip
    """Run one case. `programs`: CTAs (or clusters) of a persistent grid. `text`: other text than the template's."""
    inputs = aligned(make_case(dataclasses.replace(spec, q_pad=False)) if inputs is None else inputs)
    call, buffer = bound_call(inputs)
    assert call.aligned, "the launcher would take another family for this call"
    parts = parts_of(call, splits)
    plan = form.plan(call, splits, exact)
    if plan.parts == "fp16":
        parts = parts[0].half(), *parts[1:]
    args = attention_args(call, parts, plan, item_counter(call, plan))
    grid = form.grid(call, splits, programs)
    run_module(text or form.text(spec.layout), plan.constants, args, grid, seed, num_ctas=form.ctas, api=api)
    if splits > 1:
        merge(call, splits, parts)
    assert canaries_whole(buffer, inputs), f"{spec.slug}: rows or heads beside the output were overwritten"
    bound = tolerance or tolerance_for(spec)
    kinds = roundings(bound, inputs)
    if len(kinds) > 1:  # what this form does with scales is known
        kinds = (str(dict(form.tunables)["latent"]),)
    return compare_any(references(inputs, kinds), bound, call.out, call.lse, call.max_logits)


def check(form: Form, spec: CaseSpec, splits: int = 1, **options: Any) -> None:
    found = report(form, spec, splits, **options)
    assert found.ok, f"{form.family}, {splits} splits, on {spec.slug}: {found.sentence}"


def heads_of(form: Form, blocks: int = 2) -> int:
    """A head count that leaves the last block nearly empty."""
    return min(70, int(dict(form.tunables)["block_h"]) * (blocks - 1) + 6)


def few_heads(form: Form) -> int:
    """Few of the heads that the family is launched with."""
    return FAMILIES[form.family].min_heads + 4


def plain_case(layout: str, form: Form, splits: int) -> CaseSpec:
    topk = 200 if splits > 1 else 170
    return CaseSpec(layout=layout, heads=heads_of(form), topk=topk, tokens=2, sink="near", lengths="half", seed=splits)


def traces_of(
    form: Form, layout: str, lengths: Sequence[int], splits: int = 1, extra_lengths: Sequence[int] = (), *,
    text: str | None = None,
) -> list[Trace]:  # fmt: skip
    """The partitions' traces of one program that serves a token of each length (and extra length) in turn."""
    heads = few_heads(form)
    extra = {"extra_topk": max(*extra_lengths, 1), "extra_page": 2, "extra_slots": 64} if extra_lengths else {}
    tokens = len(lengths)
    spec = CaseSpec(
        layout=layout, heads=heads, topk=max(*lengths, 1), tokens=tokens, lengths="full", q_pad=False, **extra
    )
    inputs = make_case(spec).replace(topk_length=torch.tensor(lengths, dtype=torch.int32))
    if extra_lengths:
        inputs = inputs.replace(extra_topk_length=torch.tensor(extra_lengths, dtype=torch.int32))
    call, _ = bound_call(inputs)
    plan = form.plan(call, splits, exact=True)
    args = attention_args(call, parts_of(call, splits), plan, item_counter(call, plan))
    return trace_module(text or form.text(layout), plan.constants, args, (1,), num_ctas=form.ctas)

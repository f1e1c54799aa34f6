"""sm90_few: what its forms take of an SM, places that are looked up later, tiles of 32 keys, scales loaded once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from kgen.archs import load_arch
from kgen.build import attention_job, compile_all
from kgen.check import CaseSpec, Inputs, make_case
from kgen.check.gluon_model import run_module
from kgen.check.gluon_model.ptx import inline_asm_elementwise
from kgen.check.gluon_model.types import int32
from kgen.check.gluon_model.values import Tensor
from kgen.check.pack import pack_paged
from kgen.check.protocol import check_protocol
from kgen.render import render_module
from kgen.runtime.call import AttentionCall
from kgen.runtime.launch import attention_args
from kgen.runtime.validate import build_call
from kgen.space import spaces_of
from kgen.starts import starting_points
from kgen.types import Candidate, KernelSpec, ResourceUse

from . import running
from .running import Form, check, parts_of, traces_of

ARCH = load_arch("sm90")
H200 = ARCH.device("h200")

LONE = Form.make(
    "sm90_few", block_h=16, block_k=64, latent="fp16", consumers=1, groups=1, places=4, producers=4, rows=64, stages=1,
    tile_keys=64, scales_once=True,
)  # fmt: skip
"""One consumer whose item has more tiles than places, as where two programs share an SM."""

AHEAD = LONE.replace(producers=8, stages=2)
"""One consumer for whom the next tile is made while it works."""

BROAD = AHEAD.replace(block_h=32)
"""The same of 32 heads: of later tiles V32 asks for the rope when the stage is free."""

PAIR = LONE.replace(consumers=2, groups=2, producers=8, stages=2, scales_once=False)
LANES = LONE.replace(scales_once=False)
HALF = LONE.replace(block_k=32, tile_keys=32, places=2, producers=8, rows=32)


def of_layout(form: Form, layout: str) -> Form:
    if layout in ("v32", "v4"):
        return form
    return form.replace(latent="bf16", groups=1, producers=4, rows=64)


def starts(spec: KernelSpec) -> list[Candidate]:
    points = starting_points(spec, spaces_of("sm90")["sm90_few"], ARCH, H200)
    return [point for point in points if point["latent"] == points[-1]["latent"] or point["latent"] == "fp16"]


def compiled(spec: KernelSpec, point: Candidate) -> ResourceUse:
    job = attention_job(spec, point, ARCH.cc)
    use = compile_all({job: spec.slug}, workers=1)[job]
    assert isinstance(use, ResourceUse)
    return use


V32 = KernelSpec("sm90", "v32", 16, 2048, 64, 64)
V4 = KernelSpec("sm90", "v4", 16, 128, 64, 64, 1024, 64)
BF16 = KernelSpec("sm90", "bf16_d576", 16, 2048, 0, 64)


@pytest.mark.parametrize("spec", [V32, V4, BF16], ids=lambda spec: spec.layout)
def test_two_programs_fit_an_sm(spec: KernelSpec) -> None:
    """Half of the registers, half of the shared memory (an SM keeps 1 KB for each), and next to no spills."""
    point = next(point for point in starts(spec) if point.launch.maxnreg == 128)
    use = compiled(spec, point)
    assert use.warps == 8 and use.registers <= 128
    assert 2 * (use.shared + 1024) <= ARCH.smem_per_sm
    assert use.spills <= 32


@pytest.mark.parametrize("spec", [V32, V4], ids=lambda spec: spec.layout)
def test_two_consumers_leave_the_l1_room_for_rows(spec: KernelSpec) -> None:
    """Rows on their way to registers lie in what the shared memory leaves of the 256 KB that it shares with the L1: at most
    196 KB, of which 1 KB is not the kernel's, or the L1 has 28 KB instead of 60."""
    point = next(point for point in starts(spec) if point["consumers"] == 2 and point["groups"] == 2)
    assert compiled(spec, point).shared <= 195 * 1024


MANY = {
    "v32": KernelSpec("sm90", "v32", 128, 2048, 64, 2),
    "v4": KernelSpec("sm90", "v4", 64, 128, 64, 16, 512, 64),
    "bf16_d576": KernelSpec("sm90", "bf16_d576", 64, 2048, 0, 16),
}


@pytest.mark.parametrize("layout", MANY)
def test_one_consumer_holds_32_heads(layout: str) -> None:
    """Its accumulators are 144 registers per thread at most, and nothing spills; V32 leaves the L1 its 60 KB."""
    spec, space = MANY[layout], spaces_of("sm90")["sm90_few"]
    point = next(
        point
        for point in space.feasible(spec, ARCH, H200)
        if (point["block_h"], point["consumers"], point["stages"], point["rows"]) == (32, 1, 2, 64)
        and point["latent"] == ("bf16" if layout == "bf16_d576" else "fp16")
    )
    use = compiled(spec, point)
    assert use.spills == 0
    if layout == "v32":
        assert use.shared <= 195 * 1024


@pytest.mark.parametrize("layout", ["v32", "v4", "bf16_d576"])
@pytest.mark.parametrize("form", [LONE, AHEAD, BROAD, PAIR], ids=["lone", "ahead", "broad", "pair"])
@pytest.mark.parametrize("splits", [1, 2])
def test_items_of_more_tiles_than_places(layout: str, form: Form, splits: int) -> None:
    spec = CaseSpec(layout=layout, heads=13, topk=700, tokens=2, sink="near", lengths="random", seed=splits)
    if layout == "v4":
        spec = dataclasses.replace(spec, topk=100, extra_topk=650, extra_page=2, extra_slots=90)
    check(of_layout(form, layout), spec, splits, seed=splits)


@pytest.mark.parametrize("layout", ["v32", "v4", "bf16_d576"])
@pytest.mark.parametrize("form", [LONE, AHEAD, BROAD, PAIR], ids=["lone", "ahead", "broad", "pair"])
def test_places_are_looked_up_in_time(layout: str, form: Form) -> None:
    for lengths in ((700,), (64 * 9, 0, 64 * 5), (64 * 4 + 1, 64 * 6)):
        extra: dict[str, Any] = {"extra_lengths": tuple(max(0, 500 - n) for n in lengths)} if layout == "v4" else {}
        verdict = check_protocol(traces_of(of_layout(form, layout), layout, lengths, **extra))
        assert verdict.ok, f"{layout}, {lengths}: {verdict.fault and verdict.fault.sentence}"


@pytest.mark.parametrize("layout", ["v32", "v4", "bf16_d576", "bf16_d512"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("stages", [1, 2])
def test_tiles_of_32_keys(layout: str, splits: int, stages: int) -> None:
    """Rows 32 to 63 of a tile are never written: shared memory starts as NaN in the model."""
    spec = CaseSpec(layout=layout, heads=20, topk=75, tokens=2, sink="near", lengths="random", seed=splits)
    if layout == "v4":
        spec = dataclasses.replace(spec, topk=33, extra_topk=70, extra_page=2, extra_slots=90)
    check(of_layout(HALF.replace(stages=stages, places=2 * stages), layout), spec, splits, seed=splits)


WIDE = PAIR.replace(block_h=32, groups=1, producers=4, rows=32)


@pytest.mark.parametrize("layout", ["v32", "v4"])
@pytest.mark.parametrize("form", [LONE, PAIR, HALF, WIDE, BROAD], ids=["lone", "pair", "half", "wide", "broad"])
def test_parts_of_16_bits(layout: str, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored in the order of the dims, through another layout than parts of 32 bits."""

    def parts(call: AttentionCall, splits: int) -> Any:
        rows = call.tokens * splits * call.heads
        return torch.full((rows, 512), float("nan"), dtype=torch.float16), *(
            torch.full((rows,), float("nan")) for _ in "lm"
        )

    monkeypatch.setattr(running, "parts_of", parts)
    extra: dict[str, Any] = {"extra_topk": 130, "extra_page": 2, "extra_slots": 90} if layout == "v4" else {}
    check(form, CaseSpec(layout=layout, heads=35, topk=150, tokens=2, sink="near", lengths="half", **extra), 3)


@pytest.mark.parametrize("form", [LONE, PAIR, LANES, HALF], ids=["lone", "pair", "lanes", "half"])
def test_the_byte_behind_seven_scales_may_be_anything(form: Form) -> None:
    """A lane of V4's columns without a dim has no scale: the eighth byte of a slot's footer is padding, and here it is NaN."""
    inputs = make_case(CaseSpec(layout="v4", heads=5, topk=150, tokens=1, page=64, slots=192, q_pad=False))
    raw = inputs.kv.view(torch.uint8).clone()
    pages = raw.view(raw.shape[0], -1)
    foot = pages[:, 64 * 576 : 64 * 584].view(raw.shape[0], 64, 8)
    foot[..., 7] = 255
    spec = CaseSpec(layout="v4", heads=5, topk=150, tokens=1, page=64, slots=192, q_pad=False)
    check(form, spec, inputs=inputs.replace(kv=raw.view(inputs.kv.dtype)))


@pytest.mark.parametrize("units", [0, 1, -1])
def test_divisions_are_exact(units: int) -> None:
    """Of numbers below 2^22, by the interpreter of the text's PTX. `units`: what rcp.approx may be off by."""
    asm = render_module("sm90_few", "v32", "sm90").split("def divided(x, by):")[1].split('"""')[3]
    rcp = "rcp.approx.ftz.f32 b, b;"
    assert rcp in asm
    asm = asm.replace(rcp, f"{rcp} mov.b32 q, b; add.s32 q, q, {units}; mov.b32 b, q;")
    draw = torch.Generator().manual_seed(1)
    last = (1 << 22) - 1
    by = torch.cat([torch.tensor([1, 2, 3, 7, 64, 1000, last]), torch.randint(1, 5000, (300,), generator=draw)])
    drawn = torch.cat([torch.tensor([0, 1, last]), torch.randint(0, last, (400,), generator=draw)])
    x = drawn[:, None].expand(-1, len(by))
    multiples = x // by * by
    for numbers in (x, multiples, (multiples - 1).clamp(min=0)):
        divisors = by.expand(numbers.shape)
        blocks = [Tensor(block.int().contiguous(), int32) for block in (numbers, divisors)]
        found = inline_asm_elementwise(asm, "=r,r,r", blocks, int32, True, 1)
        assert torch.equal(found.data.long(), numbers // divisors)


def test_every_kind_of_form_is_tried_at_the_start() -> None:
    """Two programs on an SM and tiles of 32 keys differ from the usual form along several axes at once."""
    few = starts(KernelSpec("sm90", "v4", 16, 128, 64, 1, 512, 64))[:6]
    assert {(point.launch.maxnreg, point["tile_keys"]) for point in few} == {(None, 64), (128, 64), (None, 32)}
    assert {point.launch.maxnreg for point in starts(V32)[:4]} == {None, 128}


RISING = (0.0, 3.0, 12.0, 20.0, 19.5, 300.0, 280.0, 301.0)
"""Logits (log2) of one key in each tile: less than 8 above the maximum so far of that consumer, and more, and below it."""


def rising(form: Form, with_max: bool) -> tuple[AttentionCall, torch.Tensor, torch.Tensor]:
    """(the call, what its rows and their lse should be): token i has a key in each of the first i + 1 tiles."""
    tiles, heads, d = len(RISING), 13, 576
    kv = torch.zeros(tiles, d)
    for tile, logit in enumerate(RISING):
        kv[tile, -64:-61] = torch.tensor([logit // 16, logit % 16, 1.0])
        kv[tile, 20 * tile] = 1.0 + tile
    q = torch.zeros(tiles, heads, d)
    q[..., -64], q[..., -63] = 16.0, 1.0
    indices = torch.full((tiles, 64 * tiles), -1, dtype=torch.int32)
    for token in range(tiles):
        for tile in range(token + 1):
            indices[token, 64 * tile + (7 * tile + 3) % 64] = tile
    inputs = Inputs(q.bfloat16(), pack_paged(kv, "v32", 2), indices, math.log(2), "v32")
    call = build_call(**inputs.kwargs(), return_lse=True, return_max_logits=with_max)
    plan = form.plan(call, 1, exact=True)
    run_module(form.text("v32"), plan.constants, attention_args(call, parts_of(call, 1), plan), form.grid(call, 1, 1))
    logits = torch.tensor(RISING, dtype=torch.float64)
    reach = torch.tril(torch.ones(tiles, tiles, dtype=torch.bool))
    x = torch.where(reach, logits, float("-inf")) * math.log(2)
    return call, torch.softmax(x, 1) @ kv[:, :512].double(), torch.logsumexp(x, 1)


@pytest.mark.parametrize("latent", ["fp16", "bf16"])
@pytest.mark.parametrize("with_max", [False, True], ids=["lags", "at once"])
def test_a_maximum_that_moves(latent: str, with_max: bool) -> None:
    """With fp16 latents the maximum of two consumers lags behind by up to 2^8, unless it is asked for itself."""
    call, rows, lse = rising(PAIR.replace(places=16, latent=latent), with_max)
    out = call.out.view(len(RISING), -1, 512).double()
    assert ((out - rows[:, None]).abs() <= 2**-7 * rows[:, None].abs() + 1e-3).all()
    assert call.lse is not None
    assert (call.lse.view(len(RISING), -1).double() - lse[:, None]).abs().max() < 1e-4
    if with_max:
        assert call.max_logits is not None
        best = torch.tensor(RISING).cummax(0).values * math.log(2)
        assert torch.allclose(call.max_logits.view(len(RISING), -1), best[:, None].expand(-1, 13), rtol=1e-6)


def test_the_maximum_lags() -> None:
    """What the branch saves: with keys that grow by less than 2^8 it is taken once for each consumer, else for each tile; and where
    it is left out of the text, keys that grow by more are wrong."""
    text = PAIR.text("v32")
    taken = "            if gl.max(moves.load"
    assert text.count(taken) == 1
    never = text.replace(taken, "            if (i == 0) & (gl.max(moves.load").replace(
        ", 0) >= limit:", ", 0) >= limit):"
    )
    form = PAIR.replace(places=16)
    errors = []
    for said in (text, never):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Form, "text", lambda self, layout, said=said: said)
            call, rows, _ = rising(form, False)
        errors.append((call.out.view(len(RISING), -1, 512).double() - rows[:, None]).abs().amax((1, 2)))
    assert (errors[0] < 0.1).all()
    assert (errors[1][:2] < 0.1).all()
    assert not (errors[1][5:] < 0.1).any()

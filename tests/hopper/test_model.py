"""The CPU model of Gluon itself: arithmetic, memory, PTX and errors, against numbers that are worked out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kgen.check.gluon_model import Deadlock, ModelError, run_module

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait
"""


def run(body: str, *args: Any, grid: tuple[int, ...] = (1,), seed: int = 0, before: str = "") -> None:
    """Run a kernel whose parameters are a0, a1, ..."""
    names = ", ".join(f"a{i}" for i in range(len(args)))
    lines = "\n".join("    " + line for line in body.strip("\n").splitlines())
    run_module(f"{HEAD}{before}\n@gluon.jit\ndef kernel({names}):\n{lines}\n", {}, args, grid, seed, kernel="kernel")


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_integers_wrap_and_divide_like_the_machine() -> None:
    out = torch.zeros(6, dtype=torch.int64)
    body = """
gl.store(a0, a1 * a1)
gl.store(a0 + 1, a1.to(gl.int64) * a1)
gl.store(a0 + 2, a2 // 4)
gl.store(a0 + 3, a2 % 4)
x = gl.arange(0, 2, None) * 0 + a1
gl.store(a0 + 4 + gl.arange(0, 2, None), (x * x).to(gl.int64))
"""
    run(body, out, 70_000, -7)
    square = 70_000 * 70_000
    assert out.tolist() == [square - 2**32, square, -1, -3, square - 2**32, square - 2**32]


def test_a_loop_variable_is_an_int_of_the_machine() -> None:
    out = torch.zeros(3, dtype=torch.int64)
    run("n = 0\nfor i in range(0, a1, 2):\n    gl.store(a0 + n, i.to(gl.int64) + 1)\n    n += 1", out, 6)
    assert out.tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("x.to(gl.bfloat16).to(gl.float32)", 1.0078125),  # 1.00390625 + 2^-10: above the tie, so up
        ("(x.to(gl.float16) * 2).to(gl.float32)", 2.009765625),
        ("gl.where(x > 1, x, 0.0) - 1.0", 0.0048828125),
        ("(x.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)", 1.0),
        ("gl.maximum(x, float('nan'))", 1.0048828125),
        ("gl.fma(x, x, -1.0)", 0.009789466857910156),
        ("x / 2", 0.50244140625),
    ],
)
def test_arithmetic(expression: str, expected: float) -> None:
    out = torch.zeros(4)
    run(f"x = gl.full([4], 1.0048828125, gl.float32, None)\ngl.store(a0 + gl.arange(0, 4, None), {expression})", out)
    assert out.tolist() == [expected] * 4


def test_unsigned_bytes_and_shapes() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    body = """
b = gl.load(a1 + gl.arange(0, 4, None))
w = b.to(gl.int32) << 23
s = (b - 1).to(gl.int32)
x = gl.join(w, s).reshape([2, 2, 2]).permute((1, 0, 2)).reshape([8])
gl.store(a0 + gl.arange(0, 8, None), x)
"""
    run(body, out, torch.tensor([0, 1, 255, 128], dtype=torch.uint8))
    w = [0, 1 << 23, 255 << 23, 128 << 23]
    w = [v - (1 << 32) if v >= 1 << 31 else v for v in w]
    s = [255, 0, 254, 127]
    assert out.tolist() == [w[0], s[0], w[2], s[2], w[1], s[1], w[3], s[3]]


def test_reductions() -> None:
    out = torch.zeros(4)
    body = """
x = gl.load(a1 + gl.arange(0, 2, None)[:, None] * 4 + gl.arange(0, 4, None)[None, :])
gl.store(a0 + gl.arange(0, 2, None), gl.max(x, 1))
gl.store(a0 + 2 + gl.arange(0, 2, None), gl.sum(x, axis=1))
"""
    run(body, out, torch.tensor([[1.0, float("nan"), 3, 2], [float("nan")] * 4]))
    assert out[0] == 3 and out[1:].isnan().all()


def test_masked_loads() -> None:
    """Off elements read nothing; without `other` they are poison."""
    out = torch.zeros(8)
    body = """
i = gl.arange(0, 4, None)
gl.store(a0 + i, gl.load(a1 + i * 1000, mask=i < 1, other=2.0))
gl.store(a0 + 4 + i, gl.load(a1 + i * 1000, mask=i < 1))
"""
    run(body, out, torch.ones(1))
    assert out[:5].tolist() == [1, 2, 2, 2, 1] and out[5:].isnan().all()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("gl.load(a0 + 5)", "reads bytes 20 to 23 .* of a0, which has 16 bytes"),
        ("gl.store(a0 - 1, 0.0)", "belongs to no argument|from the start of the storage"),
        (
            "gl.load((a0.to(gl.pointer_type(gl.uint8), bitcast=True) + 2).to(gl.pointer_type(gl.float32)))",
            "multiple of 4",
        ),
        ("gl.arange(0, 4, None)[:, None] + gl.arange(0, 4, None)", "different ranks"),
        ("gl.no_such_function(1)", "gluon.language.no_such_function"),
        ("gl.allocate_shared_memory(gl.int32, [2, 4], None).index(2)", "takes stage 2"),
        ("gl.allocate_shared_memory(gl.int32, [2, 4], None) + 1", "load it first"),
        ("mbarrier.wait(gl.allocate_shared_memory(gl.int64, [1], None), 0)", "never initialised"),
    ],
)
def test_mistakes_are_sentences(body: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        run(body, torch.zeros(4))


# ---------------------------------------------------------------------------------------------- PTX


def asm(text: str, constraints: str, kinds: str, *inputs: torch.Tensor, pack: int = 1) -> list[torch.Tensor]:
    """Outputs of an asm text over int32 inputs."""
    n = inputs[0].numel()
    outs = [torch.zeros(n, dtype=torch.int32) for _ in kinds.split()]
    loads = ", ".join(f"gl.load(a{len(outs) + i} + gl.arange(0, {n}, None))" for i in range(len(inputs)))
    names = ", ".join(f"gl.{kind}" for kind in kinds.split())
    stores = "".join(
        f"gl.store(a{i} + gl.arange(0, {n}, None), r[{i}].to(gl.int32, bitcast=True))\n" for i in range(len(outs))
    )
    call = f'r = gl.inline_asm_elementwise("{text}", "{constraints}", [{loads}], dtype=({names},), is_pure=True, pack={pack})'
    run(call + "\n" + stores, *outs, *inputs)
    return outs


def halves(words: torch.Tensor, dtype: torch.dtype = torch.float16) -> list[float]:
    return words.view(dtype).float().tolist()


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_conversion_of_fp8(kind: str, dtype: torch.dtype) -> None:
    """1.5, -2^-9 (the smallest), 448 (the largest), NaN; the low byte of a word comes first."""
    word = ints(0x7F7E813C, dtype=torch.int32)
    text = f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, $2; cvt.rn.{kind}x2.e4m3x2 $0, a; cvt.rn.{kind}x2.e4m3x2 $1, b; }}"
    low, high = asm(text, "=r,=r,r", "int32 int32", word)
    assert halves(low, dtype) == [1.5, -(2.0**-9)]
    found = halves(high, dtype)
    assert found[0] == 448.0 and found[1] != found[1]


def test_packed_arithmetic() -> None:
    x = torch.tensor([1.5, -3.0], dtype=torch.float16).view(torch.int32)
    y = torch.tensor([2.0, 0.5], dtype=torch.float16).view(torch.int32)
    assert halves(asm("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", "int32", x, y)[0]) == [3.0, -1.5]
    scale = torch.tensor([0.1]).view(torch.int32)
    (both,) = asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", "int32", scale, torch.tensor([2.5]).view(torch.int32))
    assert halves(both, torch.bfloat16) == [torch.tensor(0.1).bfloat16().item(), 2.5]


def test_bits() -> None:
    a, b = ints(0x33221100, dtype=torch.int32), ints(0x77665544, dtype=torch.int32)
    assert asm("prmt.b32 $0, $1, $2, 0x7610;", "=r,r,r", "int32", a, b)[0].item() == 0x77661100
    majority = asm("lop3.b32 $0, $1, $2, $3, 0xE8;", "=r,r,r,r", "int32", ints(0b1100, dtype=torch.int32),
                   ints(0b1010, dtype=torch.int32), ints(0b1001, dtype=torch.int32))  # fmt: skip
    assert majority[0].item() == 0b1000
    assert asm("and.b32 $0, $1, 0;", "=r,r", "int32", a)[0].item() == 0
    assert asm("shr.s32 $0, $1, 4;", "=r,r", "int32", ints(-32, dtype=torch.int32))[0].item() == -2


def test_branches_and_packs() -> None:
    """Two registers per instance, tied; skipped where the factor is one, NaN counts as different."""
    text = "{ .reg .pred p; setp.neu.f32 p, $4, 0f3F800000; @!p bra.uni S; mul.f32 $0, $0, $4; mul.f32 $1, $1, $5; S: }"
    x = torch.tensor([3.0, 4.0, 3.0, 4.0, 3.0, 4.0])
    f = torch.tensor([1.0, 9.0, 0.5, 0.25, float("nan"), 1.0])
    (out,) = asm(text, "=f,=f,0,1,f,f", "float32", x.view(torch.int32), f.view(torch.int32), pack=2)
    found = out.view(torch.float32)
    assert found[:4].tolist() == [3.0, 4.0, 1.5, 1.0] and found[4].isnan() and found[5] == 4.0


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(ModelError, match="kernel uses the PTX instruction 'dp4a.s32.s32'"):
        asm("dp4a.s32.s32 $0, $1, $1, $1;", "=r,r", "int32", ints(1, dtype=torch.int32))


# ---------------------------------------------------------------------------------------------- partitions

MMA = """
@gluon.jit
def group(out, a, b, early, late):
    acc = warpgroup_mma(a, b.permute((1, 0)), gl.full([64, 8], 1.0, gl.float32, None), use_acc=late, is_async=True)
    if early:
        acc = acc * 2
    acc = warpgroup_mma_wait(0, deps=[acc])
    i = gl.arange(0, 64, None)[:, None] * 8 + gl.arange(0, 8, None)[None, :]
    gl.store(out + i, acc)

@gluon.jit
def idle(out):
    pass
"""


@pytest.mark.parametrize("use_acc", [False, True])
def test_wgmma(use_acc: bool) -> None:
    x, y = torch.randn(64, 16).half(), torch.randn(8, 16).half()
    out = torch.zeros(64, 8)
    body = """
a = gl.allocate_shared_memory(gl.float16, [64, 16], None)
b = gl.allocate_shared_memory(gl.float16, [8, 16], None)
col = gl.arange(0, 16, None)[None, :]
a.store(gl.load(a1 + gl.arange(0, 64, None)[:, None] * 16 + col))
b.store(gl.load(a2 + gl.arange(0, 8, None)[:, None] * 16 + col))
gl.warp_specialize([(group, (a0, a, b, a3, a4)), (idle, (a0,))], [4], [24])
"""
    for seed in range(4):
        run(body, out, x, y, False, use_acc, before=MMA, seed=seed)
        assert torch.allclose(out, x.float() @ y.float().T + float(use_acc), atol=1e-5)
    with pytest.raises(ModelError, match="group uses an accumulator .* still in flight"):
        run(body, out, x, y, True, use_acc, before=MMA)


HANDSHAKE = """
@gluon.jit
def first(out, bars, buf):
    mbarrier.wait(bars.index(0), 0)
    gl.store(out + gl.arange(0, 4, None), buf.load(None))

@gluon.jit
def second(src, n, bars, buf):
    async_copy.async_copy_global_to_shared(buf, src + gl.arange(0, 4, None), mask=gl.arange(0, 4, None) < n)
    async_copy.mbarrier_arrive(bars.index(0), increment_count=False)

@gluon.jit
def start(src, out, n, COUNT, WARPS):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    buf = gl.allocate_shared_memory(gl.int32, [4], None)
    mbarrier.init(bars.index(0), count=COUNT)
    gl.warp_specialize([(first, (out, bars, buf)), (second, (src, n, bars, buf))], [WARPS], [24])
"""


def test_copies_arrive_once_per_thread() -> None:
    out = torch.full((4,), -1, dtype=torch.int32)
    source = torch.arange(1, 3, dtype=torch.int32)
    for seed in range(6):
        run("start(a0, a1, 2, 256, 8)", source, out, before=HANDSHAKE, seed=seed)
        assert out.tolist() == [1, 2, 0, 0]  # what the mask left out is zero, and not read
    with pytest.raises(Deadlock, match=r"first waits for parity 0 of bars\[0\] \(0 phases complete, 128 of 256"):
        run("start(a0, a1, 2, 256, 4)", source, out, before=HANDSHAKE)
    with pytest.raises(ModelError, match="arrives at bars.0. with 256 where only 128 of 128"):
        run("start(a0, a1, 2, 128, 8)", source, out, before=HANDSHAKE)


def test_shared_memory_is_poison_until_written() -> None:
    out = torch.zeros(4)
    run("gl.store(a0 + gl.arange(0, 4, None), gl.allocate_shared_memory(gl.float32, [4], None).load(None))", out)
    assert out.isnan().all()


def test_views_share_bytes() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    body = """
buf = gl.allocate_shared_memory(gl.float16, [2, 2, 4], None)
words = buf._reinterpret(gl.int32, [2, 2, 2], None)
buf.store(gl.full([2, 2, 4], 1.0, gl.float16, None))
words.index(1).slice(1, 1, dim=0).store(gl.zeros([1, 2], gl.int32, None))
gl.store(a0 + gl.arange(0, 2, None)[:, None] * 2 + gl.arange(0, 2, None)[None, :], words.index(1).load(None))
"""
    run(body, out)
    assert out.tolist() == [0x3C003C00] * 2 + [0, 0]


ORDER = """
@gluon.jit
def note(log, at, bar, who):
    for i in range(6):
        n = gl.load(at)
        gl.store(log + n, who)
        gl.store(at, n + 1)
        mbarrier.arrive(bar, count=1)

@gluon.jit
def start(log, at):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=12)
    gl.warp_specialize([(note, (log, at, bar, 1)), (note, (log, at, bar, 2))], [4], [24])
"""


def test_a_seed_is_an_interleaving() -> None:
    """The same seed switches at the same barriers, others differ."""

    def order(seed: int) -> tuple[int, ...]:
        log, at = torch.zeros(12, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        run("start(a0, a1)", log, at, before=ORDER, seed=seed)
        return tuple(log.tolist())

    orders = [order(seed) for seed in range(8)]
    assert orders == [order(seed) for seed in range(8)]
    assert len(set(orders)) > 3 and all(sorted(o) == [1] * 6 + [2] * 6 for o in orders)

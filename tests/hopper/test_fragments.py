"""Which key and dim each lane of sm90_rs_fp8 holds, and which banks its reads hit: what the CPU model, whose layouts are inert,
cannot see.

The template's own functions run here on blocks that say of every element which key and dims it is of and which threads hold
it. Layouts are evaluated from their bases, and the fragments of wgmma are written down from its documentation: lane 4 g + c of
warp w holds rows 16 w + g and 8 more, and of A the columns 2 c, 2 c + 1, and 8 more. The compiler refuses a conversion that
moves anything (`assert_trivial`), the order of a lane's registers included, which is not looked at here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.render import render_module

Bases = list[list[int]]
THREADS = 128
KEY = 1024
"""A code is KEY * key + dim."""
DIMS = {"v32": 512, "v4": 448}
GROUP = {"v32": 128, "v4": 64}


# ------------------------------------------------------------------------------------------------ layouts


@dataclass(frozen=True)
class Linear:
    registers: Any
    lanes: Any
    warps: Any
    blocks: Any
    shape: Any

    def places(self) -> torch.Tensor:
        """[threads, registers, rank]: coordinates."""
        bases = [*self.registers, *self.lanes, *self.warps]
        count = 1 << len(self.registers)
        index = torch.arange(THREADS)[:, None] * count + torch.arange(count)
        found = torch.zeros(THREADS, count, len(self.shape), dtype=torch.int64)
        for bit, base in enumerate(bases):
            found ^= ((index >> bit) & 1)[..., None] * torch.tensor(base)
        return found

    def owned(self) -> torch.Tensor:
        """bool [*shape, threads]"""
        marks = torch.zeros(*self.shape, THREADS, dtype=torch.bool)
        places = self.places()
        threads = torch.arange(THREADS)[:, None].expand(places.shape[:2])
        marks[(*places.unbind(-1), threads)] = True
        assert marks.any(-1).all(), "nobody holds some element"
        return marks


@dataclass(frozen=True)
class Slice:
    dim: int
    parent: Any

    def owned(self) -> torch.Tensor:
        found: torch.Tensor = self.parent.owned().any(self.dim)
        return found


@dataclass(frozen=True)
class Accumulators:
    """D of wgmma, [rows, columns]."""

    version: Any
    warps: Any
    instruction: Any

    def of(self, rows: int, columns: int) -> torch.Tensor:
        row, column = torch.arange(rows)[:, None], torch.arange(columns)
        thread = 32 * (row // 16 % 4) + 4 * (row % 8) + column % 8 // 2
        return thread[..., None] == torch.arange(THREADS)


@dataclass(frozen=True)
class Fragment:
    """A of wgmma in registers, [rows, columns] of 16 bits: as that of D, for each 8 columns."""

    operand: int
    parent: Accumulators
    width: int

    def of(self, rows: int, columns: int) -> torch.Tensor:
        assert (self.operand, self.width) == (0, 2)
        return self.parent.of(rows, columns)


# ------------------------------------------------------------------------------------------------ blocks


class Block:
    """Codes, and which threads hold each (None: it does not matter)."""

    def __init__(self, codes: torch.Tensor, owned: torch.Tensor | None = None) -> None:
        self.codes = codes
        self.owned = owned

    def _each(self, change: Any) -> Block:
        return Block(change(self.codes, ()), None if self.owned is None else change(self.owned, (THREADS,)))

    def reshape(self, shape: Any) -> Block:
        return self._each(lambda x, tail: x.reshape(*shape, *tail))

    def permute(self, order: Any) -> Block:
        return self._each(lambda x, tail: x.permute(*order, *([len(order)] if tail else [])))

    def expand_dims(self, dim: int) -> Block:
        return self._each(lambda x, tail: x.unsqueeze(dim))

    def take(self, place: int) -> Block:
        """One of the values that lie last."""
        return self._each(lambda x, tail: x.select(self.codes.dim() - 1, place))

    def to(self, *_: Any, **__: Any) -> Block:
        return self

    def __lshift__(self, _: int) -> Block:
        return self

    def held_by(self, other: Block) -> None:
        """Whoever holds an element here has the other's that belongs to it."""
        assert self.owned is not None and other.owned is not None
        assert (other.owned.expand(self.owned.shape) | ~self.owned).all()


@dataclass
class Read:
    """A load from shared memory: byte of each element within its stage, the layout, bytes of an element."""

    name: str
    at: torch.Tensor
    layout: Linear
    size: int


class Memory:
    """A stage of a buffer. `swizzle`: (elements in a unit, rows of a phase, phases)."""

    def __init__(
        self, name: str, codes: torch.Tensor, size: int, swizzle: tuple[int, int, int], reads: list[Read]
    ) -> None:
        vec, per_phase, phases = swizzle
        row, column = torch.arange(codes.shape[0])[:, None], torch.arange(codes.shape[1])
        phase = row // per_phase % phases
        self.codes = codes
        self.at = size * (row * codes.shape[1] + ((column // vec) ^ phase) * vec + column % vec)
        self.name, self.size, self.reads = name, size, reads

    def _view(self, change: Any) -> Memory:
        made = object.__new__(Memory)
        made.codes, made.at = change(self.codes), change(self.at)
        made.name, made.size, made.reads = self.name, self.size, self.reads
        return made

    def index(self, _: int) -> Memory:
        return self

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return self._view(lambda x: x.narrow(dim, start, length))

    def permute(self, order: Any) -> Memory:
        return self._view(lambda x: x.permute(*order))

    def load(self, layout: Any) -> Block:
        if isinstance(layout, Linear):
            self.reads.append(Read(self.name, self.at, layout, self.size))
        return Block(self.codes, None if layout is None else layout.owned())

    def store(self, block: Block) -> None:
        self.codes = block.codes


def convert_layout(x: Block, layout: Any, assert_trivial: bool = False) -> Block:
    rows_columns = isinstance(layout, (Fragment, Accumulators))
    owned = layout.of(*x.codes.shape) if rows_columns else layout.owned()
    assert x.owned is not None and torch.equal(x.owned, owned) and assert_trivial
    return Block(x.codes, owned)


def join(a: Block, b: Block) -> Block:
    assert a.owned is not None and b.owned is not None and torch.equal(a.owned, b.owned), "values of two threads"
    return Block(torch.stack((a.codes, b.codes), -1), torch.stack((a.owned, b.owned), -2))


def split(x: Block) -> tuple[Block, Block]:
    a, b = x.take(0), x.take(1)
    assert a.owned is not None and b.owned is not None and torch.equal(a.owned, b.owned), "values of two threads"
    return a, b


# ------------------------------------------------------------------------------------------------ the template


class Kernel:
    """The functions of a rendered template, on blocks, with one stage of its buffers."""

    def __init__(self, layout: str, heads: int, fp16: bool, change: tuple[str, str] | None = None) -> None:
        self.layout, self.heads, self.fp16 = layout, heads, fp16
        self.reads: list[Read] = []
        self.products: list[tuple[Block, Any]] = []
        same = lambda function=None, **_: function or same  # noqa: E731
        gl = SimpleNamespace(
            constexpr=lambda x: x, static_range=range, convert_layout=convert_layout, join=join, split=split,
            expand_dims=Block.expand_dims, where=lambda condition, a, b: b, zeros=lambda *_: None,
            DistributedLinearLayout=Linear, SliceLayout=Slice, NVMMADistributedLayout=Accumulators,
            DotOperandLayout=Fragment, BlockedLayout=lambda *_: None, shared_memory_descriptor=SimpleNamespace(reinterpret=0),
            int16=0, int32=0, uint8=0, float16=0, bfloat16=0, float32=0, thread_barrier=lambda: None,
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": gl,
            "gluon": SimpleNamespace(jit=same, constexpr_function=same),
            "async_copy": SimpleNamespace(async_load=None, wait_group=lambda _: None),
            "mbarrier": SimpleNamespace(
                wait=lambda *_: None, arrive=lambda *_, **__: None, expect=lambda *_, **__: None
            ),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": lambda _, deps: deps if len(deps) > 1 else deps[0],
        }
        text = render_module("sm90_rs_fp8", layout, "sm90")
        if change is not None:
            assert text.count(change[0]) == 1
            text = text.replace(*change)
        tree = ast.parse(text)
        tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(tree, "<template>", "exec"), names)
        names.update(
            pack_half2=lambda scale: scale, dequantise_fp16=self.dequantise, dequantise_bf16=self.dequantise,
            dequantise_pairs_fp16=self.dequantise_pairs, dequantise_pairs_bf16=self.dequantise_pairs, apart=self.apart,
        )  # fmt: skip
        self.call = SimpleNamespace(**names)
        self._fill()

    def _fill(self) -> None:
        dims, group = DIMS[self.layout], GROUP[self.layout]
        key = torch.arange(64)[:, None]

        def memory(name: str, first: int, count: int, per: int, size: int, swizzle: tuple[int, int, int]) -> Memory:
            """Elements of `per` dims."""
            codes = KEY * key + first + per * torch.arange(count // per)
            return Memory(name, codes, size, swizzle, self.reads)

        left = memory("left", 0, 256, 4, 4, (4, 1, 8))
        rope = memory("rope", dims, 64, 1, 2, (8, 1, 8))
        if self.layout == "v32":
            self.tiles: tuple[Memory, ...] = (left, memory("right", 256, 256, 4, 4, (4, 1, 8)), rope)
            self.halves = left
        else:
            right, rest = memory("right", 256, 128, 4, 4, (4, 1, 8)), memory("rest", 384, 64, 4, 4, (4, 2, 4))
            self.tiles = (left, right, rest, rope)
            self.halves = memory("halves", 384, 64, 2, 2, (8, 2, 4))
        half = (dims // group + 1) // 2  # scales
        landing = Memory("landing", KEY * key.repeat(2, 1) + group * torch.arange(2 * half), 4, (1, 1, 1), [])
        self.scales, self.pair_scales = [], []
        for side in (0, 1):
            stored = Memory("scales", torch.zeros(half, 64, dtype=torch.int64), 4, (1, 1, 1), [])
            self.call.prepare_scales(landing, stored, 0, side, False, 4)
            assert stored.codes.shape == (half, 64)
            self.scales.append(stored)
            self.pair_scales.append(Memory("pairs", stored.codes.view(half, 32, 2)[..., 0], 4, (1, 1, 1), []))
        chunks = dims // 64
        self.q_latent = [self._q(64 * i) for i in range(chunks)]
        self.q_rope = self._q(dims)
        latent = SimpleNamespace(index=lambda i: self.q_latent[i])
        rope_q = SimpleNamespace(index=lambda i: self.q_rope)
        for first, last, with_rope in ((0, 4, False), (4, chunks, True)):
            self.call.order_q(latent, latent, rope_q, None, first, last, with_rope, self.fp16, self.heads)
        self.q = (latent, rope_q)

    def _q(self, first: int) -> Memory:
        return Memory("q", (first + torch.arange(64)).repeat(self.heads, 1), 2, (1, 1, 1), [])

    def multiply(self, a: Block, b: Any, acc: Any, **_: Any) -> Any:
        self.products.append((a, b))
        return acc

    # what the inline PTX does to codes

    def same_scale(self, raw: Block, scale: Block, key: torch.Tensor) -> None:
        raw.held_by(scale)
        group = GROUP[self.layout]
        codes = scale.codes.expand(raw.codes.shape)
        assert torch.equal(codes // KEY, key) and torch.equal(codes % KEY // group, raw.codes % KEY // group)

    def dequantise(self, raw: Block, scale: Block) -> tuple[Block, Block]:
        self.same_scale(raw, scale, raw.codes // KEY)
        return tuple(Block(torch.stack((raw.codes + b, raw.codes + b + 1), -1), raw.owned) for b in (0, 2))  # type: ignore[return-value]

    def dequantise_pairs(self, even: Block, odd: Block, *scales: Block) -> tuple[Block, ...]:
        assert even.owned is not None and odd.owned is not None and torch.equal(even.owned, odd.owned)
        self.same_scale(even, scales[0], even.codes // KEY)
        if len(scales) == 2:
            self.same_scale(odd, scales[1], odd.codes // KEY)
        else:  # of two neighbouring keys of the MMA, in a word
            first, second = self.scales[0].codes[0].view(32, 2).unbind(1)
            follows = dict(zip((first // KEY).tolist(), (second // KEY).tolist(), strict=True))
            expected = torch.tensor([follows[key] for key in (even.codes // KEY).flatten().tolist()])
            assert torch.equal(odd.codes.flatten() // KEY, expected)
        return tuple(Block(torch.stack((even.codes + b, odd.codes + b), -1), even.owned) for b in range(4))

    @staticmethod
    def apart(x: Block, _: bool) -> tuple[Block, Block]:
        return Block(x.codes[..., 0], x.owned), Block(x.codes[..., 1], x.owned)

    # what is looked at

    def factors(self) -> Any:
        return self.pair_scales if self.fp16 else self.scales

    def scores(self, first: int = 0) -> list[tuple[Block, Any]]:
        full = [SimpleNamespace(index=lambda _: None)] * 2
        self.call.scores(self.tiles, self.scales, full, 0, 0, *self.q, first, 3, self.fp16, self.heads)
        return self.taken()

    def taken(self) -> list[tuple[Block, Any]]:
        found, self.products[:] = list(self.products), []
        return found

    def values(self, right: bool) -> list[tuple[Block, Any]]:
        empty = [SimpleNamespace(index=lambda _: None)] * 2
        p = Memory("p", torch.arange(64)[:, None], 2, (1, 1, 1), [])
        if not right or self.layout == "v32":
            start = self.call.first_step(self.tiles, self.factors(), 0, int(right), self.fp16)
            self.call.even_values(
                self.tiles, self.factors(), 0, p, 0, True, empty, *start, int(right), self.fp16, self.heads
            )
        else:
            steps = self.call.uneven_steps(self.tiles, self.halves, self.factors(), 0, self.fp16)
            self.call.uneven_values(
                self.tiles, self.halves, self.factors(), 0, p, 0, 0, 0, True, empty, steps, self.fp16, self.heads
            )
        return self.taken()


def row_of(key: torch.Tensor) -> torch.Tensor:
    """The row in memory of a key of the MMA: bits r2 r1 r0 become r0 r2 r1."""
    r2, r1, r0 = key >> 2 & 1, key >> 1 & 1, key & 1
    return key - key % 8 + 4 * r0 + 2 * r2 + r1


kernel = cache(Kernel)
FORMS = [(layout, heads, fp16) for layout in DIMS for heads in (16, 32, 64) for fp16 in (True, False)]


@pytest.mark.parametrize("first", [0, 4], ids=["left half first", "right half first"])
@pytest.mark.parametrize(("layout", "heads", "fp16"), FORMS)
def test_scores_multiply_the_same_dims_and_keys_lie_in_order(layout: str, heads: int, fp16: bool, first: int) -> None:
    made = kernel(layout, heads, fp16)
    seen = []
    products = made.scores(first)
    assert int(products[0][1].codes[0, 0]) == 64 * first
    assert len(products) == DIMS[layout] // 64 + 1
    for a, q in products:
        assert a.owned is not None and torch.equal(a.owned, Fragment(0, Accumulators(0, 0, 0), 2).of(64, 64))
        assert torch.equal(a.codes // KEY, row_of(torch.arange(64))[:, None].expand(64, 64))
        assert (q.codes == q.codes[:, :1]).all() and torch.equal(a.codes[0] % KEY, q.codes[:, 0])
        assert (a.codes % KEY == a.codes[0] % KEY).all()
        seen += q.codes[:, 0].tolist()
    assert sorted(seen) == list(range(DIMS[layout] + 64))


@pytest.mark.parametrize("right", [False, True], ids=["left", "right"])
@pytest.mark.parametrize(("layout", "heads", "fp16"), FORMS)
def test_values_meet_their_keys_and_leave_in_order(layout: str, heads: int, fp16: bool, right: bool) -> None:
    made = kernel(layout, heads, fp16)
    parts: dict[int, list[tuple[Block, Any]]] = {}  # by the first dim of an accumulator's steps
    for a, p in made.values(right):
        parts.setdefault(int((a.codes % KEY).min()), []).append((a, p))
    wanted = {0: 256} if not right else {256: 256} if layout == "v32" else {256: 128, 384: 64, 448: 64}
    assert {first: len(steps[0][0].codes) for first, steps in parts.items()} == wanted
    for first, steps in parts.items():
        dims = wanted[first]
        rows = steps[0][0].codes[:, 0] % KEY
        for step, (a, p) in enumerate(steps):
            keys = 16 * step + torch.arange(16)
            assert a.owned is not None and torch.equal(a.owned, Fragment(0, Accumulators(0, 0, 0), 2).of(dims, 16))
            assert torch.equal(p.codes[:, 0], keys)
            assert torch.equal(a.codes, KEY * row_of(keys) + rows[:, None])
        acc = Block(rows[:, None].expand(dims, heads), Accumulators(0, 0, 0).of(dims, heads))
        out = made.call.by_dim(acc, dims, first == 448, heads)
        assert torch.equal(out.codes, (first + torch.arange(dims))[:, None].expand(dims, heads))


def test_keys_are_named_alike_everywhere() -> None:
    """Scales and places are stored by key of the MMA; `by_row` leads back to rows of memory."""
    call = kernel("v32", 64, True).call
    rows = Block(torch.arange(64))
    assert torch.equal(call.by_key(rows).codes, row_of(torch.arange(64)))
    assert torch.equal(call.by_row(call.by_key(rows)).codes, torch.arange(64))


def test_maxima_are_dealt_out_within_warps() -> None:
    """Each step brings both keys of a pair into one lane, passes half of the elements to another lane of the warp, and leaves
    half as many; in the end a lane has two heads of its own."""
    call = kernel("v32", 64, True).call
    threads, warp = torch.arange(THREADS), torch.arange(4)[:, None, None]
    head = torch.arange(64)
    held = 32 * warp + 4 * torch.arange(8)[:, None] + (head >> 1 & 3)  # as wgmma leaves them: thread by warp, key, head
    for bit in (2, 1, 0):
        owned = call.dealt_layout(bit).owned()
        assert owned.shape == (4, 2 << bit, 64, THREADS) and (owned.sum(-1) == 1).all()
        holder = (owned * threads).sum(-1)
        assert torch.equal(holder // 32, warp.expand(holder.shape))
        assert (holder == held).float().mean() == 0.5
        first, second = holder.view(4, 2, 1 << bit, 64).unbind(1)
        assert torch.equal(first, second)
        held = first
    assert torch.equal(held[:, 0], 32 * warp[:, 0] + head // 2)


def ways(read: Read) -> int:
    """How often the worst access of a warp has to ask a bank: 1 where it is free of conflicts. A lane asks for up to 16
    neighbouring bytes at once, and 128 bytes are served at a time: all lanes, 16 or 8 of them."""
    places = read.layout.places()
    at = read.at[tuple(places.unbind(-1))]  # [threads, registers]
    width = 1
    while width < at.shape[1] and 2 * width * read.size <= 16:
        wide = at.reshape(THREADS, -1, 2 * width)
        steps = wide - wide[..., :1] == read.size * torch.arange(2 * width)
        if not (steps.all() and (wide[..., 0] % (2 * width * read.size) == 0).all()):
            break
        width *= 2
    size = width * read.size
    lanes = min(32, 128 // max(size, 4))
    first = at.reshape(THREADS, -1, width)[..., 0]
    words = (first[..., None] // 4 + torch.arange(max(1, size // 4))).reshape(
        THREADS // lanes, lanes, -1, max(1, size // 4)
    )
    worst = 0
    for group in words:
        for access in group.unbind(1):
            distinct = access.flatten().unique()
            worst = max(worst, int((distinct % 32).bincount().max()))
    return worst


@pytest.mark.parametrize("layout", DIMS)
def test_reads_of_rows_are_free_of_bank_conflicts(layout: str) -> None:
    """But for the scores' read of the 64 dims of V4 that have 64 bytes per row: eight lanes read whole rows of theirs there."""
    made = kernel(layout, 64, True)
    made.reads.clear()
    made.scores()
    scores = {read.name: ways(read) for read in made.reads}
    kinds = {"left": 1, "right": 1, "rope": 1} | ({"rest": 2} if layout == "v4" else {})
    assert scores == kinds
    made.reads.clear()
    made.values(False)
    made.values(True)
    values = {(read.name, ways(read)) for read in made.reads}
    names = ("left", "right") if layout == "v32" else ("left", "right", "halves", "rope")
    assert values == {(name, 1) for name in names}


def test_without_the_swizzle_there_are_conflicts() -> None:
    """The check sees them."""
    made = kernel("v32", 64, True)
    made.reads.clear()
    made.scores()
    made.values(False)
    plain = 4 * torch.arange(64 * 64).view(64, 64)
    chunk, step = made.reads[0], made.reads[-1]
    assert (ways(chunk), ways(step)) == (1, 1)
    assert ways(Read("left", plain[:, :16], chunk.layout, 4)) == 2  # 64 bytes of two rows
    assert ways(Read("left", plain[:16], step.layout, 4)) == 4  # 32 bytes of four


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]]", "[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]"),
        ("permute((0, 2, 3, 1, 5, 7, 4, 6))", "permute((0, 2, 3, 1, 5, 4, 7, 6))"),
        ("permute((0, 2, 3, 1, 4)).reshape([HB, 64])", "permute((0, 3, 2, 1, 4)).reshape([HB, 64])"),
        ("permute((0, 1, 3, 4, 2, 5))", "permute((0, 1, 4, 3, 2, 5))"),
        ("permute((7, 9, 2, 4, 8, 5, 3, 6, 0, 1, 10))", "permute((7, 9, 2, 4, 8, 5, 3, 6, 1, 0, 10))"),
        ("permute((2, 6, 3, 5, 7, 0, 1, 4, 8))", "permute((2, 6, 3, 5, 7, 1, 0, 4, 8))"),
        ("permute((4, 0, 2, 3, 1))", "permute((4, 0, 1, 2, 3))"),
        ("return [1], [2, 16, 4], [8, 32]", "return [1], [2, 4, 16], [8, 32]"),
    ],
)
def test_faults_are_seen(old: str, new: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        changed = Kernel("v32", 64, True, (old, new))
        for a, q in changed.scores():
            assert torch.equal(a.codes // KEY, row_of(torch.arange(64))[:, None].expand(64, 64))
            assert torch.equal(a.codes[0] % KEY, q.codes[:, 0])
        products = changed.values(False)
        rows = products[0][0].codes[:, 0] % KEY
        for step, (a, _) in enumerate(products):
            assert torch.equal(a.codes, KEY * row_of(16 * step + torch.arange(16)) + rows[:, None])
        acc = Block(rows[:, None].expand(256, 64), Accumulators(0, 0, 0).of(256, 64))
        assert torch.equal(changed.call.by_dim(acc, 256, False, 64).codes[:, 0], torch.arange(256))

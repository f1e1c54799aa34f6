"""The rows of the benchmark suites: what is computed, and on which peer's table it stands.

`portable` holds the speeds that this project set itself for the portable family and one row of each kind of work beside them.
`hopper` (bench/hopper.py) holds every row of the peers' tables. Shapes and inputs are those of the peers' measurements:
N(0, 1), distinct random indices per query, power-of-two scales, 64 requests with permuted pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.types import KernelSpec


@dataclass(frozen=True)
class Reference:
    """The best peer of a row in the peers' own measurement: another run on another lease, so not side by side.

    `l2_warm`: its rotation gathered less than the L2 holds, while ours is always cold.
    """

    peer: str
    us: float
    l2_warm: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a result table.

    `goal`: ("tflops" | "us", number) for our own time alone, or ("ratio", number) for ours / best peer.
    `pool_rows`: rows of each cache, all requests together; 0 stands for the tuner's inputs.
    `requests`: how many requests share a cache; a query draws its keys from its request's rows.
    `s_q`: query positions per batch row; `tokens` counts all of them.
    """

    name: str
    spec: KernelSpec
    tokens: int
    goal: tuple[str, float] | None = None
    lengths: bool = False
    sink: bool = False
    s_q: int = 1
    pool_rows: int = 0
    requests: int = 64
    reference: Reference | None = None

    @property
    def section(self) -> str:
        return self.name[0]

    @property
    def batch(self) -> int:
        return self.tokens // self.s_q

    @property
    def row_bytes(self) -> int:
        return self.spec.kv.token_bytes

    def flop(self, keys: int) -> int:
        """2 * heads * keys * (d_qk + d_v) for `keys` visited by all tokens together: true heads, true lengths."""
        return 2 * self.spec.heads * keys * (self.spec.d_qk + 512)


def _bf16(
    name: str, d: int, heads: int, topk: int, tokens: int, goal: tuple[str, float] | None = None, features: bool = False
) -> Row:
    spec = KernelSpec("sm90", f"bf16_d{d}", heads, topk, 0, tokens)
    return Row(name, spec, tokens, goal, lengths=features, sink=features)


def _v32(heads: int, tokens: int, goal: tuple[str, float] | None = None) -> Row:
    return Row(f"C v32 decode h{heads} t{tokens}", KernelSpec("sm90", "v32", heads, 2048, 64, tokens), tokens, goal)


def _v4(heads: int, extra: int, tokens: int) -> Row:
    name = f"D v4 decode h{heads} 128+{extra} t{tokens}"
    return Row(name, KernelSpec("sm90", "v4", heads, 128, 256, tokens, extra, 64), tokens, None, sink=True)


PORTABLE = (
    _bf16("A bf16 prefill d576 h128 topk2048", 576, 128, 2048, 4096, ("tflops", 255.0)),
    _bf16("A bf16 prefill d576 h64 topk2048", 576, 64, 2048, 4096),
    _bf16("A bf16 prefill d576 h16 topk2048", 576, 16, 2048, 4096),
    _bf16("B bf16 prefill d512 h64 topk512", 512, 64, 512, 4096, ("tflops", 225.0)),
    _bf16("B bf16 prefill d512 h64 topk512 sink+len", 512, 64, 512, 4096, features=True),
    _bf16("B bf16 prefill d512 h128 topk1024", 512, 128, 1024, 4096),
    _v32(128, 1, ("us", 19.0)),
    _v32(128, 16),
    _v32(128, 128, ("tflops", 135.0)),
    _v32(64, 1),
    _v32(64, 128),
    _v32(16, 1),
    _v32(16, 64),
    _v32(16, 256),
    _v4(64, 512, 1),
    _v4(64, 512, 64),
    _v4(64, 512, 256),
    _v4(128, 1024, 1),
    _v4(128, 1024, 128),
    _bf16("E bf16 decode d576 h16 t1", 576, 16, 2048, 1),
    _bf16("E bf16 decode d576 h16 t256", 576, 16, 2048, 256),
    _bf16("E bf16 decode d576 h128 t1", 576, 128, 2048, 1),
    _bf16("E bf16 decode d576 h128 t128", 576, 128, 2048, 128),
)

"""The data of the checks: what a call gets, and what describes a generated case."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kgen.runtime.layouts import LAYOUTS


@dataclass(frozen=True)
class Inputs:
    """The arguments of one `sparse_mla` call; shapes of decisions.md, point 6.

    q [T, h, d_qk] or [b, s_q, h, d_qk] bf16; kv flat bf16 [slots, d_qk] or paged uint8 [pages, page, 1, bytes]; indices
    int32 [T, topk], [T, 1, topk] or [b, s_q, topk]; lengths int32 [T] or [b]; attn_sink fp32 [h], natural-log units.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    sm_scale: float
    kv_layout: str
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None
    extra_kv: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_topk_length: Tensor | None = None

    def kwargs(self) -> dict[str, Any]:
        """Exactly the arguments of `sparse_mla`, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def replace(self, **changes: Any) -> Inputs:
        return dataclasses.replace(self, **changes)

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def d_qk(self) -> int:
        return self.q.shape[-1]

    @property
    def s_q(self) -> int:
        return self.q.shape[1] if self.q.dim() == 4 else 1

    @property
    def tokens(self) -> int:
        return self.q.shape[0] * self.s_q


SINK_KINDS = ("none", "zero", "normal", "near", "plus5", "minus5", "plus_inf", "minus_inf", "mixed")
LENGTH_KINDS = ("none", "full", "random", "half", "one", "zero", "negative", "over")
INDEX_KINDS = (
    *("clean", "random", "all_invalid", "some_empty", "leading", "trailing", "alternating", "single", "wild"),
    *("duplicates", "tail"),
)
SCALE_KINDS = ("flashmla", "vllm", "sglang", "arbitrary", "odd_fp32", "ue8m0_extremes", "nan_scale")


@dataclass(frozen=True)
class CaseSpec:
    """A generated case, described; `kgen.check.cases.make_case` builds it. Adversarial unless told otherwise.

    index kinds (`index_at`, `index_value` are their arguments): clean: all valid; random: one in five is wild;
    all_invalid; some_empty: every third row has no valid key; leading/trailing: `index_at` masked columns; alternating:
    masked and valid blocks of `index_at`; single: one valid key at column `index_at`; wild: `index_value` at column
    `index_at` of every row; duplicates: a quarter of the keys, repeated; tail: valid keys only in the last columns.
    page_gap: bytes added to the page stride (to the row stride of flat caches); negative: takes padding away.
    value_scale: size of K's elements; 0.1 is what FlashMLA's tests use and what its absolute bounds are made for.
    q_pad: q and indices are slices of wider buffers.
    """

    layout: str = "bf16_d576"  # a key of kgen.runtime.layouts.LAYOUTS
    heads: int = 16
    topk: int = 64
    page: int = 0  # 0: 1 for flat caches, 64 for paged ones
    slots: int = 256
    tokens: int = 3
    s_q: int = 1  # tokens = batch * s_q; above 1, q is 4-D and lengths are one per batch row
    extra_topk: int = 0
    extra_page: int = 0
    extra_slots: int = 0
    sink: str = "normal"
    lengths: str = "random"
    index: str = "random"
    index_at: int = 0
    index_value: int = -1
    scale_rule: str = "flashmla"
    sm_scale: float | None = None  # None: d_qk ** -0.5
    value_scale: float = 0.1
    page_gap: int = 0
    poison: bool = True
    peaked: bool = True
    q_pad: bool = True
    index_3d: bool = False  # indices as [T, 1, topk]
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("layout", self.layout, tuple(LAYOUTS)),
            ("sink", self.sink, SINK_KINDS),
            ("lengths", self.lengths, LENGTH_KINDS),
            ("index", self.index, INDEX_KINDS),
            ("scale_rule", self.scale_rule, SCALE_KINDS),
        ):
            if value not in known:
                raise ValueError(f"CaseSpec.{name} is {value!r}; it must be one of {', '.join(known)}")
        if self.s_q < 1 or self.tokens % self.s_q:
            raise ValueError(f"CaseSpec.tokens {self.tokens} is not a multiple of s_q {self.s_q}")

    @property
    def paged(self) -> bool:
        return LAYOUTS[self.layout].paged

    @property
    def kv_layout(self) -> str:
        return LAYOUTS[self.layout].kv_layout

    @property
    def d_qk(self) -> int:
        return LAYOUTS[self.layout].d_qk

    @property
    def main_page(self) -> int:
        return (self.page or 64) if self.paged else 1

    @property
    def keys(self) -> int:
        """Key visits of the case, the unit of the interpreter's budget (decision 17: at most 3,000 a case)."""
        return self.tokens * (self.topk + self.extra_topk)

    @property
    def slug(self) -> str:
        """Readable name; fields at their default are left out after the shape."""
        extra = f"+{self.extra_topk}" if self.extra_topk else ""
        pages = f"-p{self.main_page}" + (f"+{self.extra_page}" if self.extra_topk else "") if self.paged else ""
        slots = f"-s{self.slots}" + (f"+{self.extra_slots}" if self.extra_topk else "")
        parts = [f"{self.layout}-h{self.heads}-k{self.topk}{extra}{pages}{slots}-t{self.tokens}"]
        shown = {"layout", "heads", "topk", "page", "slots", "tokens", "extra_topk", "extra_page", "extra_slots"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in shown and value != field.default:
                parts.append(f"{field.name}={value}")
        return "-".join(parts)

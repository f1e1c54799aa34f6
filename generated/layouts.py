"""KV-cache layouts: every byte fact that a kernel, a validator or a reference needs, in one frozen table.

Sources: FlashMLA `csrc/api/sparse_decode.h` and `tests/quant.py` @9241ae3 (V32, V4); vLLM, SGLang and FlashInfer for the
two placements of the 528-byte V4.1 record. Offsets are bytes. `t` is the position of a token inside its page of `P` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

D_V = 512
"""Width of V in every supported layout: the first 512 dimensions of a cached row."""


@dataclass(frozen=True)
class KvLayout:
    """Where the parts of one cached token lie.

    A row is `latent_dims` values (fp8 e4m3fn with one scale per `group` dims, or bf16) followed in the head dimension by
    `rope_dims` unquantised bf16 values. The row of token t starts at `t * row_bytes` in its page; the rope part at
    `+ rope_offset`. Scales are inline (`row + scale_offset`) or, in a footer layout, at `P * row_bytes + t * scale_stride`.
    """

    name: str
    kv_layout: str  # the word of the public API; bf16 stands for both widths
    d_qk: int
    latent_dims: int
    rope_dims: int
    group: int  # dims that share a scale; 0: no scales
    scale: str  # "none", "fp32" or "ue8m0"
    row_bytes: int
    rope_offset: int
    scale_offset: int  # inline only, else -1
    scale_stride: int  # footer only, else 0
    page_align: int  # writers round the page stride up to a multiple of this; readers accept any stride

    @property
    def fp8(self) -> bool:
        return self.scale != "none"

    @property
    def paged(self) -> bool:
        """bf16 caches are flat rows ([slots, d_qk]); all fp8 caches are paged."""
        return self.fp8

    @property
    def footer(self) -> bool:
        return self.scale_stride > 0

    @property
    def groups(self) -> int:
        return self.latent_dims // self.group if self.group else 0

    @property
    def token_bytes(self) -> int:
        """Logical bytes per token: the last dimension of the cache tensor as engines shape it."""
        return self.row_bytes + self.scale_stride

    @property
    def v_latent(self) -> int:
        """V dims that come from the latent part; the other `D_V - v_latent` come from the rope part."""
        return min(self.latent_dims, D_V)

    @property
    def v_rope(self) -> int:
        return D_V - self.v_latent

    def page_bytes(self, page: int) -> int:
        """Bytes of a page of `page` tokens as the engines' writers allocate it (footer and alignment included)."""
        raw = page * self.token_bytes
        return -(-raw // self.page_align) * self.page_align


LAYOUTS: dict[str, KvLayout] = {
    layout.name: layout
    for layout in (
        # fmt: off
        #        name          word          d_qk latent rope group scale    row   rope@ scale@ footer align
        KvLayout("bf16_d576", "bf16", 576, 512, 64, 0, "none", 1152, 1024, -1, 0, 1),
        KvLayout("bf16_d512", "bf16", 512, 512, 0, 0, "none", 1024, -1, -1, 0, 1),
        KvLayout("v32", "v32", 576, 512, 64, 128, "fp32", 656, 528, 512, 0, 1),
        KvLayout("v4", "v4", 512, 448, 64, 64, "ue8m0", 576, 448, -1, 8, 576),
        KvLayout("v41_footer", "v41_footer", 512, 512, 0, 32, "ue8m0", 512, -1, -1, 16, 512),
        KvLayout("v41_inline", "v41_inline", 512, 512, 0, 32, "ue8m0", 528, -1, 512, 0, 528),
        # fmt: on
    )
}

KV_LAYOUT_WORDS = tuple(dict.fromkeys(layout.kv_layout for layout in LAYOUTS.values()))
DUAL_LAYOUTS = ("v4", "v41_footer", "v41_inline")
"""Layouts that may carry a second (compressed) cache under the same softmax."""


def find_layout(kv_layout: str, d_qk: int) -> KvLayout | None:
    """The layout of an API word and a query width, or None when there is no such pair."""
    for layout in LAYOUTS.values():
        if layout.kv_layout == kv_layout and layout.d_qk == d_qk:
            return layout
    return None

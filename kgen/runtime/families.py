"""What differs between kernel families when one is launched: constants, grid, extra arguments, and what a call must have.

Every family's `attention_kernel` takes the arguments of `launch.attention_args`. The Hopper families are written in Gluon:
behind those they take the token count and the split count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .layouts import LAYOUTS

FP16_SCALES = (6e-5, 146.0)
"""Group scales inside this range keep scale * e4m3 (at most 448) exact enough and finite in fp16 (146 * 448 < 65504)."""

MAX_SPLITS = 64
"""Parts that the keys of a token may be split into, at most."""

NOT_CONSTANTS = ("block_h", "block_k", "splits", "specialise", "partial", "latent", "chunk")
"""Tunables of a Gluon family that are no constants of its kernel under their own name."""


PAIRED_REGISTERS = 128
"""Registers per thread at which two programs of a family that spares the L1 share an SM."""


@dataclass(frozen=True)
class Family:
    """One kernel family.

    `gluon`: warp-specialised; there is no interpreter for it, and rows are copied 16 bytes at a time, so that a call must be
    `aligned`: tensors that start at a multiple of 16 bytes, strides of q, out and the caches that are multiples of 16
    (elements; bytes for paged caches), which is what Triton can see, and a positive `sm_scale`.
    `plane`: its programs lie in two dimensions, (token, head block) and split, so that none divides by the split count.
    `counter`: its kernel takes a pointer to one int32 behind the other arguments, which is 0 when it is `dynamic`.
    `ctas`: blocks of a cluster. Each has a head block of one item, so that a program occupies as many SMs, and a call must have
    heads for all of them (`min_heads`): a block without heads would do half of the work for nothing.
    `spares_l1`: no more shared memory is set aside than its programs take. Rows on their way to registers lie in the L1, which
    has what is left; Triton has all of it set aside for any kernel of more than 48 KB (docs/kernels/sm90_few.md).
    `lets_go_late`: its programs let the merge be launched when they are nearly done, not when they begin, so that it crowds onto
    no SM that they need.
    `most_programs`, `most_keys`: programs along tokens and head blocks, and keys of a token, from which on it must not be launched.
    """

    name: str
    layouts: tuple[str, ...]
    archs: tuple[str, ...] | None  # None: every arch
    gluon: bool
    plane: bool = False
    counter: bool = False
    ctas: int = 1
    min_heads: int = 1
    spares_l1: bool = False
    lets_go_late: bool = False
    most_programs: int | None = None
    most_keys: int | None = None

    def programs_per_sm(self, maxnreg: int | None) -> int:
        """Programs of an SM that shared memory is set aside for; 0: whatever Triton asks for."""
        return (2 if maxnreg == PAIRED_REGISTERS else 1) if self.spares_l1 else 0


FAMILIES = {
    family.name: family
    for family in (
        Family("portable", tuple(LAYOUTS), None, False, plane=True),
        Family("sm90_ws", ("bf16_d576", "bf16_d512"), ("sm90",), True, counter=True),
        Family("sm90_ws_fp8", ("v32", "v4"), ("sm90",), True),
        Family("sm90_pair_fp8", ("v32", "v4"), ("sm90",), True),
        Family("sm90_rs_fp8", ("v32", "v4"), ("sm90",), True),
        Family("sm90_cluster_fp8", ("v32", "v4"), ("sm90",), True, ctas=2, min_heads=65),
        Family(
            "sm90_few",
            ("bf16_d576", "bf16_d512", "v32", "v4"),
            ("sm90",),
            True,
            plane=True,
            spares_l1=True,
            lets_go_late=True,
            most_programs=2**22,
            most_keys=2**27,  # it divides in fp32
        ),  # fmt: skip
    )
}


@lru_cache(maxsize=1024)
def known_family(module: str, layout: str) -> Family | None:
    """The family of an emitted module's name, `<family>_<layout>` with or without `_c<chunk>`; None: it is of no known one."""
    return FAMILIES.get(module.partition(f"_{layout}")[0])


def family_of(module: str, layout: str) -> Family:
    """The family of an emitted module. Raises where there is none."""
    family = known_family(module, layout)
    if family is None:
        raise ValueError(f"Module {module!r} is of no family that this package can launch: emit the package again.")
    return family


def is_gluon(module: str, layout: str) -> bool:
    """Whether an emitted module is of a family that asks for an aligned call and a GPU."""
    family = known_family(module, layout)
    return family is not None and family.gluon


def attention_constants(
    family: Family, tunables: Mapping[str, Any], exact: Mapping[str, int], dual: bool, split: bool, upcast: bool
) -> dict[str, Any]:
    """Constants of `attention_kernel`. `exact`: heads, topk, extra_topk, page, extra_page, each 0 in the generic form."""
    if family.gluon:
        constants = {
            "DUAL": dual, "SPLIT": split, "PAGE": exact["page"], "EXTRA_PAGE": exact["extra_page"],
            "HB": tunables["block_h"], "FP16": tunables["latent"] == "fp16",
        }  # fmt: skip
        own = {name.upper(): value for name, value in tunables.items() if name not in NOT_CONSTANTS}
        return constants | own
    return {
        "BLOCK_H": tunables["block_h"],
        "BLOCK_K": tunables["block_k"],
        "SWAP_AB": tunables["swap_ab"],
        "SCORE_SCALES": tunables["scale_site"] == "score",
        "PREFETCH": tunables["prefetch"],
        "DUAL": dual,
        "SPLIT": split,
        "HEADS": exact["heads"],
        "TOPK": exact["topk"],
        "EXTRA_TOPK": exact["extra_topk"],
        "PAGE": exact["page"],
        "EXTRA_PAGE": exact["extra_page"],
        "UPCAST": upcast,
    }


def exact_sums(family: Family, tunables: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """The form for a call that asks for lse. The lean form of sm90_rs_fp8 sums P as the MMA has it, rounded to fp16: that suits
    the output, whose numerator is made of the same P, but it moves lse by up to 3.3e-4 (seen; inside FlashMLA's bounds, not inside
    the cosine that tells one rounding of K from another). The form that sums in fp32 was tuned beside it."""
    if family.name != "sm90_rs_fp8" or not dict(tunables).get("lean"):
        return tunables
    return tuple((name, False if name == "lean" else value) for name, value in tunables)


def grid_of(family: Family, persistent: bool, tokens: int, head_blocks: int, splits: int, sms: int) -> tuple[int, ...]:
    """Programs of one launch: (token, head block), the block fastest, by split; or items in one dimension, head block fastest,
    then split, then token, of which a persistent kernel runs one program per SM at most. A cluster is one program: its item has
    as many head blocks as the cluster has blocks, and it occupies as many SMs."""
    if family.plane:
        return (tokens * head_blocks, splits)
    items = tokens * -(-head_blocks // family.ctas) * splits
    return (min(items, max(1, sms // family.ctas)) if persistent else items,)


FEW_PROGRAMS = 128
"""About the SMs of one device: a call of fewer programs splits its keys even where its entry's token count needed no split."""


def splits_for(splits: int, anchor: int, tokens: int, head_blocks: int, blocks: int, per_sm: int = 1) -> int:
    """Parts of a token's keys, `blocks` blocks of them, in a call of `tokens` tokens by a kernel that was tuned with `splits` parts
    at `anchor` tokens: the number of programs stays about the same, or the parts do while these make no more programs than a
    device holds at once, `per_sm` on an SM, and no part gets less than one block."""
    few = FEW_PROGRAMS * per_sm
    if splits > 1:
        splits = max(-(-splits * anchor // tokens), min(splits, few // (tokens * head_blocks)))
    elif tokens < anchor:
        splits = min(-(-few // (tokens * head_blocks)), anchor // tokens)
    return max(1, min(splits, blocks, MAX_SPLITS))


EARLY_MERGE_PROGRAMS = 64
"""Half of the SMs of an H200: attention kernels of more programs that let the merge go at once are merged after they have ended."""


def merge_starts_early(family: Family, programs: int) -> bool:
    """Whether the merge is launched before an attention kernel of `programs` programs ends. Only Gluon families let it
    (griddepcontrol.launch_dependents), and where few SMs are idle the merge would crowd onto them: 1 token 0.7 us faster, 16
    tokens in 8 parts 0.7 us slower (docs/kernels/combine.md). Let go late it gains with any number of programs."""
    return family.gluon and (family.lets_go_late or programs <= EARLY_MERGE_PROGRAMS)


def part_type(family: Family, tunables: Mapping[str, Any]) -> str:
    """Type of the parts of a split: fp16, fp32 or bf16. A part is a mean of values, so that where these are in fp16 it is inside
    fp16's range, and its rounding is a tenth of what is allowed (docs/kernels/combine.md)."""
    if family.gluon:
        return "fp16" if tunables.get("latent") == "fp16" else "fp32"
    return str(tunables.get("partial", "fp32"))


def combine_tile(rows: int, splits: int, parts: str = "fp32") -> tuple[int, int, int]:
    """(parts that the tile holds, output dims per program, warps) of the merge of `rows` rows of `splits` parts of a type. The
    parts are rounded up to a power of two. Measured on an H200 (docs/kernels/combine.md): few rows share their dims out; else a
    row is one program of two warps, and many parts of fp32 are fastest in halves. A warp takes 128 dims of fp32 at a time and 256
    of fp16: with more warps than that the parts are summed up through shared memory."""
    held = max(2, 1 << (splits - 1).bit_length())
    if rows <= 32 and held == 64:  # 128 dims of 64 parts would be 256 registers per lane
        return held, 32, 1
    if rows <= 32 or (parts == "fp16" and (rows <= 256 or splits > 32)):
        return held, 128, 1
    return (held, 512, 2) if splits < 8 or parts == "fp16" else (held, 256, 2)

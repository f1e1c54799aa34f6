"""How many parts the keys of a token are split into, by the token count of a call: counted by hand and by trying."""

from __future__ import annotations

import itertools

import pytest

from kgen.runtime.families import combine_tile, splits_for
from kgen.runtime.launch import make_plan
from kgen.runtime.table import Entry, Provenance, Shape, config
from kgen.ties import at_half_tokens
from kgen.types import Candidate, KernelSpec, LaunchOptions
from tests.tune.samples import make_record


def parts(tokens: int, anchor: int, splits: int, heads: int, topk: int, extra_topk: int, block_h: int = 16) -> int:
    """What a launch of an entry takes that was tuned with `splits` parts at `anchor` tokens."""
    made = config(4, 1, block_h=block_h, block_k=64, splits=splits, latent="bf16", specialise=False)
    entry = Entry(
        "v4", True, heads, (topk, topk), (extra_topk, extra_topk), 64, 64, (1, 4096), "sm90_few_v4", made,
        Provenance("measured", "h200", us=10.0, anchor_tokens=anchor),
    )  # fmt: skip
    return make_plan(Shape("v4", heads, topk, 64, tokens, extra_topk, 64), entry, exact=True).splits


@pytest.mark.parametrize(
    ("tokens", "expected"),
    # 10 blocks of keys and 4 blocks of heads. All 10 parts of 3 tokens are 120 programs, of 4 tokens 160: 8 parts are 128.
    [(1, 10), (2, 10), (3, 10), (4, 8), (5, 6), (8, 4), (9, 3), (16, 2), (17, 1), (32, 1), (33, 1)],
)
def test_parts_are_kept_while_the_device_is_not_full(tokens: int, expected: int) -> None:
    """One token of V4 with 64 heads was tuned with 10 parts, which are 40 programs."""
    assert parts(tokens, anchor=1, splits=10, heads=64, topk=128, extra_topk=512) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 34), (2, 32), (4, 16), (5, 13), (16, 4), (31, 3), (63, 2), (64, 1), (65, 1), (200, 1)],
)
def test_a_tuned_count_of_a_full_device_follows_the_tokens(tokens: int, expected: int) -> None:
    """16 tokens of 32 heads in blocks of 16 by 4 parts are 128 programs, and stay about as many: 34 blocks are the most parts,
    5 tokens need 12.8 parts, 31 tokens 2.06."""
    assert parts(tokens, anchor=16, splits=4, heads=32, topk=128, extra_topk=2048) == expected


def test_rules_that_hold_for_every_count() -> None:
    for tuned, anchor, tokens, head_blocks in itertools.product(
        (2, 3, 5, 8, 16, 32), (1, 2, 4, 16, 64), (*range(1, 40), 64, 100, 256, 5000), (1, 2, 4, 8)
    ):
        found = splits_for(tuned, anchor, tokens, head_blocks, blocks=64)
        as_many_programs = next(n for n in range(1, 10**6) if n * tokens >= tuned * anchor)
        fits = [n for n in range(1, tuned + 1) if n * tokens * head_blocks <= 128]
        assert found == min(64, max([as_many_programs, *fits])), (tuned, anchor, tokens, head_blocks)
        if (
            tokens > anchor
        ):  # no more parts than were tuned, and a full device gets no more programs than the rounding makes
            assert found <= tuned
            assert found * tokens * head_blocks <= max(128, tuned * anchor * head_blocks + (tokens - 1) * head_blocks)


@pytest.mark.parametrize(
    ("maxnreg", "tokens", "tuned", "expected"),
    [
        (128, 128, 1, 2),  # two programs on an SM: 128 are half of what the device holds
        (None, 128, 1, 1),
        (128, 256, 1, 1),
        (128, 64, 1, 4),
        (128, 128, 2, 4),  # at 256 tokens two parts are 512 programs
    ],
)
def test_parts_follow_the_programs_that_an_sm_holds(
    maxnreg: int | None, tokens: int, tuned: int, expected: int
) -> None:
    """16 heads, tuned with 256 tokens; what the tuner times with half of them is what the launcher makes of it."""
    tunables = {"block_h": 16, "block_k": 64, "splits": tuned, "latent": "bf16", "specialise": False}
    entry = Entry(
        "bf16_d576", False, 16, (2048, 2048), (0, 0), None, None, (65, 256), "sm90_few_bf16_d576",
        config(4, 1, maxnreg, **tunables), Provenance("measured", "h200", us=10.0, anchor_tokens=256),
    )  # fmt: skip
    assert make_plan(Shape("bf16_d576", 16, 2048, 0, tokens), entry, exact=True).splits == expected
    if tokens == 128:
        spec = KernelSpec("sm90", "bf16_d576", 16, 2048, 0, 256)
        record = make_record(spec=spec, candidate=Candidate.make("sm90_few", tunables, LaunchOptions(4, 1, maxnreg)))
        assert at_half_tokens(record)["splits"] == expected


def test_keys_that_were_not_split_stay_whole_with_more_tokens() -> None:
    assert [parts(tokens, 64, 1, 128, 128, 512, block_h=64) for tokens in (1, 16, 32, 63, 64, 65, 1000)] == [
        10, 4, 2, 1, 1, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize(("parts", "at_once"), [("fp32", 128), ("fp16", 256)])
def test_the_merge_has_no_warps_that_would_share_out_the_parts(parts: str, at_once: int) -> None:
    """A lane loads 16 bytes, so that a warp takes that many dims of a row at once."""
    for rows, splits in itertools.product((1, 16, 32, 33, 128, 256, 257, 2048, 70_000), range(2, 65)):
        held, dims, warps = combine_tile(rows, splits, parts)
        assert held >= splits > held // 2 and 512 % dims == 0
        assert warps == 1 or dims >= warps * at_once
        registers = held * dims // (32 * warps) // (2 if parts == "fp16" else 1)
        assert registers <= 128 or (parts == "fp32" and rows > 32 and splits > 32)
    assert combine_tile(1, 64, parts) == (64, 32, 1) and combine_tile(2048, 4, parts) == (4, 512, 2)

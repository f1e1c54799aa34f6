"""The look-up: order of preference, honest fallbacks, the same answer in every process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen.runtime.select import Choice, is_exact, missing, select, token_breaks
from kgen.runtime.table import Entry, Shape

from .samples import MOST, entry, key_of, toy_table

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape("v4", heads=64, topk=128, page=64, tokens=16)


def pick(entries: list[Entry] | tuple[Entry, ...], shape: Shape = SHAPE, device_class: str | None = "h200") -> Choice:
    choice = select(entries, shape, device_class)
    assert choice is not None
    return choice


@pytest.mark.parametrize(
    "row", toy_table(), ids=lambda row: f"{row.layout}-{row.heads}-{row.topk}-{row.tokens}-{row.dual}"
)
def test_every_key_finds_its_own_entry(row: Entry) -> None:
    choice = pick(toy_table(), key_of(row))
    assert choice.entry == row and choice.exact and choice.fallback is None
    assert choice.why == "Made for this shape (same class: measured on h200)."


def test_same_class_then_another_class_then_static() -> None:
    static, other = entry(source="static"), entry(device_class="h100")
    own = entry(heads=8)  # not made for the shape, but measured here
    assert pick([static, other, own]).entry is own
    choice = pick([static, other])
    assert choice.entry is other and choice.exact
    assert choice.fallback == "no entry measured on h200 serves it, one of h100 does"
    choice = pick([static])
    assert choice.exact and choice.fallback is not None and "never timed" in choice.fallback
    assert pick([static, other], device_class=None).entry is other


def test_inherited_counts_as_measured() -> None:
    rows = [entry(source="static"), entry(source="inherited")]
    assert pick(rows).entry is rows[1] and pick(rows).fallback is None


@pytest.mark.parametrize(("heads", "served_by"), [(1, 8), (8, 8), (11, 16), (17, 64), (66, 128), (128, 128)])
def test_the_next_larger_head_count_serves(heads: int, served_by: int) -> None:
    rows = [entry(heads=h) for h in (128, 8, 64, 16)]
    choice = pick(rows, replace(SHAPE, heads=heads))
    assert choice.entry.heads == served_by and choice.exact == (heads == served_by)
    if heads != served_by:
        assert choice.fallback == f"generic form, made for {served_by} heads, asked for {heads}"


def test_fewer_heads_when_nothing_is_larger() -> None:
    assert pick([entry(heads=8), entry(heads=16)], replace(SHAPE, heads=100)).entry.heads == 16


@pytest.mark.parametrize(
    ("topk", "served_by"), [(1, (1, 128)), (129, (641, 2048)), (192, (641, 2048)), (9000, (641, 2048))]
)
def test_any_topk_is_served(topk: int, served_by: tuple[int, int]) -> None:
    """B12: a width outside the ranges gets a generic kernel with a named fallback, never a misleading guard."""
    choice = pick([entry(topk=(1, 128)), entry(topk=(641, 2048))], replace(SHAPE, topk=topk))
    assert choice.entry.topk == served_by
    assert choice.exact == (served_by[0] <= topk <= served_by[1])
    if not choice.exact:
        assert choice.fallback == f"generic form, made for topk {served_by[0]} to {served_by[1]}, asked for {topk}"


def test_page_equal_then_any_then_another() -> None:
    equal, any_page, another = entry(page=64), entry(page=None), entry(page=2)
    assert pick([another, any_page, equal]).entry is equal
    assert pick([another, any_page]).entry is any_page and pick([another, any_page]).exact
    choice = pick([another])
    assert not choice.exact and choice.fallback == "generic form, made for page 2, asked for 64"


def test_token_bucket_then_the_next_larger_then_the_nearest_smaller() -> None:
    rows = [entry(tokens=(1, 1)), entry(tokens=(17, 64)), entry(tokens=(65, 256))]
    assert [pick(rows, replace(SHAPE, tokens=t)).entry.tokens for t in (0, 1, 2, 17, 64, 65, 9999)] == [
        (1, 1), (1, 1), (17, 64), (17, 64), (17, 64), (65, 256), (65, 256),
    ]  # fmt: skip


def test_heads_weigh_more_than_topk_and_topk_more_than_tokens() -> None:
    heads, topk, tokens = entry(heads=128), entry(topk=(129, 640)), entry(tokens=(17, MOST))
    assert pick([heads, topk, tokens]).entry is tokens
    assert pick([heads, topk]).entry is topk


def test_one_cache_and_two_stand_in_for_each_other_last() -> None:
    """The kernels of a layout serve both, so an entry of the other kind serves in generic form when there is no better."""
    two = replace(SHAPE, extra_topk=512, extra_page=2)
    dual, single = entry(extra=(1, 512)), entry(heads=8)
    assert select([entry("v32")], SHAPE, "h200") is None
    for shape, other in ((two, entry()), (SHAPE, dual)):
        choice = pick([other], shape)
        assert choice.entry is other and not choice.exact and not is_exact(other, shape)
    assert pick([dual], SHAPE).fallback == "generic form, made for two caches, asked for one cache"
    # the number of caches comes before every width: 8 heads of the right kind beat 64 of the wrong one
    assert pick([dual, single], SHAPE).entry is single


def test_extra_axes_of_two_caches() -> None:
    two = replace(SHAPE, extra_topk=600, extra_page=2)
    small, wide = entry(extra=(1, 512), extra_page=2), entry(extra=(513, 1152), extra_page=64)
    choice = pick([small, wide], two)
    assert choice.entry is wide and choice.fallback == "generic form, made for extra page 64, asked for 2"


def test_a_config_is_used_only_for_what_it_was_made_for() -> None:
    """B21: exact says so, and only then may a kernel's constants be the shape's."""
    row = entry(page=64, tokens=(1, 16))
    changes: tuple[dict[str, Any], ...] = ({"heads": 63}, {"topk": 129}, {"page": 2}, {"tokens": 17})
    for change in changes:
        choice = pick([row], replace(SHAPE, **change))
        assert not choice.exact and choice.fallback is not None and "generic form" in choice.fallback


def test_every_other_entry_has_its_reason() -> None:
    rows = [
        entry(),
        entry("v32"),
        entry(extra=(1, 512)),
        entry(device_class="h100"),
        entry(source="static"),
        entry(heads=128),
        entry(topk=(129, 640)),
        entry(tokens=(64, MOST)),
        entry(page=2),
        entry(topk=(1, 256)),
    ]
    reasons = pick(rows).reasons_against
    assert [row for row, _ in reasons] == rows[1:]
    for (_, sentence), words in zip(
        reasons,
        (
            "It reads layout v32, not v4.",
            "It was made for two caches; the call has one cache.",
            "It was measured on h100; the chosen one was measured on h200.",
            "It was ranked by the cost model and never timed; the chosen one was measured on h200.",
            "It was made for 128 heads; the chosen one, for 64 heads, is nearer to 64.",
            "It was made for topk 129 to 640; the chosen one, for topk 1 to 128, is nearer to 128.",
            "It was made for 64 and more tokens; the chosen one, for 1 and more tokens, is nearer to 16.",
            "It was made for page 2; the chosen one fits better.",
            "It serves this shape too, but was made for a wider range.",
        ),
        strict=True,
    ):
        assert sentence == words
    assert "left out" in dict(
        (row.heads, why) for row, why in select(rows, SHAPE, "h200", exclude=[rows[5]]).reasons_against  # type: ignore[union-attr]
    )[128]  # fmt: skip


def test_rivals_come_nearest_first() -> None:
    """What `kgen explain` shows: never five entries of another layout before the one that nearly served."""
    other, far, near, other_class, out = (
        entry("v32"),
        entry(heads=128),
        entry(tokens=(64, MOST)),
        entry(device_class="h100"),
        entry(topk=(1, 256)),
    )
    choice = select([other, far, out, other_class, near, entry()], SHAPE, "h200", exclude=[out])
    assert choice is not None and choice.entry == entry()
    assert [row for row, _ in choice.rivals] == [near, far, other_class, out, other]
    assert sorted(choice.rivals, key=repr) == sorted(choice.reasons_against, key=repr)


def test_the_order_of_a_table_of_distinct_keys_does_not_matter() -> None:
    rows, shapes = list(toy_table()), [key_of(row) for row in toy_table()]
    shapes += [replace(shape, heads=11, topk=200, page=7, tokens=33) for shape in shapes]
    first = [pick(rows, shape).entry for shape in shapes]
    random.Random(7).shuffle(rows)
    assert [pick(rows, shape).entry for shape in shapes] == first


def test_coverage_of_a_model() -> None:
    """B13: the shapes that a model needs at every tensor-parallel size, drafts included, against the table."""
    needed = [
        Shape("v4", heads, topk, 64, tokens) for heads in (8, 16, 64) for topk in (128, 512) for tokens in (1, 300)
    ]
    assert missing(toy_table(), needed) == []
    draft = Shape("v4", 32, 256, 64, 16)
    wide = Shape("v4", 16, 1152, 64, 16)
    assert missing(toy_table(), [*needed, draft, wide]) == [draft, wide]


def test_the_choice_changes_only_at_breaks() -> None:
    rows = [entry(tokens=(2, 5)), entry(tokens=(9, 16), heads=32), entry(tokens=(12, 12)), entry(tokens=(30, 40))]
    shape = replace(SHAPE, tokens=64)
    breaks = token_breaks(rows, shape)
    assert breaks == [1, 2, 6, 9, 12, 13, 17, 30, 41]
    chosen = {t: pick(rows, replace(shape, tokens=t)) for t in range(1, 65)}
    for t in range(2, 65):
        if t not in breaks:
            assert (chosen[t].entry, chosen[t].exact) == (chosen[t - 1].entry, chosen[t - 1].exact)


PROCESS = """
import hashlib, itertools
from tests.runtime.samples import toy_table
from kgen.runtime.select import select
from kgen.runtime.table import Shape
picks = [
    repr((c.entry, c.exact, c.why, c.fallback, c.reasons_against))
    for layout, heads, topk, tokens in itertools.product(("v4", "v32"), (1, 11, 64, 100), (5, 192, 3000), (1, 33, 5000))
    if (c := select(toy_table(), Shape(layout, heads, topk, 64, tokens), "h100"))
]
print(len(picks), hashlib.sha256("".join(picks).encode()).hexdigest())
"""


def test_four_processes_agree() -> None:
    """B62: ranks that choose differently deadlock, so nothing may hang on hashes, order of arrival or the process."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT), "RANK": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    answers = {process.communicate(timeout=60)[0] for process in running}
    assert len(answers) == 1 and answers.pop().startswith("72 ")

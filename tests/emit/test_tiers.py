"""Which records become which tier: the fastest of all, of those that need no promise, of those that always run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kgen.archs import load_arch
from kgen.emit import table_text, template_hashes
from kgen.runtime.select import select
from kgen.runtime.table import Entry, Shape
from kgen.select import BEATEN, select_entries
from kgen.types import TOKEN_BUCKETS, Candidate, Environment, KernelSpec, LaunchOptions, Measurement, TuneRecord

ARCH = load_arch("sm90")
HASHES = template_hashes("sm90")
HERE = Environment("sm90", "h200", "NVIDIA H200", 90, 132, "580", "3.6.0", "2.11", "3.12", "0.1")
ONE, TWO, FOUR, SIXTEEN = (KernelSpec("sm90", "v32", 64, 2048, 64, tokens) for tokens in (1, 2, 4, 16))


def record(spec: KernelSpec, us: float, family: str, latent: str | None = None, static: bool = False) -> TuneRecord:
    tunables: dict[str, int | str | bool] = {"block_h": 64, "block_k": 64, "splits": 2, "specialise": False}
    tunables |= {"chunk": 128, "partial": "fp32"} if latent is None else {"latent": latent}
    candidate = Candidate.make(family, tunables, LaunchOptions(4, 1))
    made = TuneRecord(spec, candidate, HASHES[family], HERE)
    if static:
        return replace(made, environment=replace(HERE, device_class="static"), estimate_us=us, considered=3)
    return replace(made, measurement=Measurement(us, us, us, 9, 9, "cuda-graph", 9))


def slower(made: TuneRecord, factor: float) -> TuneRecord:
    assert made.measurement is not None
    return replace(made, measurement=replace(made.measurement, median_us=made.measurement.median_us * factor))


def served(entries: list[Entry], **more: bool) -> tuple[str, object, float | None]:
    choice = select(entries, replace(Shape("v32", 64, 2048, 64, 1), **more), "h200")
    assert choice is not None
    entry = choice.entry
    return entry.module, entry.config.get("latent", "-"), entry.provenance.us


ALL = [
    record(ONE, 10.0, "sm90_ws_fp8", "fp16"),
    record(ONE, 12.0, "sm90_ws_fp8", "bf16"),
    record(ONE, 20.0, "portable"),
    record(ONE, 25.0, "portable", static=True),
]


def test_each_call_gets_the_fastest_that_it_qualifies_for() -> None:
    entries = select_entries(ALL, [ONE], ARCH, HASHES)
    assert [entry.tier for entry in entries] == [0, 1, 4]
    assert served(entries, fp16=True) == ("sm90_ws_fp8_v32", "fp16", 10.0)
    assert served(entries) == ("sm90_ws_fp8_v32", "bf16", 12.0)
    assert served(entries, fp16=True, aligned=False) == ("portable_v32_c128", "-", 20.0)


def test_a_winner_that_serves_every_call_stands_alone() -> None:
    slow = [record(ONE, 30.0, "sm90_ws_fp8", "fp16"), record(ONE, 31.0, "sm90_ws_fp8", "bf16"), ALL[2]]
    entries = select_entries(slow, [ONE], ARCH, HASHES)
    assert [(entry.module, entry.tier) for entry in entries] == [("portable_v32_c128", 0)]


def test_a_bf16_winner_leaves_out_the_tier_of_fp16() -> None:
    entries = select_entries([ALL[1], ALL[2], record(ONE, 13.0, "sm90_ws_fp8", "fp16")], [ONE], ARCH, HASHES)
    assert [(entry.config.get("latent", "-"), entry.tier) for entry in entries] == [("bf16", 0), ("-", 4)]


def test_where_clusters_win_the_best_without_them_is_kept() -> None:
    """A Triton or a device that cannot launch them takes the other Hopper families, not the portable one."""
    many = replace(ONE, heads=128)
    times = {("sm90_cluster_fp8", "fp16"): 8.0, ("sm90_cluster_fp8", "bf16"): 9.0, ("sm90_rs_fp8", "fp16"): 10.0}
    times |= {("sm90_pair_fp8", "bf16"): 11.0, ("portable", None): 20.0}
    records = [record(many, us, family, latent) for (family, latent), us in times.items()]
    entries = select_entries(records, [many], ARCH, HASHES)
    assert [(entry.tier, entry.provenance.us) for entry in entries] == list(enumerate(times.values()))
    clusters = [entry for entry in entries if entry.module.startswith("sm90_cluster_fp8")]
    for fp16, usual, without in ((True, 8.0, 10.0), (False, 9.0, 11.0)):
        shape = Shape("v32", 128, 2048, 64, 1, fp16=fp16)
        for left_out, us in (((), usual), (clusters, without)):
            choice = select(entries, shape, "h200", exclude=left_out)
            assert choice is not None and choice.entry.provenance.us == us
    # a winner that every tier takes stands once
    entries = select_entries([*records, record(many, 7.0, "sm90_rs_fp8", "bf16")], [many], ARCH, HASHES)
    assert [(entry.tier, entry.provenance.us) for entry in entries] == [(0, 7.0), (4, 20.0)]


def test_where_no_portable_kernel_was_timed_the_static_one_serves_the_rest() -> None:
    entries = select_entries([*ALL[:2], ALL[3]], [ONE], ARCH, HASHES)
    assert served(entries, aligned=False) == ("portable_v32_c128", "-", None)


def test_inherited_buckets_have_all_tiers() -> None:
    entries = select_entries(ALL, [ONE, SIXTEEN], ARCH, HASHES)
    at_16 = Shape("v32", 64, 2048, 64, 16)
    for fp16, aligned, latent in ((True, True, "fp16"), (False, True, "bf16"), (True, False, "-")):
        choice = select(entries, replace(at_16, fp16=fp16, aligned=aligned), "h200")
        assert choice is not None and choice.exact and choice.entry.config.get("latent", "-") == latent


def test_a_bucket_that_a_larger_one_beats_inherits_from_it() -> None:
    """One token was tuned with the portable family alone, and sixteen take less time with another one."""
    slow = record(ONE, 30.0, "portable")
    fast = [record(SIXTEEN, 13.0, "sm90_ws_fp8", "fp16"), record(SIXTEEN, 14.0, "sm90_ws_fp8", "bf16")]
    entries = select_entries([slow, *fast, record(SIXTEEN, 40.0, "portable")], [ONE, SIXTEEN], ARCH, HASHES)
    assert served(entries, fp16=True) == ("sm90_ws_fp8_v32", "fp16", 13.0)
    assert served(entries) == ("sm90_ws_fp8_v32", "bf16", 14.0)
    assert served(entries, aligned=False) == ("portable_v32_c128", "-", 30.0)  # the larger bucket is slower there
    near = select_entries([record(ONE, 13.2, "portable"), *fast], [ONE, SIXTEEN], ARCH, HASHES)
    assert served(near, fp16=True)[2] == 13.2


def test_a_bucket_that_fills_the_device_inherits_from_what_is_faster_per_token() -> None:
    """1,024 tokens were tuned with the portable family alone; 4,096 of them take 2.2 times as long with another one."""
    thousand, most = replace(ONE, tokens=1024), replace(ONE, tokens=4096)
    slow = record(thousand, 1000.0, "portable")
    fast = [record(most, 2200.0, "sm90_ws_fp8", "fp16"), record(most, 2300.0, "sm90_ws_fp8", "bf16")]
    rest = [slow, record(most, 4000.0, "portable")]
    for factor, takes in ((1.0, True), (1.4, False)):
        entries = select_entries([*(slower(r, factor) for r in fast), *rest], [thousand, most], ARCH, HASHES)
        at = [e for e in entries if e.tokens[0] <= 1024 <= e.tokens[1] and e.tier == 0]
        assert [e.module.startswith("sm90_ws_fp8") for e in at] == [takes]
    few = [record(SIXTEEN, 1000.0, "portable"), record(most, 2200.0, "sm90_ws_fp8", "fp16")]
    entries = select_entries(few, [SIXTEEN, most], ARCH, HASHES)  # 16 tokens fill nothing
    assert [e.module[:8] for e in entries if e.tokens[0] <= 16 <= e.tokens[1] and e.tier == 0] == ["portable"]


@pytest.mark.parametrize(
    ("one", "more", "most", "anchor"),
    [
        (10.0, FOUR, 14.9, 4),  # four tokens cost little more than one: their kernel does two as well
        (10.0, FOUR, 15.1, 1),
        (10.0, SIXTEEN, 14.9, 16),
        (10.0, SIXTEEN, 15.1, 1),
        (10.0, FOUR, 9.0, 4),  # it serves one token, too
    ],
)
def test_two_tokens_inherit_from_one_or_from_more(one: float, more: KernelSpec, most: float, anchor: int) -> None:
    """Nothing was measured at two tokens."""
    records = [record(ONE, one, "sm90_few", "fp16"), record(more, most, "sm90_ws_fp8", "fp16")]
    entries = select_entries(records, [ONE, TWO, FOUR, SIXTEEN], ARCH, HASHES)
    assert at(entries, 2).provenance.anchor_tokens == anchor
    assert [at(entries, tokens).provenance.anchor_tokens for tokens in (3, 16)] == [more.tokens] * 2
    own = record(TWO, 12.0, "sm90_pair_fp8", "fp16")
    entries = select_entries([*records, own], [ONE, TWO, FOUR, SIXTEEN], ARCH, HASHES)
    beaten = most < BEATEN * 12.0
    assert at(entries, 2).provenance.anchor_tokens == (more.tokens if beaten else 2)
    assert at(entries, 2).tokens[0] == (1 if beaten else 2)


def test_static_picks_of_a_bucket_serve_a_neighbour_that_has_none() -> None:
    """The larger one in a tie, by one entry that says for how many tokens it was ranked."""
    four, one = record(FOUR, 20.0, "portable", static=True), record(ONE, 9.0, "portable", static=True)
    entries = select_entries([one, four], [ONE, TWO, FOUR], ARCH, HASHES)
    made_for = [(e.tokens, e.provenance.source, e.provenance.anchor_tokens, e.provenance.estimate_us) for e in entries]
    assert made_for == [((1, 1), "static", 1, 9.0), ((2, 4), "static", 4, 20.0)]
    own = record(TWO, 11.0, "portable", static=True)
    entries = select_entries([one, own, four], [ONE, TWO, FOUR], ARCH, HASHES)
    assert [(e.tokens, e.provenance.anchor_tokens) for e in entries] == [((1, 1), 1), ((2, 2), 2), ((3, 4), 4)]


def at(entries: list[Entry], tokens: int) -> Entry:
    """The entry of tier 0 for that many tokens."""
    found = [entry for entry in entries if entry.tier == 0 and entry.tokens[0] <= tokens <= entry.tokens[1]]
    assert len(found) == 1
    return found[0]


def test_eight_heads_take_the_kernel_of_sixteen_where_it_is_faster() -> None:
    """A tile has 16 heads in every family, so that 8 cost no more than 16 with the same kernel."""
    eight, sixteen = replace(SIXTEEN, heads=8), replace(SIXTEEN, heads=16)
    slow, fast = record(eight, 33.0, "portable"), record(sixteen, 20.0, "sm90_few", "fp16")
    for more, less in ((fast, slow), (replace(slow, spec=sixteen), replace(fast, spec=eight))):
        entries = select_entries([more, less], [eight, sixteen], ARCH, HASHES)
        own = {e.heads: e for e in entries if e.tier == 0}
        assert [own[8].module, own[8].provenance.us] == ["sm90_few_v32", 20.0]
        assert own[8].provenance.source == ("inherited" if more is fast else "measured")
        assert own[16].provenance.source == "measured"
    thirty = [record(replace(SIXTEEN, heads=32), 33.0, "portable"), record(SIXTEEN, 20.0, "sm90_ws_fp8", "fp16")]
    entries = select_entries(thirty, [replace(SIXTEEN, heads=32), SIXTEEN], ARCH, HASHES)
    assert {e.heads: e.module for e in entries if e.tier == 0}[32].startswith("portable")  # 64 heads are another tile


def test_eight_heads_take_a_bucket_that_was_measured_with_sixteen_alone() -> None:
    """4 tokens of 8 heads were not measured; with 16 tokens they are slower than 4 of 16 heads."""
    eight, sixteen = (replace(SIXTEEN, heads=heads) for heads in (8, 16))
    for us, takes in ((11.0, 4), (19.9, 16)):
        records = [record(eight, 20.0, "portable"), record(replace(sixteen, tokens=4), us, "sm90_few", "fp16")]
        entries = select_entries(records, [replace(eight, tokens=4), eight], ARCH, HASHES)
        assert [at(entries, tokens).provenance.anchor_tokens for tokens in (4, 16)] == [takes, 16]


TWIN = KernelSpec("sm90", "v4", 64, 128, 64, 16, 512, 64)
LONE = replace(TWIN, extra_page=32)


def module_at(entries: list[Entry], extra_page: int, tokens: int, **more: bool) -> tuple[str, str, float | None]:
    choice = select(entries, Shape("v4", 64, 128, 64, tokens, 512, extra_page, **more), "h200")
    assert choice is not None and choice.exact
    origin = choice.entry.provenance
    return choice.entry.module, origin.source, origin.us


def test_a_page_size_that_only_the_portable_family_was_timed_with_takes_the_kernel_of_another() -> None:
    lone = [
        record(replace(LONE, tokens=tokens), us, "portable") for tokens, us in ((1, 24.0), (16, 38.0), (256, 170.0))
    ]
    twin = [
        record(replace(TWIN, tokens=1), 9.0, "sm90_few", "fp16"),
        record(replace(TWIN, tokens=1), 10.0, "sm90_few", "bf16"),
        record(replace(TWIN, tokens=4), 13.0, "sm90_few", "bf16"),
        record(TWIN, 37.5, "sm90_ws_fp8", "fp16"),  # 38.0 is within the noise of it
        record(replace(TWIN, tokens=256), 20.0, "portable"),
        record(replace(TWIN, tokens=256, page=256), 80.0, "sm90_rs_fp8", "fp16"),
        record(replace(TWIN, tokens=256, page=128), 90.0, "sm90_rs_fp8", "fp16"),
    ]
    specs = [replace(spec, tokens=tokens) for spec in (LONE, TWIN) for tokens in (1, 4, 16, 256)]
    entries = select_entries([*lone, *twin], specs, ARCH, HASHES)
    found = {tokens: module_at(entries, 32, tokens, fp16=True) for tokens in (1, 4, 16, 256)}
    assert found == {
        1: ("sm90_few_v4", "inherited", 9.0),
        4: ("sm90_few_v4", "inherited", 13.0),  # measured there and not here: below what 16 tokens take
        16: ("portable_v4_c128", "measured", 38.0),
        256: (
            "sm90_rs_fp8_v4",
            "inherited",
            80.0,
        ),  # the fastest page of the Hopper ones; the portable twin is left out
    }
    assert module_at(entries, 32, 1) == ("sm90_few_v4", "inherited", 10.0)
    assert module_at(entries, 32, 1, fp16=True, aligned=False) == ("portable_v4_c128", "measured", 24.0)
    assert module_at(entries, 64, 1, fp16=True) == ("sm90_few_v4", "measured", 9.0)


@pytest.mark.parametrize("changed", [{"heads": 32}, {"topk": 256}, {"extra_topk": 1024}])
def test_only_the_page_size_may_differ(changed: dict[str, int]) -> None:
    other = replace(TWIN, **changed)
    entries = select_entries(
        [record(LONE, 38.0, "portable"), record(other, 9.0, "sm90_few", "fp16")], [LONE], ARCH, HASHES
    )
    assert [entry.module for entry in entries] == ["portable_v4_c128"]


def test_a_hopper_kernel_with_times_of_its_own_keeps_its_page() -> None:
    records = [record(LONE, 38.0, "sm90_ws_fp8", "fp16"), record(TWIN, 20.0, "sm90_few", "fp16")]
    assert module_at(select_entries(records, [LONE, TWIN], ARCH, HASHES), 32, 16, fp16=True)[2] == 38.0


BUCKET, HALF = replace(SIXTEEN, heads=16, tokens=256), replace(SIXTEEN, heads=16, tokens=128)


def final(
    spec: KernelSpec, us: float, family: str, latent: str | None = None, splits: int = 1, noise: float = 0.01
) -> TuneRecord:
    """A time that was sampled side by side with its rivals'."""
    made = record(spec, us, family, latent)
    tunables = dict(made.candidate.tunables) | {"splits": splits, "block_h": 16}
    time = Measurement(us, us * (1 - noise / 2), us * (1 + noise / 2), 9, 9, "cuda-graph interleaved", 9)
    return replace(made, candidate=Candidate.make(family, tunables, made.candidate.launch), measurement=time)


@pytest.mark.parametrize(
    ("portable", "hopper", "noise", "tokens", "takes"),
    [
        (100.0, 100.5, 0.01, 256, "sm90_few"),  # even at the top: the family that was made for the device
        (100.0, 101.5, 0.01, 256, "portable"),  # more than the noise behind
        (100.0, 102.0, 0.10, 256, "sm90_few"),
        (100.0, 104.0, 0.10, 256, "portable"),  # inside a large noise, and still no tie
        (100.0, 100.5, 0.01, 4, "portable"),  # 3 tokens are all that it serves beside 4
        (100.0, 100.5, 0.01, 16, "sm90_few"),
    ],
)
def test_what_is_even_at_the_top_of_a_bucket_goes_to_the_family_made_for_the_device(
    portable: float, hopper: float, noise: float, tokens: int, takes: str
) -> None:
    spec = replace(BUCKET, tokens=tokens)
    records = [final(spec, portable, "portable", noise=noise), final(spec, hopper, "sm90_few", "bf16", noise=noise)]
    orders = (records, records[::-1]) if takes == "sm90_few" else (records,)
    for order in orders:  # the first line is the champion that is challenged
        entries = select_entries(order, [spec], ARCH, HASHES)
        assert [e.module.startswith(takes) for e in entries if e.tier == 0] == [True]
        assert entries[0].provenance.us == (portable if takes == "portable" else hopper)
        assert entries[-1].module.startswith("portable")  # and calls that the other cannot serve have theirs


def test_times_at_half_of_the_tokens_tell_apart_what_is_even_at_the_top() -> None:
    """Three kernels are even with 256 tokens. With 128 the launcher gives the one with two parts four."""
    at_top = [
        final(BUCKET, 100.0, "sm90_ws_fp8", "bf16"),
        final(BUCKET, 100.4, "sm90_few", "bf16", splits=2),
        final(BUCKET, 100.2, "portable"),
    ]
    ws, few, portable = 70.0, 60.0, 50.0

    def takes(*at_half: TuneRecord) -> str:
        entries = select_entries([*at_top, *at_half], [BUCKET], ARCH, HASHES)
        top = next(e for e in entries if e.tier == 0 and e.tokens[1] == 256)
        assert top.provenance.anchor_tokens == 256
        return top.module.removesuffix("_v32").removesuffix("_v32_c128")

    assert takes() == "sm90_ws_fp8"
    timed = [final(HALF, ws, "sm90_ws_fp8", "bf16"), final(HALF, few, "sm90_few", "bf16", splits=4)]
    assert takes(*timed) == "sm90_few"
    assert takes(*timed, final(HALF, portable, "portable")) == "portable"  # a time outranks the preference
    assert takes(*timed, final(HALF, few - 0.2, "portable")) == "sm90_few"  # even there as well
    assert takes(timed[0], final(HALF, few, "sm90_few", "bf16", splits=2)) == "sm90_ws_fp8"  # not what would run
    single = [replace(r, measurement=replace(r.measurement, method="cuda-graph")) for r in timed if r.measurement]
    assert takes(*single) == "sm90_ws_fp8"  # not side by side
    assert (
        takes(timed[1], final(HALF, portable, "portable")) == "sm90_ws_fp8"
    )  # the champion has no time to compare with


@pytest.mark.parametrize(
    ("own", "other", "noise", "lower"),
    [
        (70.0, 60.0, 0.01, "sm90_few"),
        (70.0, 69.5, 0.05, None),  # within the noise
        (60.0, 70.0, 0.01, None),
        (None, 60.0, 0.01, None),  # nothing to compare with
    ],
)
def test_what_is_faster_with_half_of_the_tokens_serves_the_lower_half(
    own: float | None, other: float, noise: float, lower: str | None
) -> None:
    """Tokens 65 to 256 are a bucket. Two parts at its top are four at 128; a time that was not taken side by side says nothing."""
    top = [final(BUCKET, 100.0, "sm90_ws_fp8", "bf16", splits=2), final(BUCKET, 110.0, "sm90_few", "bf16")]
    half = [final(HALF, other, "sm90_few", "bf16", noise=noise)]
    half += [final(HALF, own, "sm90_ws_fp8", "bf16", splits=4, noise=noise)] if own else []
    if own is None:
        alone = final(HALF, 70.0, "sm90_ws_fp8", "bf16", splits=4)
        assert alone.measurement is not None
        half.append(replace(alone, measurement=replace(alone.measurement, method="cuda-graph")))
    entries = [e for e in select_entries([*top, *half], [BUCKET], ARCH, HASHES) if e.tier == 0]
    whole = [(e.module.removesuffix("_v32"), e.tokens, e.config["splits"], e.provenance.anchor_tokens) for e in entries]
    if lower is None:
        assert whole == [("sm90_ws_fp8", (65, 256), 2, 256)]
    else:
        assert whole == [(lower, (65, 128), 1, 128), ("sm90_ws_fp8", (129, 256), 2, 256)]
        assert {e.provenance.source for e in entries} == {"measured"} and entries[0].provenance.us == other


def test_calls_that_a_lower_half_cannot_serve_have_the_top_s_kernel_there() -> None:
    """The lower half goes to a kernel with fp16 latents. Without a stated range 100 tokens take the top's, by an entry that is made
    for so many."""
    top = [final(BUCKET, 100.0, "sm90_ws_fp8", "bf16"), final(BUCKET, 110.0, "sm90_few", "fp16")]
    half = [final(HALF, 70.0, "sm90_ws_fp8", "bf16"), final(HALF, 60.0, "sm90_few", "fp16")]
    entries = [(e.tier, e.module, e.tokens) for e in select_entries([*top, *half], [BUCKET], ARCH, HASHES)]
    assert entries == [
        (0, "sm90_few_v32", (65, 128)), (0, "sm90_ws_fp8_v32", (129, 256)), (1, "sm90_ws_fp8_v32", (65, 256)),
    ]  # fmt: skip


def test_a_time_at_half_of_the_tokens_alone_makes_no_entry() -> None:
    """128 tokens are no bucket: nobody inherits from them, though they are as near to 64 as to 256."""
    half = final(HALF, 10.0, "sm90_few", "bf16")
    assert select_entries([half], [BUCKET, replace(BUCKET, tokens=64)], ARCH, HASHES) == []
    entries = select_entries([half, final(BUCKET, 100.0, "portable")], [BUCKET], ARCH, HASHES)
    assert [(e.module, e.provenance.us) for e in entries] == [("portable_v32_c128", 100.0)]
    served_half = {spec.tokens: spec.half.tokens for t in TOKEN_BUCKETS if (spec := replace(BUCKET, tokens=t)).half}
    assert served_half == {16: 8, 64: 32, 256: 128, 1024: 512, 4096: 2048} and HALF.half is None
    assert not set(served_half.values()) & set(TOKEN_BUCKETS)


@pytest.mark.parametrize("count", [3])
def test_the_table_text_holds_the_tiers(count: int) -> None:
    entries = select_entries(ALL, [ONE], ARCH, HASHES)
    text = table_text(ARCH, entries)
    assert text.count("tier=1, ") == 1 and text.count("tier=4, ") == 1
    namespace: dict[str, object] = {"__package__": "kgen.runtime.sm90"}
    exec(text.replace("from ..table", "from kgen.runtime.table"), namespace)  # noqa: S102 - our own text
    assert list(namespace["ENTRIES"]) == entries and len(entries) == count  # type: ignore[call-overload]

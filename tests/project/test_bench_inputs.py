"""Inputs of the benchmark, the range of scales that a call may state, the gather kernel, and a whole row in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import bench.precompile as precompile
import bench.row_run as row_run
from bench.ceilings import gather_kernel, split_of
from bench.hopper import HOPPER
from bench.inputs import Pools, keys_of, scale_range
from bench.ours import VERIFIED, config_slug, module_hash, verification
from bench.row_run import RowRun
from bench.rows import PORTABLE, Reference, Row
from kgen.check import Inputs, attention_reference, pack
from kgen.check.reference import decode_slots
from kgen.measure import FakeTimer
from kgen.runtime.kernel import interpreting
from kgen.types import KernelSpec

V32 = Row("C toy", KernelSpec("sm90", "v32", 16, 24, 16, 3), 3, ("ratio", 0.5), pool_rows=512, requests=4)
V4 = Row("D toy", KernelSpec("sm90", "v4", 16, 12, 32, 4, 20, 16), 4, sink=True, s_q=2, pool_rows=512, requests=4)
FLAT = Row(
    "B toy", KernelSpec("sm90", "bf16_d512", 16, 40, 0, 50), 50, lengths=True, sink=True, pool_rows=64, requests=1
)
SHARED = replace(V32, spec=KernelSpec("sm90", "bf16_d576", 16, 40, 0, 3), pool_rows=512)


@pytest.mark.parametrize("row", [V32, V4, FLAT, SHARED], ids=lambda row: row.spec.layout)
def test_keys_are_distinct_and_of_the_querys_request(row: Row) -> None:
    pools = Pools("cpu")
    sets = pools.inputs(row, 3)
    assert (
        len(sets) == 3 and not torch.equal(sets[0].indices, sets[1].indices) and not torch.equal(sets[0].q, sets[1].q)
    )
    assert all(inputs.kv is sets[0].kv for inputs in sets)
    for number, inputs in enumerate(sets):
        assert (inputs.tokens, inputs.s_q, inputs.heads) == (row.tokens, row.s_q, row.spec.heads)
        assert (inputs.attn_sink is not None) == row.sink and inputs.kv_layout == row.spec.kv.kv_layout
        for at, indices in enumerate((inputs.indices, inputs.extra_indices)):
            if indices is None:
                continue
            cache = pools.caches(row)[at]
            flat = indices.reshape(row.tokens, -1)
            for token, slots in enumerate(flat):
                kept = slots[slots >= 0]
                assert len(set(kept.tolist())) == len(kept) and bool((kept < row.pool_rows).all())
                request = (number * row.batch + token // row.s_q) % row.requests
                assert set((kept // cache.page).tolist()) <= set(cache.table[request].tolist())


def test_pages_of_requests_do_not_overlap_and_are_permuted() -> None:
    pools = Pools("cpu")
    for row in (V32, SHARED):
        table = pools.caches(row)[0].table
        assert sorted(table.flatten().tolist()) == list(range(table.numel()))
        assert table.flatten().tolist() != sorted(table.flatten().tolist())
    assert pools.caches(FLAT)[0].table.tolist() == [list(range(64))]


def test_lengths() -> None:
    inputs = Pools("cpu").inputs(FLAT, 1)[0]
    lengths = inputs.topk_length
    assert lengths is not None and lengths.dtype == torch.int32
    assert bool(((lengths >= 20) & (lengths <= 40)).all())
    assert torch.equal((inputs.indices >= 0).sum(1), lengths.long())
    assert keys_of(inputs) == int(lengths.sum())
    assert keys_of(Pools("cpu").inputs(V4, 1)[0]) == 4 * (12 + 20)


def test_too_few_rows() -> None:
    with pytest.raises(ValueError, match="distinct keys"):
        Pools("cpu").inputs(replace(V32, pool_rows=64), 1)


@pytest.mark.parametrize("layout", ["v32", "v4", "v41_footer", "v41_inline"])
def test_scale_range_is_what_the_bytes_say(layout: str) -> None:
    d = 576 if layout == "v32" else 512
    groups = {"v32": 4, "v4": 7}.get(layout, 16)
    scales = 2.0 ** torch.randint(-9, 3, (64, groups)).double()
    scales[17, groups - 1], scales[63, 0] = 2.0**-12, 2.0**5
    rows = torch.randn(64, d)
    kv = pack.pack_paged(rows, layout, 16, scales=scales, poison=True, guard_bytes=64)
    assert scale_range(kv, layout) == (2.0**-12, 2.0**5)
    scales[5, 1] = float("nan")
    assert scale_range(pack.pack_paged(rows, layout, 16, scales=scales), layout) is None


def test_scale_range_of_a_row_covers_both_caches() -> None:
    pools = Pools("cpu")
    main, extra = (scale_range(cache.kv, "v4") for cache in pools.caches(V4))
    assert main is not None and extra is not None
    assert pools.scale_range(V4) == (min(main[0], extra[0]), max(main[1], extra[1]))
    low, high = pools.scale_range(V32) or (0.0, 0.0)
    assert 2.0**-9 <= low <= high <= 2.0**-5  # N(0, 1), 448 in e4m3
    latent = decode_slots(pools.caches(V32)[0].kv, "v32", torch.arange(512))[:, :512]
    assert float(latent.abs().max()) <= 448 * high
    assert pools.scale_range(FLAT) is None


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1, or a GPU")
@pytest.mark.parametrize("row_bytes", [584, 656, 1024, 1152])
@pytest.mark.parametrize("stages", [1, 3])
def test_gather_kernel_reads_every_word_of_every_row(row_bytes: int, stages: int) -> None:
    words = row_bytes // 4
    head, tail = split_of(words)
    data = torch.randint(-1000, 1000, (7 * words,), dtype=torch.int32)
    index = torch.randint(0, 7, (2 * 4 * 2,), dtype=torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    gather_kernel[(2,)](data, index, out, words, head, tail, 4, 2, stages)
    truth = data.view(7, words).sum(1)[index.long()].view(2, 8).sum(1)
    assert torch.equal(out.long(), truth)


# ------------------------------------------------------------------------------------------------ a whole row


class Peer:
    """The reference itself, or something wrong, as a peer."""

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name, self.factor = name, factor

    def refusal(self, inputs: Inputs) -> str | None:
        return "no flat caches" if inputs.kv_layout == "bf16" else None

    def bind(self, inputs: Inputs) -> Any:
        return lambda: self.factor * attention_reference(inputs).out

    def output(self, result: Any, inputs: Inputs) -> torch.Tensor:
        return result


class Clock(FakeTimer):
    """Calls nothing; each peer and ours takes 10 µs."""

    def prepare(self, run: Any, sets: int, calls: int) -> Any:
        return super().prepare(lambda index: self.spend(10.0), sets, calls)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> RowRun:
    monkeypatch.setattr(row_run, "PAUSE_S", 0.0)
    monkeypatch.setattr(row_run, "WARM_SETS", 1)
    monkeypatch.setattr(row_run, "sets_for", lambda spec, tokens: 2)
    monkeypatch.setattr(row_run, "timer_for", lambda spec: Clock())
    rates = {"matmul_sustained_tflops": 700.0, "gather": [{"row_bytes": 656, "pool_rows": 512, "gbps": 4000}]}
    return RowRun([Peer("good"), Peer("wrong", 1.1)], rates, 60 << 20, rounds=3, seconds=0.01, device="cpu")


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1, or a GPU")
@pytest.mark.parametrize(
    "row",
    [V32, replace(V4, tokens=2), replace(FLAT, tokens=3, spec=replace(FLAT.spec, tokens=3))],
    ids=lambda r: r.name,
)
def test_a_row_from_inputs_to_verdict(runner: RowRun, row: Row) -> None:
    found = runner.run(replace(row, reference=Reference("elsewhere", 5.0, l2_warm=True)))
    assert found["ours_error"] < row_run.MAX_ERROR
    assert found["ours_us"] == found["ours_burst_us"] == pytest.approx(10.0)
    assert found["module"].startswith("portable_") and "warps=" in found["config"]
    assert found["ours_l2_warm_us"] == pytest.approx(10.0) and found["ratio_l2_warm"] == pytest.approx(2.0)
    if row.spec.kv.fp8:
        assert set(found["peer_errors"]) == {"good", "wrong"} and set(found["measurements"]) == {"ours", "good"}
        assert found["best_peer"] == "good" and found["ratio_side_by_side"] == pytest.approx(1.0)
    else:
        assert set(found["refused"]) == {"good", "wrong"} and found["best_peer"] is None
    assert found["ratio"] == pytest.approx(2.0) and found["judged_against"] == "elsewhere, another run, L2-warm there"
    keys = found["keys"]
    assert found["tflops"] == pytest.approx(2 * 16 * keys * (row.spec.d_qk + 512) / 10e6, abs=0.06)
    assert (found["ceiling_us"] is None) == (row is not V32)


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1, or a GPU")
def test_compiling_ahead_calls_each_row_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(precompile, "SMALL_POOL", 64)
    monkeypatch.setattr(precompile, "CONFIGS", ((2, 4, 1),))
    monkeypatch.setattr(precompile.Ours, "bind", lambda self, inputs: lambda: called.append(self.shape.layout))
    rows = [V32, FLAT, V32]
    for part in range(3):
        precompile.compile_part(rows, part, 3, device="cpu")
    assert sorted(called) == ["bf16_d512", "v32", "v32"]


# ------------------------------------------------------------------------------------------------ what was timed


def test_verification_is_that_of_the_same_fingerprint(tmp_path: Any) -> None:
    path = tmp_path / "verify.json"
    assert verification("abc", path)["verified"] is False
    for text, verified, why in (
        ('{"done": 2, "planned": 2}', False, "no fingerprint"),
        ('{"done": 2, "planned": 2, "subject": "xyz"}', False, "is of xyz"),
        ('{"done": 1, "planned": 2, "subject": "abc"}', False, "1 of 2 cases ran"),
        ('{"done": 2, "planned": 2, "subject": "abc", "failures": [{}]}', False, "1 failed"),
        ('{"done": 2, "planned": 2, "subject": "abc", "failures": []}', True, "all 2 cases"),
    ):
        path.write_text(text)
        found = verification("abc", path)
        assert found["subject"] == "abc" and found["verified"] is verified and why in found["verified_why"]
    assert VERIFIED.name == "verify_full.json"


def test_modules_are_named_by_the_hash_of_their_text() -> None:
    import hashlib

    import generated.sm90.combine as combine
    from generated.sm90.table import ENTRIES

    text = open(str(combine.__file__), "rb").read()
    assert module_hash("sm90", "combine") == hashlib.sha256(text).hexdigest()[:16]
    slug = config_slug(ENTRIES[0].config)
    assert f"warps={ENTRIES[0].config.num_warps}" in slug and "True" not in slug


def test_a_rotation_is_twice_the_l2() -> None:
    """Decision 21, also where a call gathers little: one V4 token gathers 640 rows of 584 bytes."""
    l2 = 62914560
    for row in HOPPER:
        sets = row_run.sets_of(row, l2)
        assert sets * row.spec.gathered_bytes(row.tokens) >= 2 * l2 and sets <= row_run.MOST_SETS, row.name
    sets = {row.name: row_run.sets_of(row, l2) for row in (*HOPPER, *PORTABLE)}
    assert sets["D v4 decode h64 128+512 1x1"] == 337 and sets["A bf16 prefill d576 h128 kv8192"] == 1
    assert sets["D v4 decode h64 128+512 t1"] == 96  # the tuner's, as its results were taken

"""Pack, then decode: error bounds, scale direction, strides, poison."""

from __future__ import annotations

import pytest
import torch

from kgen.check import pack
from kgen.check.reference import decode_slots

RULES = [(layout, rule) for layout in pack.PAGED_LAYOUTS for rule in ("flashmla", "vllm", "sglang")] + [
    ("v32", "arbitrary")
]
GROUP = {"v32": 128, "v4": 64, "v41_footer": 32, "v41_inline": 32}
LATENT = {"v32": 512, "v4": 448, "v41_footer": 512, "v41_inline": 512}


def _rows(layout: str, slots: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(slots, 576 if layout == "v32" else 512, generator=gen)


@pytest.mark.parametrize(("layout", "rule"), RULES)
def test_round_trip_bounds(layout: str, rule: pack.ScaleRule) -> None:
    rows = _rows(layout, 130)
    got = decode_slots(pack.pack_paged(rows, layout, 61, scale_rule=rule), layout, torch.arange(130))
    latent = LATENT[layout]
    groups = rows[:, :latent].double().unflatten(1, (-1, GROUP[layout]))
    amax = groups.abs().amax(2, keepdim=True)
    error = (got[:, :latent].unflatten(1, (-1, GROUP[layout])) - groups).abs()
    # half a step of e4m3: 2^-4 of the value, or 2^-10 of a scale that is at most 2 * amax / 448
    assert bool((error <= torch.maximum(groups.abs() * 2.0**-4, 2 * amax / 448 * 2.0**-10)).all())
    assert torch.equal(got[:, latent:], rows[:, latent:].to(torch.bfloat16).double())


@pytest.mark.parametrize(("layout", "rule"), RULES)
def test_constant_rows_show_the_direction_of_the_scale(layout: str, rule: pack.ScaleRule) -> None:
    values = torch.tensor([448.0, -448.0, 1e-4, 0.0, 3.0e4, 1e-2])
    rows = values[:, None].expand(6, _rows(layout, 1).shape[1]).contiguous()
    got = decode_slots(pack.pack_paged(rows, layout, 2, scale_rule=rule), layout, torch.arange(6))[:, : LATENT[layout]]
    assert bool(got[0].eq(448).all()) and bool(got[1].eq(-448).all()) and bool(got[3].eq(0).all())
    # 1e-4 with the 2^-13 floor lies between e4m3 steps of 2^-13 * 2^-4: relative error below 2^-4; no NaN anywhere
    assert bool(((got - values[:, None]).abs() <= values.abs()[:, None] * 2.0**-4).all())


@pytest.mark.parametrize("layout", pack.PAGED_LAYOUTS)
def test_forced_scale_clamps_instead_of_nan(layout: str) -> None:
    rows = _rows(layout, 2) * 1e4
    scales = torch.ones(2, LATENT[layout] // GROUP[layout], dtype=torch.float64)
    got = decode_slots(pack.pack_paged(rows, layout, 2, scales=scales), layout, torch.arange(2))
    assert bool(got.isfinite().all()) and got[:, : LATENT[layout]].abs().max() == 448


@pytest.mark.parametrize("layout", pack.PAGED_LAYOUTS)
@pytest.mark.parametrize("page", [1, 2, 53, 64])
def test_strides_and_poison_do_not_change_a_used_slot(layout: str, page: int) -> None:
    rows = _rows(layout, 2 * page)
    used = torch.arange(2 * page) % 3 == 0
    plain = decode_slots(pack.pack_paged(rows, layout, page), layout, torch.arange(2 * page))
    stride = page * {"v32": 656, "v4": 584}.get(layout, 528) + 48
    hostile = pack.pack_paged(rows, layout, page, page_stride=stride, guard_bytes=64, used=used, poison=True)
    assert hostile.stride(0) == stride and hostile.storage_offset() == 64
    got = decode_slots(hostile, layout, torch.arange(2 * page))
    assert torch.equal(got[used], plain[used])
    assert bool(got[~used].isnan().all())
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert torch.equal(decode_slots(hostile.view(dtype), layout, torch.arange(2 * page))[used], plain[used])


@pytest.mark.parametrize("layout", pack.PAGED_LAYOUTS)
def test_nan_in_a_group_stays_in_its_group(layout: str) -> None:
    rows = _rows(layout, 2)
    rows[0, 5] = float("nan")
    got = decode_slots(pack.pack_paged(rows, layout, 2), layout, torch.arange(2))
    group = GROUP[layout]
    assert (
        bool(got[0, :group].isnan().all()) and bool(got[0, group:].isfinite().all()) and bool(got[1].isfinite().all())
    )


def test_flat_rows() -> None:
    rows = torch.randn(10, 512)
    used = torch.arange(10) < 4
    view = pack.pack_flat(rows, row_gap=24, guard_rows=3, used=used, poison=True)
    assert view.shape == (10, 512) and view.stride() == (536, 1) and view.storage_offset() == 3 * 536
    assert torch.equal(view[:4], rows[:4].to(torch.bfloat16))
    assert not view[4:].isfinite().any()
    outside = view.as_strided((16 * 536,), (1,), 0)
    assert not outside[: 3 * 536].isfinite().any() and not outside[13 * 536 :].isfinite().any()


def test_page_stride_below_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="below the 1168 bytes of a v4 page of 2 tokens"):
        pack.pack_paged(torch.zeros(2, 512), "v4", 2, page_stride=1100)

"""The reference's decoder against page bytes written by hand, and the packers' bytes against the spec.

e4m3: 0x38 = 1.0, 0x40 = 2.0, 0xB8 = -1.0, 0x30 = 0.5, 0x7E = 448, 0x01 = 2^-9, 0x7F and 0xFF = NaN.
UE8M0: 127 = 1, 128 = 2, 126 = 0.5. bf16 little endian: 80 3F = 1.0, 00 C0 = -2.0, 40 40 = 3.0.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch

from kgen.check import pack
from kgen.check.reference import decode_slots


def _cache(raw: bytes, page: int, token_bytes: int, stride: int) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return flat.as_strided((len(raw) // stride, page, 1, token_bytes), (stride, token_bytes, token_bytes, 1))


def _decode(cache: torch.Tensor, layout: str, slots: int) -> torch.Tensor:
    return decode_slots(cache, layout, torch.arange(slots))


def test_v32_record() -> None:
    rope0 = b"\x80\x3f" + b"\x00\xc0" + b"\x00\x00" * 62
    token0 = (
        b"\x38" * 128 + b"\x40" * 128 + b"\xb8" * 128 + b"\x7e" * 128 + struct.pack("<4f", 0.3, 1.7, 2.0, 1.0) + rope0
    )
    token1 = b"\x01" + b"\x00" * 511 + struct.pack("<4f", 4.0, 1.0, 1.0, 1.0) + b"\x00" * 126 + b"\x40\x40"
    assert len(token0) == len(token1) == 656
    rows = _decode(_cache(token0 + token1, 2, 656, 1312), "v32", 2)
    assert rows.shape == (2, 576) and rows.dtype == torch.float64
    third, one_seven = struct.unpack("<2f", struct.pack("<2f", 0.3, 1.7))  # what fp32 holds of them
    assert rows[0, 0] == third and rows[0, 127] == third
    assert rows[0, 128] == 2 * one_seven and rows[0, 256] == -2.0 and rows[0, 511] == 448.0
    assert rows[0, 512] == 1.0 and rows[0, 513] == -2.0 and rows[0, 514] == 0.0
    assert rows[1, 0] == 4 * 2.0**-9 and rows[1, 575] == 3.0 and rows[1, 1:575].abs().sum() == 0


def test_v4_page_has_data_then_scales() -> None:
    data0 = b"\x38" * 448 + b"\x80\x3f" * 64
    data1 = b"\x30" * 64 + b"\xb8" * 384 + b"\x00\xc0" * 63 + b"\x40\x40"
    scales0 = bytes([127, 128, 126, 127, 127, 127, 130]) + b"\xff"  # the pad byte is nobody's scale
    scales1 = bytes([0, 255, 127, 127, 127, 127, 254]) + b"\x12"
    page = data0 + data1 + scales0 + scales1
    assert len(page) == 2 * 584
    second = bytes(len(page) + 560)
    rows = _decode(_cache(page + b"\xff" * 560 + second, 2, 584, 1728), "v4", 3)
    assert rows.shape == (3, 512)
    assert [rows[0, 64 * g].item() for g in range(7)] == [1.0, 2.0, 0.5, 1.0, 1.0, 1.0, 8.0]
    assert rows[0, 448:].eq(1.0).all()
    assert rows[1, 0] == 0.5 * 2.0**-127 and rows[1, 63] == 2.0**-128
    assert rows[1, 64:128].isnan().all() and rows[1, 128] == -1.0
    assert rows[1, 447] == -(2.0**127) and rows[1, 448] == -2.0 and rows[1, 511] == 3.0
    # slot 2 is token 0 of page 1, which starts at the page stride 1728; byte 0 is 2^-127 and the codes are zero
    assert rows[2].eq(0.0).all()


def test_v4_odd_page_finds_its_scales_at_the_end_of_the_data() -> None:
    data = b"".join(bytes([code]) * 448 + b"\x00" * 128 for code in (0x38, 0x40, 0xB8))
    scales = b"".join(bytes([exponent]) * 7 + b"\x00" for exponent in (126, 127, 128))
    rows = _decode(_cache(data + scales, 3, 584, 3 * 584), "v4", 3)
    assert [rows[t, 0].item() for t in range(3)] == [0.5, 2.0, -2.0]


def test_v41_footer_page() -> None:
    data = b"\x38" * 512 + b"\x30" * 512
    scales = bytes(range(120, 136)) + bytes([127] * 15 + [129])
    rows = _decode(_cache(data + scales + b"\xff" * 480, 2, 528, 1536), "v41_footer", 2)
    assert [rows[0, 32 * g].item() for g in range(16)] == [2.0 ** (e - 127) for e in range(120, 136)]
    assert rows[1, 479] == 0.5 and rows[1, 480] == 2.0 and rows[1, 511] == 2.0


def test_v41_inline_page() -> None:
    token0 = b"\x38" * 512 + bytes(range(120, 136))
    token1 = b"\x30" * 512 + bytes([127] * 15 + [129])
    rows = _decode(_cache(token0 + token1, 2, 528, 1056), "v41_inline", 2)
    assert [rows[0, 32 * g].item() for g in range(16)] == [2.0 ** (e - 127) for e in range(120, 136)]
    assert rows[1, 479] == 0.5 and rows[1, 480] == 2.0


def test_every_e4m3_code() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    page = bytes(raw.tolist()) * 2 + bytes([127] * 16)
    rows = _decode(_cache(page, 1, 528, 528), "v41_inline", 1)[0, :256]
    expected = raw.view(torch.float8_e4m3fn).double()
    assert rows[0x7F].isnan() and rows[0xFF].isnan() and int(rows.isnan().sum()) == 2
    assert torch.equal(rows.nan_to_num(9e9), expected.nan_to_num(9e9))
    assert (rows[0x08], rows[0x07], rows[0x7E]) == (2.0**-6, 7 * 2.0**-9, 448.0)


def test_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match="v41_footer and v41_inline, not 'v5'"):
        decode_slots(torch.zeros(1, 1, 1, 528, dtype=torch.uint8), "v5", torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize(
    ("layout", "page", "expected"),
    [("v32", 1, 656), ("v32", 64, 41984), ("v4", 2, 1728), ("v4", 64, 37440), ("v4", 128, 74880), ("v4", 256, 149760)]
    + [("v41_footer", 1, 1024), ("v41_footer", 32, 16896), ("v41_inline", 1, 528), ("v41_inline", 64, 33792)],
)
def test_page_bytes(layout: str, page: int, expected: int) -> None:
    assert pack.page_bytes(layout, page) == expected
    rows = torch.zeros(2 * page, 576 if layout == "v32" else 512)
    cache = pack.pack_paged(rows, layout, page)
    token = {"v32": 656, "v4": 584}.get(layout, 528)
    assert cache.shape == (2, page, 1, token) and cache.stride() == (expected, token, token, 1)


def test_packer_writes_the_bytes_of_a_v4_page() -> None:
    rows = torch.zeros(2, 512)
    rows[0, :64], rows[1, 64:128] = 448.0, -1.0  # 448: scale 1; 1.0: 2^ceil(log2(1/448)) = 2^-8, code of 256 = 0x78
    rows[1, 511] = 3.0
    cache = pack.pack_paged(rows, "v4", 2, poison=True, guard_bytes=16)
    raw = torch.as_strided(cache, (1760,), (1,), 0).tolist()
    assert raw[:16] == [255] * 16 and raw[16 : 16 + 64] == [0x7E] * 64 and raw[16 + 64] == 0
    assert raw[16 + 576 + 64 : 16 + 576 + 128] == [0xF8] * 64  # -256
    assert raw[16 + 1150 : 16 + 1152] == [0x40, 0x40]
    # zero groups: 2^ceil(log2(1e-4)) = 2^-13, byte 114; every pad byte and the tail stay poison
    assert raw[16 + 1152 : 16 + 1160] == [127, 114, 114, 114, 114, 114, 114, 255]
    assert raw[16 + 1160 : 16 + 1168] == [114, 119, 114, 114, 114, 114, 114, 255]
    assert raw[16 + 1168 :] == [255] * (1760 - 16 - 1168)


def test_scales_of_each_writer() -> None:
    amax = torch.tensor([0.0, 1e-4, 0.02, 1.0, 448.0, 448.0 * 1.0001, 1e6])

    def powers(layout: str, rule: pack.ScaleRule) -> list[float]:
        return [math.log2(s) for s in pack.group_scales(amax, layout, rule).tolist()]

    assert powers("v4", "flashmla") == [-13, -13, -13, -8, 0, 1, 12]
    assert powers("v32", "vllm") == powers("v32", "flashmla") == powers("v4", "flashmla")
    assert powers("v4", "vllm") == [-22, -22, -14, -8, 0, 1, 12]
    assert powers("v41_footer", "sglang") == [-35, -22, -14, -8, 0, 1, 12]
    arbitrary = pack.group_scales(amax, "v32", "arbitrary")
    assert arbitrary[0] == pack.FLT_MIN and arbitrary[4] == 1.0
    assert arbitrary[3].item() == struct.unpack("<f", struct.pack("<f", 1 / 448))[0]
    assert pack.group_scales(amax, "v32", "sglang")[0] == 0.0
    assert pack.group_scales(torch.tensor([float("nan"), float("inf")]), "v4", "vllm").isnan().all()
    with pytest.raises(ValueError, match="fp32 scales"):
        pack.group_scales(amax, "v4", "arbitrary")


def test_encoding_saturates() -> None:
    x = torch.tensor([448.0, 449.0, 500.0, 1e9, float("inf"), -1e9, 1.0, 1.0624, float("nan")])
    assert pack.encode_e4m3(x).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x38, 0x38, 0x7F]

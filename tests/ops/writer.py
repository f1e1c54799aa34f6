"""A slow writer of cache pages, from the tables of spec section 1 alone: the second opinion for the kernels' bytes.

Values are float64 from the stored input, codes come from a search in the list of all e4m3 magnitudes, and addresses are
added up byte by byte in one flat buffer. It shares nothing with templates, runtime or kgen.check.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch

FORMATS = {  # d_qk, fp8 dims, group, bytes from token to token, logical bytes per token, page alignment
    "v32": (576, 512, 128, 656, 656, 1),
    "v4": (512, 448, 64, 576, 584, 576),
    "v41_footer": (512, 512, 32, 512, 528, 512),
    "v41_inline": (512, 512, 32, 528, 528, 528),
}
RULES = {"v32": ("flashmla", "vllm", "sglang", "arbitrary")} | dict.fromkeys(
    ("v4", "v41_footer", "v41_inline"), ("flashmla", "vllm", "sglang")
)
CANARY = 0xA5

# every finite e4m3fn magnitude by its code 0..126: 3 mantissa bits, bias 7, subnormals in steps of 2^-9
_MAGNITUDES = np.array([c * 2.0**-9 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)])


def e4m3(x: float) -> int:
    """Nearest code, ties to the even one, saturating at 448 (code 126)."""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    size = min(abs(x), 448.0)
    above = int(np.searchsorted(_MAGNITUDES, size))
    below = max(above - 1, 0)
    gap_above, gap_below = _MAGNITUDES[above] - size, size - _MAGNITUDES[below]
    if gap_above == gap_below:
        return sign | (above if above % 2 == 0 else below)
    return sign | (above if gap_above < gap_below else below)


def scale_of(amax: float, layout: str, rule: str) -> float:
    """The dequantisation scale of a group (spec 1.1: V32; 1.2 and 1.3: UE8M0)."""
    if layout == "v32" and rule in ("sglang", "arbitrary"):
        ratio = np.float32(amax) / np.float32(448)
        return float(ratio if rule == "sglang" else max(ratio, np.finfo(np.float32).tiny))
    if rule == "flashmla" or layout == "v32":
        ratio = max(amax / 448, 1e-4)
    else:
        ratio = max(amax, {"vllm": 1e-4, "sglang": 1e-8}[rule]) / 448
    return 2.0 ** math.ceil(math.log2(ratio))


def _record(row: torch.Tensor, layout: str, rule: str) -> tuple[bytes, bytes, bytes]:
    """(codes, scales, rope) of one token."""
    _, dims, group, *_ = FORMATS[layout]
    values = row[:dims].double().tolist()
    codes, scales = bytearray(), bytearray()
    for start in range(0, dims, group):
        part = values[start : start + group]
        broken = not all(math.isfinite(v) for v in part)
        scale = math.nan if broken else scale_of(max(abs(v) for v in part), layout, rule)
        if broken:
            codes += b"\x7f" * group
        elif layout == "v32" and rule in ("sglang", "arbitrary"):  # the quotient is an fp32 number there
            codes += bytes(e4m3(float(np.float32(v) / np.float32(scale))) if scale else e4m3(0 * v) for v in part)
        else:
            codes += bytes(e4m3(v / scale) for v in part)
        if layout == "v32":
            scales += struct.pack("<f", scale)
        else:
            scales.append(255 if broken else int(math.log2(scale)) + 127)
    if layout == "v4":
        scales.append(0)  # the pad byte
    rope = row[dims:].to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return bytes(codes), bytes(scales), rope


def write(
    buffer: np.ndarray, rows: torch.Tensor, slots: list[int], layout: str, rule: str, page: int, stride: int
) -> None:
    """Write rows[i] to slots[i] of the flat byte buffer whose pages start `stride` bytes apart."""
    _, _, _, step, _, _ = FORMATS[layout]
    for row, slot in zip(rows, slots, strict=True):
        if slot < 0:
            continue
        start, token = slot // page * stride, slot % page
        codes, scales, rope = _record(row, layout, rule)
        if layout == "v32":
            parts = [(start + token * step, codes + scales + rope)]
        elif layout == "v41_inline":
            parts = [(start + token * step, codes + scales)]
        else:
            footer = start + page * step + token * len(scales)
            parts = [(start + token * step, codes + rope), (footer, scales)]
        for at, data in parts:
            buffer[at : at + len(data)] = np.frombuffer(data, np.uint8)


def page_bytes(layout: str, page: int) -> int:
    *_, logical, align = FORMATS[layout]
    return -(-page * logical // align) * align


def new_cache(layout: str, page: int, pages: int, stride: int, fill: int = CANARY) -> tuple[torch.Tensor, np.ndarray]:
    """(the cache as engines shape it, the flat bytes under it), filled with canary bytes."""
    logical = FORMATS[layout][4]
    flat = torch.full((pages * stride,), fill, dtype=torch.uint8)
    cache = flat.as_strided((pages, page, 1, logical), (stride, logical, logical, 1))
    return cache, flat.numpy()

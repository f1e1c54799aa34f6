"""The interpreter's stand-ins for bf16 and e4m3 rounding against the GPU's own: the same checks on a real device.

    PYTHONPATH=.:tests python -m ops.on_gpu            # on a GPU
    TRITON_INTERPRET=1 PYTHONPATH=.:tests python -m ops.on_gpu cpu 40

Not a pytest file: CI has no GPU. Prints one line per check and exits with 1 if one fails.
"""

from __future__ import annotations

import sys

import torch

from kgen.check import pack
from kgen.check.reference import decode_slots
from kgen.render import load_module
from kgen.runtime import cache_ops
from kgen.runtime.layouts import LAYOUTS

from .writer import RULES, page_bytes

PAGE = 7


def check_layout(name: str, rule: str, dtype: torch.dtype, n: int, device: str, arch: str) -> list[str]:
    """What differs between device and packer for `n` random rows with NaN, inf and large values among them."""
    layout, module = LAYOUTS[name], load_module("cache_ops", name, arch)
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, layout.d_qk, generator=generator)
    rows *= torch.exp2(torch.randint(-20, 15, (n, 1), generator=generator).float())
    rows[0, 3], rows[1, 200], rows[2, :] = float("nan"), float("inf"), 448.0
    rows = rows.to(dtype)
    stride, pages = page_bytes(name, PAGE) + 16, -(-n // PAGE)
    want = pack.empty_cache(name, PAGE, pages, stride, 0, 0, "cpu")
    pack.write_rows(want, name, rows, scale_rule=rule)  # type: ignore[arg-type]
    got = pack.empty_cache(name, PAGE, pages, stride, 0, 0, device)
    cache_ops._write(module, layout, rows.to(device), got, torch.arange(n, device=device), rule)
    slots = torch.randint(-3, n + 3 * PAGE, (2 * n,), generator=generator, dtype=torch.int32)
    gathered = cache_ops._gather(module, layout, got, slots.to(device), None).cpu()
    present = (slots >= 0) & (slots < pages * PAGE)
    decoded = decode_slots(want, name, slots.clamp(0, pages * PAGE - 1).long()).float().bfloat16()
    decoded = torch.where(present[:, None], decoded, torch.zeros_like(decoded))
    faults = []
    if not torch.equal(_bytes(got), _bytes(want)):
        faults.append(f"{int((_bytes(got) != _bytes(want)).sum())} bytes differ")
    if not torch.equal(gathered.nan_to_num(7.0), decoded.nan_to_num(7.0)):
        faults.append(f"{int((gathered.nan_to_num(7.0) != decoded.nan_to_num(7.0)).sum())} values differ")
    return faults


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage, gaps included; NaN of scale (fp32) and rope (fp32 rows) have more than one pattern, so
    the rows with NaN carry it in bf16 latent dims, which are stored as codes."""
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return flat.cpu()


def main(device: str = "cuda", n: int = 20_000) -> int:
    arch = cache_ops.ARCH_OF_CAPABILITY[torch.cuda.get_device_capability()] if device == "cuda" else "sm90"
    failed = 0
    for name in RULES:
        for rule in RULES[name]:
            for dtype in (torch.bfloat16, torch.float32):
                faults = check_layout(name, rule, dtype, n, device, arch)
                failed += bool(faults)
                print(f"{name:10} {rule:9} {str(dtype):14} {'; '.join(faults) or 'equal'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2], *map(int, sys.argv[2:3])))

"""Compile every kernel of cache_ops and index_ops for one arch, without a GPU; prints one JSON line per kernel.

Run by test_compile.py in a process of its own: `triton.compile` does not work where TRITON_INTERPRET is set.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kgen.render import load_module
from kgen.runtime.cache_checks import SCALE_RULES
from kgen.runtime.cache_ops import GATHER_ROWS, INDEX_BLOCK
from kgen.runtime.layouts import LAYOUTS

CAPABILITY = {"sm90": 90, "sm100": 100, "sm120": 120, "sm121": 121}
WIDE = ("row_stride", "page_stride", "out_stride", "n_slots")  # must also work past 2^31


def compile_kernel(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], arch: str, warps: int) -> Any:
    names = [p.name for p in kernel.params]
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i64" if name in WIDE else "i32")
        for name in names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY[arch], 32), options=options)


def main(arch: str) -> None:
    for name, layout in LAYOUTS.items():
        module = load_module("cache_ops", name, arch)
        cache = "*u8" if layout.fp8 else "*bf16"
        rule = SCALE_RULES[layout.scale]["sglang"] if layout.fp8 else SCALE_RULES["fp32"]["flashmla"]
        scale = {"AMAX_FLOOR": rule.amax_floor, "SCALE_FLOOR": rule.scale_floor, "POW2": rule.pow2}
        jobs = (
            ("quantise", {"rows": "*bf16", "cache": cache, "slots": "*i64"}, scale | {"UPCAST": False}, 1),
            ("gather", {"cache": cache, "slots": "*i32", "out": "*bf16"}, {"BLOCK_N": GATHER_ROWS, "UPCAST": False}, 4),
        )
        for kind, pointers, constants, warps in jobs:
            report(name, kind, compile_kernel(getattr(module, f"{kind}_kernel"), pointers, constants, arch, warps))
    tensors = ("indices", "block_table", "request_ids", "out", "counts")
    module = load_module("index_ops", None, arch)
    compiled = compile_kernel(module.convert_kernel, dict.fromkeys(tensors, "*i32"), {"BLOCK": INDEX_BLOCK}, arch, 4)
    report("index_ops", "convert", compiled)


def report(name: str, kind: str, compiled: Any) -> None:
    text = compiled.asm["ptx"]
    facts = {
        "layout": name,
        "kernel": kind,
        "shared": compiled.metadata.shared,
        "cubin": len(compiled.asm["cubin"]),
        "local": text.count("ld.local") + text.count("st.local"),
        "rounded_cast": "cvt.rn.satfinite.e4m3x2.f32" in text,
        "rounded_division": "div.rn.f32" in text,
        "flushes": "ftz" in text,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])

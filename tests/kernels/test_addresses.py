"""B23: no 32-bit product goes into an address, in any template; and the check sees one that is planted.

Every stride and count is a 32-bit run-time argument here, as it is for tensors below 2^31 elements: the case in which a
product overflows unseen. Families are found by name, so that a new template is covered once it has a search space.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kgen.archs import load_arch
from kgen.build import FLOATS, POINTERS, attention_job
from kgen.config import template_root
from kgen.render import CHUNK_FAMILIES, chunk_choices, render_module
from kgen.runtime.cache_checks import SCALE_RULES
from kgen.runtime.cache_ops import GATHER_ROWS, INDEX_BLOCK
from kgen.runtime.call import MAX_SPAN
from kgen.runtime.families import FAMILIES
from kgen.runtime.layouts import LAYOUTS
from kgen.space import all_spaces
from kgen.types import KernelSpec

from . import addresses

ROOT = Path(__file__).resolve().parents[2]
ARCH = "sm90"
WIDENING = re.compile(r"\.to\((?:tl|gl)\.int64\)")

BUILT = [name for name in FAMILIES if (Path(template_root()) / f"{name}.py.jinja").is_file() and name in all_spaces()]


@dataclass(frozen=True)
class Form:
    """A kernel as it is compiled: its module's text, its constants, the types of its pointers."""

    name: str
    text: str
    kernel: str
    constants: dict[str, Any]
    types: dict[str, str]
    gluon: bool = False
    ctas: int = 1


def attention_forms(family: str, layout: str) -> Iterator[Form]:
    """The kernel that splits the keys (of two caches, if the layout knows them), and the one that does neither."""
    space = all_spaces()[family]
    heads = max(16 if family == "sm90_few" else 64, FAMILIES[family].min_heads)
    kv, paged = LAYOUTS[layout], LAYOUTS[layout].paged
    chunk = max(chunk_choices(kv)) if family in CHUNK_FAMILIES else 0
    text = render_module(family, layout, ARCH, chunk)
    types = POINTERS | {"kv": "*u8" if kv.fp8 else "*bf16", "part_out": "*fp32"} | dict.fromkeys(FLOATS, "fp32")
    types["extra_kv"] = types["kv"]
    for several in (True, False):
        dual = several and layout.startswith("v4")
        spec = KernelSpec(ARCH, layout, heads, 2048, 64 if paged else 0, 64, 512 if dual else 0, 64 if dual else 0)
        usual = next(space.feasible(spec, load_arch(ARCH)))
        tunables = dict(usual.tunables) | {"splits": 2 if several else 1, "specialise": False}
        if chunk:
            tunables["chunk"] = chunk
        job = attention_job(spec, space.candidate(tunables, dict(vars(usual.launch))), 90)
        name = f"{family} {layout}{' dual' * dual}{' split' * several}"
        yield Form(
            name, text, "attention_kernel", dict(job.constants), types, FAMILIES[family].gluon, FAMILIES[family].ctas
        )


def combine_forms() -> Iterator[Form]:
    constants = {"BLOCK_S": 4, "BLOCK_D": 128, "UPCAST": False}
    types = POINTERS | {"part_out": "*fp32"} | dict.fromkeys(FLOATS, "fp32")
    yield Form("combine", render_module("combine", None, ARCH), "combine_kernel", constants, types)


def cache_forms(layout: str) -> Iterator[Form]:
    kv = LAYOUTS[layout]
    text = render_module("cache_ops", layout, ARCH)
    rule = SCALE_RULES[kv.scale]["sglang"] if kv.fp8 else SCALE_RULES["fp32"]["flashmla"]
    scale = {"AMAX_FLOOR": rule.amax_floor, "SCALE_FLOOR": rule.scale_floor, "POW2": rule.pow2, "UPCAST": False}
    types = {"rows": "*bf16", "out": "*bf16", "cache": "*u8" if kv.fp8 else "*bf16", "slots": "*i32"}
    yield Form(f"quantise {layout}", text, "quantise_kernel", scale, types)
    yield Form(f"gather {layout}", text, "gather_kernel", {"BLOCK_N": GATHER_ROWS, "UPCAST": False}, types)


def index_forms() -> Iterator[Form]:
    types = dict.fromkeys(("indices", "block_table", "request_ids", "out", "counts"), "*i32")
    yield Form("index_ops", render_module("index_ops", None, ARCH), "convert_kernel", {"BLOCK": INDEX_BLOCK}, types)


class Looker:
    """A process that compiles and walks; `triton.compile` does not work where TRITON_INTERPRET is set."""

    def __init__(self, folder: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self.folder = folder
        self.count = 0
        self.process = subprocess.Popen(
            [sys.executable, addresses.__file__], env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def look(self, form: Form) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.count += 1
        path = self.folder / f"looked_at_{self.count}.py"
        path.write_text(form.text)
        facts = {"path": str(path)} | {k: v for k, v in vars(form).items() if k not in ("name", "text")}
        self.process.stdin.write(json.dumps(facts) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def looker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looker]:
    looker = Looker(tmp_path_factory.mktemp("addresses"))
    yield looker
    assert looker.process.stdin is not None
    looker.process.stdin.close()
    looker.process.wait(30)


ALL = [
    (f"{family}-{layout}", attention_forms, (family, layout)) for family in BUILT for layout in FAMILIES[family].layouts
]
ALL += [(f"cache_ops-{layout}", cache_forms, (layout,)) for layout in LAYOUTS]
ALL += [("combine", combine_forms, ()), ("index_ops", index_forms, ())]


@pytest.mark.parametrize(("forms", "arguments"), [pytest.param(f, a, id=name) for name, f, a in ALL])
def test_no_32_bit_product_goes_into_an_address(looker: Looker, forms: Any, arguments: tuple[str, ...]) -> None:
    for form in forms(*arguments):
        answer = looker.look(form)
        assert "error" not in answer, f"{form.name}: {answer['error']}"
        assert answer["faults"] == [], f"{form.name}: {answer['faults']}"
        assert answer["wide"] >= 1, f"{form.name}: no product was found at all"


def planted(form: Form) -> Iterator[tuple[str, Form]]:
    """(line, the form without one widening to 64 bits), one at a time."""
    for found in WIDENING.finditer(form.text):
        begin = form.text.rfind("\n", 0, found.start()) + 1
        line = form.text[begin : form.text.index("\n", found.start())].strip()
        yield line, replace(form, text=form.text[: found.start()] + form.text[found.end() :])


def unseen(looker: Looker, forms: list[Form]) -> list[str]:
    """Lines that no form shows to be at fault when their widening is taken away."""
    seen: dict[int, bool] = {}
    lines: dict[int, str] = {}
    for form in forms:
        for i, (line, changed) in enumerate(planted(form)):
            lines[i] = line
            if not seen.get(i):
                seen[i] = bool(looker.look(changed).get("faults"))
    assert lines, "the template widens nothing"
    return [lines[i] for i in lines if not seen[i]]


PLAIN = [
    ("portable-v4", attention_forms, ("portable", "v4")),
    ("portable-bf16", attention_forms, ("portable", "bf16_d512")),
    ("cache_ops-v4", cache_forms, ("v4",)),
    ("cache_ops-bf16", cache_forms, ("bf16_d512",)),
    ("combine", combine_forms, ()),
    ("index_ops", index_forms, ()),
]


@pytest.mark.parametrize(("forms", "arguments"), [pytest.param(f, a, id=name) for name, f, a in PLAIN])
def test_every_widening_of_the_plain_templates_is_missed(
    looker: Looker, forms: Any, arguments: tuple[str, ...]
) -> None:
    assert unseen(looker, list(forms(*arguments))) == []


def narrowed(text: str) -> str:
    """The text with every product of a widened factor formed in 32 bits and widened afterwards."""
    text = re.sub(r"(\w*stride)\.to\(gl\.int64\)", r"\1", text)
    return re.sub(
        r"(\w[\w.]*(?:\([^()]*\))?)\.to\(gl\.int64\) \* (\w+(?:\.\w+\([^()]*\))?)", r"(\1 * \2).to(gl.int64)", text
    )


@pytest.mark.parametrize("family", [name for name in BUILT if FAMILIES[name].gluon])
def test_planted_products_are_seen_in_gluon(looker: Looker, family: str) -> None:
    form = next(attention_forms(family, FAMILIES[family].layouts[-1]))
    found = looker.look(replace(form, text=narrowed(form.text)))
    for factor in ("product of loaded index and stride", "product of stride"):
        assert any(factor in fault for fault in found["faults"]), found


def test_a_cut_of_anything_but_units_of_16_bytes_is_seen(looker: Looker) -> None:
    """Offsets in units of 16 bytes fit 31 bits, because no Gluon family gets a cache of 32 GiB; in smaller units they do not."""
    assert MAX_SPAN >> 4 == 1 << 31
    form = next(attention_forms("sm90_pair_fp8", "v4"))
    changed = form.text.replace("(row >> 4).to(gl.int32)", "(row >> 3).to(gl.int32)")
    assert changed != form.text
    found = looker.look(replace(form, text=changed))
    assert any("cut to 32 bits" in fault for fault in found["faults"]), found


def test_a_slot_times_the_row_size_is_seen(looker: Looker) -> None:
    """In-page arithmetic may be narrow; the same product with the slot of the whole cache may not."""
    form = list(attention_forms("portable", "v4"))[1]
    changed = form.text.replace("slot = index - page_id * rows_per_page", "slot = index")
    assert changed != form.text
    found = looker.look(replace(form, text=changed))
    assert any("loaded index" in fault for fault in found["faults"]), found


def test_the_walk_follows_loops_branches_and_selects() -> None:
    text = """
module {
  tt.func public @kernel(%arg0: !tt.ptr<bf16>, %arg1: i32, %arg2: i32) {
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %0 = tt.get_program_id y : i32
    %1 = arith.muli %0, %arg1 : i32
    %2 = arith.cmpi slt, %0, %arg2 : i32
    cf.cond_br %2, ^bb1(%1 : i32), ^bb2
  ^bb1(%3: i32):  // pred: ^bb0
    %4 = scf.for %arg3 = %c0_i32 to %arg2 step %c1_i32 iter_args(%arg4 = %c0_i32) -> (i32)  : i32 {
      %6 = scf.if %2 -> (i32) {
        scf.yield %3 : i32
      } else {
        scf.yield %arg4 : i32
      }
      scf.yield %6 : i32
    }
    %5 = tt.addptr %arg0, %4 : !tt.ptr<bf16>, i32
    tt.return
  ^bb2:  // pred: ^bb0
    tt.return
  }
}
"""
    for names, count in ((["kv", "page_stride", "n"], 1), (["kv", "page", "n"], 0)):
        faults, _ = addresses.Walk(addresses.read(text), names).faults()
        assert len(faults) == count


@pytest.mark.parametrize(
    ("condition", "other", "count"),
    [
        ("ne, %arg1, %c1_i32", "%0", 0),  # heads != 1, else the item itself
        ("ne, %arg1, %c2_i32", "%0", 1),  # with two heads the product is twice the item
        ("slt, %arg1, %c1_i32", "%0", 1),
        ("ne, %arg1, %c1_i32", "%arg2", 1),  # something else than the item
        ("ne, %arg2, %c1_i32", "%0", 1),  # another number is 1
    ],
)
def test_a_division_may_be_branched_over_where_the_divisor_is_1(condition: str, other: str, count: int) -> None:
    text = f"""
module {{
  tt.func public @kernel(%arg0: !tt.ptr<bf16>, %arg1: i32, %arg2: i32) {{
    %c1_i32 = arith.constant 1 : i32
    %c2_i32 = arith.constant 2 : i32
    %0 = tt.get_program_id x : i32
    %1 = arith.cmpi {condition} : i32
    %2 = scf.if %1 -> (i32) {{
      %5 = arith.divsi %0, %arg1 : i32
      scf.yield %5 : i32
    }} else {{
      scf.yield {other} : i32
    }}
    %3 = arith.muli %2, %arg1 : i32
    %4 = arith.subi %0, %3 : i32
    %6 = tt.addptr %arg0, %4 : !tt.ptr<bf16>, i32
    tt.return
  }}
}}
"""
    faults, _ = addresses.Walk(addresses.read(text), ["kv", "n_heads", "n"]).faults()
    assert len(faults) == count

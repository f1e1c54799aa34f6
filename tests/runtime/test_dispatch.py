"""From the public entry to the launch: what is launched, what is refused, what is logged, what import costs."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.runtime import dispatch, launch, lookup
from kgen.runtime.dispatch import NoTarget, Shape, Unsupported, explain, sparse_mla, supports, warmup, workspace_size
from kgen.runtime.target import arch_of, match_device_class
from kgen.runtime.validate import build_call

from .conftest import FakeTree
from .samples import MOST, arguments, dual, entry, key_of, toy_table

ROOT = Path(__file__).resolve().parents[2]
F32, I32 = torch.float32, torch.int32


def test_returns_what_is_asked_for(tree: FakeTree) -> None:
    given = arguments()
    out = sparse_mla(**given)
    assert isinstance(out, torch.Tensor) and out.shape == (5, 8, 512)
    pair = sparse_mla(**given, return_lse=True)
    assert isinstance(pair, tuple) and [tuple(t.shape) for t in pair] == [(5, 8, 512), (5, 8)]
    tops = sparse_mla(**given, return_max_logits=True)
    assert isinstance(tops, tuple) and len(tops) == 2 and tops[1] is tree.launched[-1].call.max_logits
    three = sparse_mla(**given, return_lse=True, return_max_logits=True)
    call = tree.launched[-1].call
    assert isinstance(three, tuple) and three == (call.out, call.lse, call.max_logits)


def test_outputs_are_written_in_place(tree: FakeTree) -> None:
    mine, lse = torch.zeros(5, 8, 512, dtype=torch.bfloat16), torch.zeros(5, 8)
    assert sparse_mla(**arguments(out=mine, lse=lse)) is mine
    assert tree.launched[-1].call.lse is lse  # written although it is not returned


def test_launch_gets_entry_package_and_workspace(tree: FakeTree) -> None:
    work = torch.empty(1 << 16, dtype=torch.uint8)
    sparse_mla(**dual(workspace=work))
    (done,) = tree.launched
    assert (done.arch, done.package) == ("sm90", "kgen.runtime") and done.workspace is work
    assert done.entry.dual and done.entry.heads == 8 and done.entry.tokens == (2, 16)
    assert not done.exact  # pages of 4 + 2, made for 64 + 2


def test_launch_options_of_interleaved_shapes_do_not_mix(tree: FakeTree) -> None:
    """B55."""
    for _ in range(3):
        for heads in (8, 64):
            sparse_mla(**arguments(heads=heads))
    assert [done.entry.config.num_warps for done in tree.launched] == [4, 8] * 3


def test_no_tokens_launches_nothing(tree: FakeTree) -> None:
    out = sparse_mla(**arguments(tokens=0))
    assert isinstance(out, torch.Tensor) and out.shape == (0, 8, 512) and tree.launched == []


def test_refused_before_any_launch(tree: FakeTree) -> None:
    bad = arguments(indices=torch.zeros(4, 6))
    with pytest.raises(Unsupported) as raised:
        sparse_mla(**bad)
    assert supports(**bad) == raised.value.reasons and len(raised.value.reasons) == 2
    assert tree.launched == [] and supports(**arguments()) == []


def test_supports_takes_what_sparse_mla_takes() -> None:
    assert inspect.signature(supports).parameters == inspect.signature(sparse_mla).parameters


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (torch.empty(8, dtype=torch.uint8), "workspace has 8 bytes and this call needs 4160: see workspace_size."),
        (torch.empty(1 << 16, dtype=torch.uint8, device="meta"), "workspace is on meta and q on cpu"),
        (torch.empty(1 << 16, dtype=torch.uint8)[::2], "workspace is not contiguous"),
        (torch.empty(1 << 16, dtype=torch.uint8)[1:], "workspace does not start at a multiple of 16 bytes"),
    ],
)
def test_workspace_is_checked(tree: FakeTree, work: torch.Tensor, sentence: str) -> None:
    with pytest.raises(Unsupported) as raised:
        sparse_mla(**arguments(workspace=work))
    assert sentence in str(raised.value) and sentence in supports(**arguments(workspace=work))[0]
    assert tree.launched == []


def test_workspace_size_covers_every_token_count(tree: FakeTree) -> None:
    shape = Shape("v4", 16, 128, 64, 200)
    sizes = {t: launch.scratch_bytes(replace(shape, tokens=t), entry(), True) for t in range(1, 201)}
    assert workspace_size(shape, arch="sm90") == max(sizes.values())
    assert max(sizes, key=lambda t: sizes[t]) not in (1, 200)  # a saw-tooth: looking at the ends would not do
    assert workspace_size(replace(shape, tokens=0), arch="sm90") == 0


def test_warmup_runs_each_variant_once_on_rows_without_keys(tree: FakeTree) -> None:
    shape = Shape("v4", 16, 128, 64, 300, extra_topk=512, extra_page=2)
    count = warmup([shape], device="cpu")
    variants = []
    for done in tree.launched:
        tokens = done.call.tokens
        plan = launch.make_plan(launch.call_shape(done.call), done.entry, True)
        merge = launch.combine_tile(tokens * 16, plan.splits, plan.parts), launch.merges_early(plan, tokens, 16)
        size = launch.scratch_bytes(launch.call_shape(done.call), done.entry, True)
        variants.append((done.entry, done.exact, size // (tokens * 16), plan.splits > 1 and merge))
    assert len(set(variants)) == len(variants) == count
    assert {d.entry.tokens for d in tree.launched} == {(1, 1), (2, 16), (17, 256), (257, MOST)}
    for done in tree.launched:
        call = done.call
        assert launch.call_shape(call) == replace(shape, tokens=call.tokens) and done.exact
        for view in (call.main, call.extra):
            assert view is not None and view.lengths is not None
            rows = torch.as_strided(view.indices, (call.tokens, view.topk), (view.index_stride_b, 1))
            lengths = torch.as_strided(view.lengths, (call.tokens,), (1,))
            assert bool((rows == -1).all()) and bool((lengths == 0).all())
        assert call.lse is None  # no entry here has a form of its own for calls that ask for it
        assert call.q_strides == (0, 0, 512) and call.out_strides == (0, 0, 512) and call.s_q == 1


def test_a_fallback_is_logged_once(tree: FakeTree, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kgen.runtime"):
        for tokens in (1, 2, 3, 3, 300):
            sparse_mla(**arguments(heads=11, tokens=tokens))
    assert [record.message for record in caplog.records] == [
        "sm90, layout v4, 11 heads, topk 6: no entry measured on interpreter serves it, one of h200 does; "
        "generic form, made for 16 heads, asked for 11."
    ]


def test_a_module_for_another_triton_is_passed_over(tree: FakeTree, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = entry(heads=128), entry(module="fast_v4")
    tree.set_table((bad, good))
    tree.set_module("fast_v4", triton_range=("2.0", "3.0"))
    with caplog.at_level(logging.WARNING, logger="kgen.runtime"):
        for _ in range(2):
            sparse_mla(**arguments(heads=64))
    assert tree.launched[-1].entry is good
    texts = [record.message for record in caplog.records]
    assert len([text for text in texts if "fast_v4 is valid for Triton 2.0 up to but not including 3.0" in text]) == 1
    tree.set_table((bad,))
    tree.set_module("fast_v4", triton_range=("2.0", "3.0"))
    with pytest.raises(Unsupported, match="is valid for Triton 2.0"):
        sparse_mla(**arguments(heads=64))


@pytest.mark.parametrize(
    ("first", "below", "fits"),
    [
        ("3.4", "4.0", True),
        ("3.6", "3.7", True),
        ("3.7", "4.0", False),
        ("3.0", "3.6", False),
        ("3.6.0", "3.6.1", True),
    ],
)
def test_triton_range(tree: FakeTree, monkeypatch: pytest.MonkeyPatch, first: str, below: str, fits: bool) -> None:
    monkeypatch.setattr("triton.__version__", "3.6.0+git1234")
    tree.set_module("portable_v4", triton_range=(first, below))
    assert (lookup._triton_problem("sm90", "portable_v4") is None) == fits


def test_nothing_serves(tree: FakeTree) -> None:
    tree.set_table((entry("v32"), entry("v32", heads=8), entry("v41_footer", extra=(1, 512))))
    with pytest.raises(Unsupported) as raised:
        sparse_mla(**arguments(tokens=5, heads=8, topk=6))
    assert raised.value.reasons == [
        "2 entries: It reads layout v32, not v4.",
        "1 entry: It reads layout v41_footer, not v4.",
        "To add an entry: kgen tune --arch sm90 --layout v4 --heads 8 --topk 6 --page 4 --tokens 5",
    ]
    tree.monkeypatch.setenv("KGEN_ARCH", "sm120")
    with pytest.raises(Unsupported, match="kgen.runtime has no table for sm120. To make one: kgen tune --arch sm120"):
        sparse_mla(**arguments())


def test_cpu_tensors_need_the_interpreter(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(NoTarget, match="Tensors are on the CPU.*TRITON_INTERPRET=1"):
        sparse_mla(**arguments())
    assert "Tensors are on the CPU" in supports(**arguments())[0]
    on_meta: dict[str, Any] = {k: v.to("meta") if hasattr(v, "to") else v for k, v in arguments().items()}
    with pytest.raises(NoTarget, match="Tensors are on meta"):
        sparse_mla(**on_meta)


def test_the_interpreter_takes_the_arch_from_the_environment(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_ARCH", "sm100")
    tree.set_table(toy_table(), arch="sm100")
    sparse_mla(**arguments())
    assert tree.launched[-1].arch == "sm100"
    monkeypatch.setenv("KGEN_ARCH", "sm91")
    with pytest.raises(NoTarget, match="Arch 'sm91' is unknown: there are kernels for sm90, sm100, sm120, sm121"):
        sparse_mla(**arguments())


def test_archs_are_exact() -> None:
    assert [arch_of(cc) for cc in ((9, 0), (10, 0), (12, 0), (12, 1))] == ["sm90", "sm100", "sm120", "sm121"]
    with pytest.raises(NoTarget, match=r"sm103 \(B300, GB300\) is not built yet"):
        arch_of((10, 3))
    for cc, name in (((8, 0), "sm80"), ((8, 9), "sm89"), ((11, 0), "sm110")):
        with pytest.raises(NoTarget, match=f"This GPU is {name}: there are kernels for exactly sm90"):
            arch_of(cc)


def test_device_class_by_whole_words() -> None:
    classes = {"h100": ("H100", "!PCIe"), "h20": ("H20",), "h200": ("H200",), "pro": ("RTX PRO 6000",)}
    for gpu, name in {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": None,
        "NVIDIA H200": "h200",
        "NVIDIA H20": "h20",
        "NVIDIA GH200 480GB": None,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "pro",
    }.items():
        assert match_device_class(classes, gpu) == name


class Capture:
    """A call whose q claims to be on a GPU, in a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(launch, "is_compiled", lambda *_: compiled)
        self.call = build_call(**arguments())
        object.__setattr__(self.call, "q", type("Q", (), {"is_cuda": True})())


def test_a_capture_refuses_only_what_is_not_compiled(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = lookup.choose("sm90", "h200", Shape("v4", 8, 6, 4, 5))
    with pytest.raises(RuntimeError, match=r"not compiled yet.*warmup\(\[Shape\("):
        dispatch._launch(Capture(monkeypatch, compiled=False).call, "sm90", choice, None)
    assert tree.launched == []
    dispatch._launch(Capture(monkeypatch, compiled=True).call, "sm90", choice, None)
    assert len(tree.launched) == 1


@pytest.mark.parametrize(
    "row", toy_table(), ids=lambda row: f"{row.layout}-{row.heads}-{row.topk}-{row.tokens}-{row.dual}"
)
def test_the_runner_up_is_what_is_chosen_without_the_winner(tree: FakeTree, row: object) -> None:
    shape = key_of(row)  # type: ignore[arg-type]
    told = explain(shape, arch="sm90", device_class="h200")
    assert told.entry == row and told.exact
    tree.set_table(tuple(other for other in toy_table() if other != row))
    assert told.runner_up == lookup.choose("sm90", "h200", shape).entry
    assert {id(e) for e, _ in told.against} >= {id(told.runner_up)} and len(told.against) == len(toy_table()) - 1


def test_explanation_in_words(tree: FakeTree) -> None:
    tree.set_table((entry(us=12.5), entry(heads=128, source="static"), entry("v32")))
    text = str(explain(Shape("v4", 64, 128, 64, 16), arch="sm90", device_class="h200"))
    for words in (
        "shape      sm90 v4, 64 heads, topk 128, page 64, 16 tokens, device class h200",
        "entry      portable_v4 [v4, 64 heads, topk 1..128, page any, tokens 1..] block_h=64",
        "why        Made for this shape (same class: measured on h200).",
        "time       12.5 us (measured, h200",
        "fallback   none",
        "runner-up  portable_v4 [v4, 128 heads",
        "never timed (static",
        "It reads layout v32, not v4.",
    ):
        assert words in text, text
    alone = explain(Shape("v32", 64, 128, 64, 16), arch="sm90")
    assert alone.runner_up is None and "runner-up  none" in str(alone)


def test_questions_without_a_device_name_what_is_missing(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoTarget, match="No GPU is visible: name the arch"):
        explain(Shape("v4", 64, 128, 64, 16))


IMPORT = """
import json, logging, sys, torch
before, handlers = set(sys.modules), list(logging.getLogger().handlers)
import kgen.runtime.dispatch, kgen.runtime.compat.flash_mla
new = set(sys.modules) - before
print(json.dumps({
    "triton": "triton" in sys.modules,
    "tables": [name for name in new if name.endswith(".table") and name != "kgen.runtime.table"],
    "outside": [name for name in new if name.startswith("kgen.") and not name.startswith("kgen.runtime")],
    "cuda": torch.cuda.is_initialized(),
    "handlers": logging.getLogger().handlers != handlers or bool(logging.getLogger("kgen.runtime").handlers),
}))
"""


def test_import_has_no_side_effect() -> None:
    text = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(text) == {"triton": False, "tables": [], "outside": [], "cuda": False, "handlers": False}

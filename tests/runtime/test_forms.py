"""Calls of a form that was seen before: the same call as if it were examined anew, whatever differs between the two."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kgen.runtime import dispatch, forms, launch
from kgen.runtime.call import AttentionCall, CacheView
from kgen.runtime.validate import Unsupported, _examined_call, build_call

from .conftest import FakeTree
from .samples import arguments, dual, entry, paged
from .test_refusals import CASES as REFUSED

BF16, I32 = torch.bfloat16, torch.int32
OPTIONS: dict[str, Any] = {
    "topk_length": None, "attn_sink": None, "extra_kv": None, "extra_indices": None, "extra_topk_length": None, "out": None,
    "lse": None, "return_lse": False, "return_max_logits": False, "lse_base": "e", "empty_lse": -torch.inf,
    "scale_range": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(forms, "_known", {})
    yield


def other(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in other memory (with the same strides)."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor.clone()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        shift = tensor.data_ptr() % 16 // tensor.element_size()
        buffer = torch.empty(span + shift, dtype=tensor.dtype)
        return buffer.as_strided(tensor.shape, tensor.stride(), shift)

    return {name: copy(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def state(made: AttentionCall | CacheView) -> dict[str, Any]:
    """Every field; tensors by what a kernel sees of them, and by address where the caller gave them."""
    out: dict[str, Any] = {}
    for field in fields(made):
        value = getattr(made, field.name)
        if field.name == "memo":
            continue
        if isinstance(value, CacheView):
            value = state(value)
        elif isinstance(value, torch.Tensor):
            value = (value.shape, value.stride(), value.dtype, value.data_ptr() % 16)
        out[field.name] = value
    return out


def q4(**changes: Any) -> dict[str, Any]:
    return arguments(q=torch.zeros(2, 3, 8, 512, dtype=BF16), indices=torch.zeros(2, 3, 6, dtype=I32), **changes)


FORMS: dict[str, dict[str, Any]] = {
    "v4": arguments(),
    "v32": arguments("v32"),
    "flat": arguments("bf16"),
    "one token": arguments(tokens=1),
    "int8": arguments(kv=paged("v4", dtype=torch.int8)),
    "fp8": arguments("v41_inline", kv=paged("v41_inline", dtype=torch.float8_e4m3fn)),
    "two caches": dual(),
    "batches": q4(topk_length=torch.zeros(2, dtype=I32)),
    "lengths per token": q4(topk_length=torch.zeros(6, dtype=I32)),
    "padded": arguments(q=torch.zeros(5, 8, 520, dtype=BF16)[..., :512]),
    "shifted": arguments(q=torch.zeros(5 * 8 * 512 + 4, dtype=BF16)[4:].view(5, 8, 512)),
    "outputs": arguments(out=torch.zeros(5, 8, 512, dtype=BF16), lse=torch.zeros(5, 8)),
    "lse": arguments(return_lse=True, lse_base="2"),
    "all": arguments(return_lse=True, return_max_logits=True, attn_sink=torch.zeros(8), empty_lse=torch.inf),
    "lse given and asked": arguments(lse=torch.zeros(5, 8), return_lse=True),
    "stated": arguments(scale_range=(1e-3, 1.0)),
    "negative": arguments(sm_scale=-0.1),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_known_form_gives_the_call_that_an_examination_gives(name: str) -> None:
    first, given = FORMS[name], other(FORMS[name]) | {"sm_scale": FORMS[name]["sm_scale"] * 1.5}
    build_call(**first)
    assert len(forms._known) == 1
    known = build_call(**given)
    assert len(forms._known) == 1 and known.memo is not None
    examined = _examined_call(**(OPTIONS | given))
    assert state(known) == state(examined) and known.sm_scale == given["sm_scale"]
    assert vars(known).keys() - {"memo"} == vars(examined).keys()
    assert vars(known.main).keys() == vars(examined.main).keys()
    for field, tensor in (("q", known.q), ("indices", known.main.indices), ("topk_length", known.main.lengths)):
        assert tensor is given.get(field)
    assert known.main.kv.data_ptr() == given["kv"].data_ptr() and known.attn_sink is given.get("attn_sink")
    for field in ("out", "lse"):
        if given.get(field) is not None:
            assert getattr(known, field) is given[field]
    if known.extra is not None:
        assert known.extra.kv.data_ptr() == given["extra_kv"].data_ptr()
        assert known.extra.indices is given["extra_indices"] and known.extra.lengths is given["extra_topk_length"]
    again = build_call(**given)
    if given.get("out") is None:
        assert again.out.data_ptr() != known.out.data_ptr()


OTHERS: dict[str, dict[str, Any]] = {
    "tokens": arguments(tokens=6),
    "heads": arguments(heads=9),
    "topk": arguments(topk=7),
    "pages": arguments(kv=paged("v4", pages=4)),
    "page": arguments(kv=paged("v4", page=5)),
    "bytes": arguments(kv=paged("v4", dtype=torch.int8)),
    "layout": arguments("v41_footer"),
    "stride": arguments(q=torch.zeros(5, 8, 528, dtype=BF16)[..., :512]),
    "start": arguments(q=torch.zeros(5 * 8 * 512 + 4, dtype=BF16)[4:].view(5, 8, 512)),
    "start of the indices": arguments(indices=torch.zeros(31, dtype=I32)[1:].view(5, 6)),
    "device": {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in arguments().items()},
    "class": arguments(q=torch.nn.Parameter(torch.zeros(5, 8, 512, dtype=BF16), requires_grad=False)),
    "sign": arguments(sm_scale=-0.1),
    "lengths": arguments(topk_length=torch.zeros(5, dtype=I32)),
    "sink": arguments(attn_sink=torch.zeros(8)),
    "lse": arguments(return_lse=True),
    "max_logits": arguments(return_max_logits=True),
    "base": arguments(lse_base="2"),
    "empty": arguments(empty_lse=torch.inf),
    "range": arguments(scale_range=(1e-3, 1.0)),
    "wide range": arguments(scale_range=(1e-9, 1.0)),
    "out": arguments(out=torch.zeros(5, 8, 512, dtype=BF16)),
    "given lse": arguments(lse=torch.zeros(5, 8)),
    "two caches": dual(extra_topk_length=None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_an_examination_looks_at_makes_another_form(name: str) -> None:
    build_call(**arguments())
    made = build_call(**OTHERS[name])
    assert len(forms._known) == 2
    assert state(made) == state(_examined_call(**(OPTIONS | OTHERS[name])))


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_after_good_calls(case: str) -> None:
    for good in (*FORMS.values(), *OTHERS.values()):
        build_call(**good)
    given, sentence = REFUSED[case]
    with pytest.raises(Unsupported) as raised:
        build_call(**given)
    assert any(sentence in reason for reason in raised.value.reasons)


class Lookalike:
    """Has all that the key of a tensor reads, and is none."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def test_a_lookalike_is_no_tensor() -> None:
    given = arguments()
    build_call(**given)
    with pytest.raises(Unsupported, match="q is a Lookalike: pass a torch.Tensor"):
        build_call(**(given | {"q": Lookalike(given["q"])}))


def test_an_output_that_overlaps_is_seen_in_a_known_form() -> None:
    buffer = torch.zeros(10, 8, 512, dtype=BF16)
    build_call(**arguments(q=buffer[:5], out=buffer[5:]))
    assert len(forms._known) == 1
    for overlapping in (buffer[:5], buffer[1:6], buffer[4:9]):
        with pytest.raises(Unsupported, match="out overlaps an input"):
            build_call(**arguments(q=buffer[:5], out=overlapping))
    kv = torch.zeros(40, 512, dtype=BF16)
    build_call(**arguments("bf16", kv=kv, out=torch.zeros(5, 8, 512, dtype=BF16)))
    with pytest.raises(Unsupported, match="out overlaps an input"):
        build_call(**arguments("bf16", kv=kv, out=kv.view(5, 8, 512)))


def test_whatever_is_no_form_is_examined() -> None:
    """No tokens, integers as sm_scale, ranges that are lists: served as before, and not remembered."""
    for given in (arguments(tokens=0), arguments(sm_scale=1), arguments(scale_range=[1e-3, 1.0])):
        assert build_call(**given).memo is None or given["sm_scale"] == 0.1
        assert state(build_call(**given)) == state(_examined_call(**(OPTIONS | given)))
    assert forms._known == {}


def test_tensors_are_not_kept() -> None:
    given = dual(return_lse=True, out=torch.zeros(5, 8, 512, dtype=BF16))
    gone = [weakref.ref(value) for value in given.values() if isinstance(value, torch.Tensor)]
    build_call(**given)
    build_call(**given)
    assert len(gone) == 7 and len(forms._known) == 1
    del given
    gc.collect()
    assert [ref() for ref in gone] == [None] * 7


def test_forms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_FORMS", 3)
    for tokens in range(1, 9):
        build_call(**arguments(tokens=tokens))
        assert len(forms._known) <= 3


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs for long has every token count once."""
    monkeypatch.setattr(launch, "MAX_PLANS", 3)
    monkeypatch.setattr(launch, "_plans", {})
    made = entry("v4", 8)
    for tokens in range(1, 9):
        shape = launch.call_shape(build_call(**arguments(tokens=tokens)))
        plan = launch._known_plan(shape, made, True)
        assert plan is launch._known_plan(shape, made, True) and len(launch._plans) <= 3


def test_asking_for_a_kernel_cancels_no_other_thread_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that cancels compilation is everybody's, and a cancelled launch silently does not happen."""
    from triton import knobs

    told: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **about: told.append(about))
    before = knobs.runtime.jit_cache_hook

    class Asked:
        @staticmethod
        def warmup(*args: Any, grid: Any, **keywords: Any) -> Any:
            answers: list[Any] = []
            other = threading.Thread(target=lambda: answers.append(knobs.runtime.jit_cache_hook(key="other")))
            other.start()
            other.join()
            answers.append(knobs.runtime.jit_cache_hook(key="own"))
            assert answers == [None, True] and told == [{"key": "other"}]
            return None

    assert not launch.in_cache(Asked(), (), {})
    assert knobs.runtime.jit_cache_hook is before


def test_a_changed_call_has_no_memo() -> None:
    """`explain.empty_call` changes the token count of a call: nothing may be looked up for the old one."""
    made = build_call(**arguments())
    assert made.memo is not None and replace(made, tokens=3).memo is None
    assert launch.call_shape(made).tokens == 5 and launch.call_shape(replace(made, tokens=3)).tokens == 3


# ---- look-up --------------------------------------------------------------------------------------------------------


def test_the_look_up_is_kept_until_the_table_changes(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    from kgen.runtime import lookup

    real = lookup.serve
    monkeypatch.setattr(lookup, "serve", lambda *key: asked.append(key) or real(*key))
    for _ in range(3):
        dispatch.sparse_mla(**arguments())
    assert len(asked) == 1 and len({id(done.entry) for done in tree.launched}) == 1
    tree.set_table((entry("v4", 8, device_class="h100", module="portable_v4_new"),))
    dispatch.sparse_mla(**arguments())
    assert len(asked) == 2 and tree.launched[-1].entry.module == "portable_v4_new"
    assert all(done.call.q is not None for done in tree.launched)


def test_a_capture_does_not_ask_triton_about_what_was_launched(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_call(**arguments())
    first, second = entry("v4", 8), entry("v4", 16)
    assert not launch.was_launched(made, first, True)
    made.memo.kernels = type("K", (), {"served": ("sm90", first, True, "p")})()  # type: ignore[union-attr]
    assert launch.was_launched(build_call(**arguments()), first, True)
    assert not launch.was_launched(made, first, False) and not launch.was_launched(made, second, True)
    made.memo.kernels.served = None  # type: ignore[union-attr]  # bound, but its launch failed
    assert not launch.was_launched(made, first, True)


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["v32", "bf16_d512"])
def test_every_call_computes_from_its_own_tensors(layout: str) -> None:
    from generated import forms as emitted
    from generated.dispatch import sparse_mla
    from kgen.check import CaseSpec, attention_reference, compare, make_case, tolerance_for

    count = 0
    for seed in range(3):
        spec = CaseSpec(layout=layout, heads=4, topk=20, slots=90, tokens=2, seed=seed, q_pad=False, sink="near")
        inputs = make_case(spec)
        out, lse = sparse_mla(**inputs.kwargs(), return_lse=True)
        report = compare(attention_reference(inputs), tolerance_for(spec), out, lse)
        assert report.ok, report.sentence
        count = count or len(emitted._known)
        assert len(emitted._known) == count


# ---- pointers that are never read -----------------------------------------------------------------------------------


class OnGpu:
    """Stands for a call whose q is on a GPU."""

    def __init__(self) -> None:
        self.device, self.made = torch.device("cuda", 7), 0
        self.q = self

    def new_empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        self.made += 1
        return torch.empty(*shape, dtype=dtype)


def test_a_placeholder_is_made_once_and_never_kept_from_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a capture belongs to its graph."""
    monkeypatch.setattr(launch, "_placeholders", {})
    call: Any = OnGpu()
    for capturing, made in ((True, 1), (True, 2), (False, 3), (False, 3), (True, 3)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer)
        assert launch._placeholder(call).dtype == torch.float32
        assert call.made == made

"""Calls of a form that was examined before: an engine makes the same ones again and again, with other tensors.

A form is everything that the examination of a call depends on, and everything that Triton compiles for it: shapes, strides,
types, devices, where tensors start, and options. What differs between two calls of one form is contents and addresses.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch

from .call import AttentionCall, CacheView, Memo
from .layouts import D_V

MAX_FORMS = 8192
"""Forms that are remembered: an engine has one for every token count, width and set of options that it uses."""

Key = tuple[object, ...]
T = TypeVar("T")


def form_key(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    kv_layout: str,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_kv: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    return_max_logits: bool,
    lse_base: str,
    empty_lse: float,
    scale_range: tuple[float, float] | None,
) -> Key | None:
    """The form of a call; None where it must be examined, because it may be none."""
    if sm_scale.__class__ is not float or not -math.inf < sm_scale < math.inf:
        return None
    try:
        return (
            _tensor(q), _tensor(kv), _tensor(indices), sm_scale > 0, kv_layout,
            None if topk_length is None else _tensor(topk_length),
            None if attn_sink is None else _tensor(attn_sink),
            None if extra_kv is None else _tensor(extra_kv),
            None if extra_indices is None else _tensor(extra_indices),
            None if extra_topk_length is None else _tensor(extra_topk_length),
            None if out is None else _tensor(out),
            None if lse is None else _tensor(lse),
            bool(return_lse), bool(return_max_logits), lse_base, empty_lse, scale_range,
        )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError):  # something is no tensor: the examination says it in words
        return None


def _tensor(tensor: torch.Tensor) -> Key:
    return tensor.__class__, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


_known: dict[Key, KnownCall] = {}


def known_call(key: Key | None) -> KnownCall | None:
    """What is remembered of a form, or None."""
    try:
        return None if key is None else _known.get(key)
    except TypeError:  # a list among the options, which has no hash
        return None


def remember(key: Key | None, call: AttentionCall, own_out: bool, own_lse: bool) -> None:
    """Keep what the examination of `call` gave. `own_out`, `own_lse`: they were not passed in."""
    if key is None or call.tokens == 0:
        return
    if len(_known) >= MAX_FORMS:
        _known.clear()
    object.__setattr__(call, "memo", Memo())
    try:
        _known[key] = KnownCall(call, own_out, own_lse)
    except TypeError:
        return


class KnownCall:
    """A call without its tensors, to be made again with others of the same form."""

    __slots__ = ("_extra", "_fields", "_lse", "_main", "_out", "_top")

    def __init__(self, call: AttentionCall, own_out: bool, own_lse: bool) -> None:
        tensors = ("q", "main", "extra", "attn_sink", "out", "lse", "max_logits")
        self._fields = {name: None if name in tensors else value for name, value in vars(call).items()}
        self._main = _View(call.main)
        self._extra = None if call.extra is None else _View(call.extra)
        rows = call.q.shape[:-1]
        self._out = (*rows, D_V) if own_out else None
        self._lse = rows if own_lse and call.lse is not None else None
        self._top = None if call.max_logits is None else rows

    def call(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        topk_length: torch.Tensor | None,
        attn_sink: torch.Tensor | None,
        extra_kv: torch.Tensor | None,
        extra_indices: torch.Tensor | None,
        extra_topk_length: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> AttentionCall:
        """The call of these tensors; outputs that were not passed in are allocated."""
        extra = None
        if self._extra is not None and extra_kv is not None and extra_indices is not None:
            extra = self._extra.of(extra_kv, extra_indices, extra_topk_length)
        tensors = {
            "q": q, "main": self._main.of(kv, indices, topk_length), "extra": extra, "attn_sink": attn_sink,
            "sm_scale": sm_scale,
            "out": out if self._out is None else q.new_empty(self._out),
            "lse": lse if self._lse is None else q.new_empty(self._lse, dtype=torch.float32),
            "max_logits": None if self._top is None else q.new_empty(self._top, dtype=torch.float32),
        }  # fmt: skip
        return _made(AttentionCall, self._fields | tensors)


class _View:
    """A cache view without its tensors."""

    __slots__ = ("_dtype", "_fields")

    def __init__(self, view: CacheView) -> None:
        self._dtype = view.kv.dtype
        self._fields = vars(view) | {"kv": None, "indices": None, "lengths": None}

    def of(self, kv: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None) -> CacheView:
        storage = kv if kv.dtype is self._dtype else kv.view(self._dtype)
        return _made(CacheView, self._fields | {"kv": storage, "indices": indices, "lengths": lengths})


def _made(cls: type[T], fields: dict[str, object]) -> T:
    """An instance of a frozen dataclass, past its `__init__`, which sets one field after the other."""
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", fields)
    return made

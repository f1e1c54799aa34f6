"""What to tell a caller who names or shapes a cache that is not served: near misses, and formats refused by name."""

from __future__ import annotations

import difflib

import torch

from .layouts import KV_LAYOUT_WORDS, LAYOUTS

NO_FP4 = "FP4 caches are not built yet"
NO_GLM53 = "GLM-5.3 without rope (512 fp8 values and 4 fp32 scales per token) is not built yet"
PLACEMENT = (
    "a 528-byte V4.1 record has its scales in a page footer (v41_footer: vLLM, SGLang, FlashInfer) or inline "
    "(v41_inline: newest FlashMLA), and the bytes do not tell which"
)

_OTHER_NAMES = {
    "fp8_ds_mla": "v32 (656-byte rows) or v4 (584-byte rows)",
    "v3.2": "v32",
    "dsv32": "v32",
    "dsv3_2": "v32",
    "v32_fp8sparse": "v32",
    "glm": "v32",
    "glm_nsa": "v32",
    "dsv4": "v4",
    "model1": "v4",
    "model1_fp8sparse": "v4",
    "bfloat16": "bf16",
    "auto": "the layout's name: it is never guessed",
}
"""Words of other libraries, and what they are called here."""

_FP4_BYTES = (288, 352, 368, 384, 416, 432)


def dtype_word(tensor: torch.Tensor) -> str:
    word = str(tensor.dtype).removeprefix("torch.")
    return f"{word} ({NO_FP4})" if "float4" in word else word


def layout_refusal(word: object) -> str | None:
    """Why a `kv_layout` word is not served, or None when it is one of ours."""
    if word in KV_LAYOUT_WORDS:
        return None
    known = f"known layouts: {', '.join(KV_LAYOUT_WORDS)}"
    if not isinstance(word, str):
        return f"kv_layout is a {type(word).__name__}: pass a string; {known}."
    lowered = word.lower().replace("-", "_")
    if "fp4" in lowered or "e2m1" in lowered:
        return f"kv_layout {word!r} is refused: {NO_FP4}; {known}."
    if lowered.startswith(("glm53", "glm5.3", "glm_53", "glm_5.3")):
        return f"kv_layout {word!r} is refused: {NO_GLM53}; {known}."
    if lowered in ("hnd", "nhd"):
        return f"kv_layout {word!r} is an order of axes: caches are [pages, page, 1, bytes] here; {known}."
    if lowered.removeprefix("fp8_") in ("v41", "dsv41", "dsv4_1", "v4.1", "ue8m0_g32"):
        return f"kv_layout {word!r} is ambiguous: {PLACEMENT}; say v41_footer or v41_inline."
    if lowered in _OTHER_NAMES:
        return f"kv_layout {word!r} is unknown; did you mean {_OTHER_NAMES[lowered]}? {known.capitalize()}."
    close = difflib.get_close_matches(lowered, KV_LAYOUT_WORDS, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}? {known.capitalize()}." if close else f"; {known}."
    return f"kv_layout {word!r} is unknown{hint}"


def width_refusal(word: str, d_qk: int) -> str:
    """Why a query width does not go with a known layout word."""
    widths = sorted({layout.d_qk for layout in LAYOUTS.values() if layout.kv_layout == word})
    note = f" ({NO_GLM53})" if word == "v32" and d_qk == 512 else ""
    return f"q has d_qk = {d_qk}: layout {word} has {' or '.join(map(str, widths))}{note}."


def bytes_hint(size: int) -> str:
    """What a number of bytes per token says about the cache that was passed."""
    if size in _FP4_BYTES:
        return f" ({size} is the size of an FP4 record; {NO_FP4})"
    if size == 528:
        return f" ({PLACEMENT}; {NO_GLM53})"
    names = [layout.kv_layout for layout in LAYOUTS.values() if layout.paged and layout.token_bytes == size]
    return f" ({size} is the size of {names[0]})" if names else ""

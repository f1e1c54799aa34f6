"""Sparse-MLA attention for prefill and decode, over one KV cache or two: the public entry.

    from generated.dispatch import sparse_mla, supports, explain, workspace_size, warmup

Importing this module imports no table and no kernel, makes no CUDA context and registers nothing. A call validates,
looks up an entry of the arch's table (see `select`), and launches; it never tunes, synchronises or reads a tensor on
the host.
"""

from __future__ import annotations

import torch

from . import launch
from .call import AttentionCall
from .explain import Explanation, explain, warmup, workspace_size
from .lookup import PACKAGE, serve, serving_of
from .select import Choice
from .table import Shape
from .target import NoTarget, target_of
from .validate import Unsupported, build_call, refusals, shape_of

__all__ = [
    "Explanation",
    "NoTarget",
    "Shape",
    "Unsupported",
    "explain",
    "sparse_mla",
    "supports",
    "warmup",
    "workspace_size",
]


def sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    kv_layout: str,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    lse_base: str = "e",
    scale_range: tuple[float, float] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """out[t, h] = sum_j exp(x_j) v_j / (sum_j exp(x_j) + exp(attn_sink[h])) over the keys j that `indices` selects.

    x_j = sm_scale * <q[t, h], k_j> and v_j = k_j[:512].

    q: [T, h, d_qk] or [b, s_q, h, d_qk] bf16, 1 to 128 heads, last dim contiguous.
    kv: the cache that `kv_layout` names. "bf16": [slots, d_qk] or [slots, 1, d_qk] bf16, d_qk 512 or 576, row stride
        >= d_qk. "v32" (d_qk 576, 656 bytes per token), "v4" (512, 584), "v41_footer" and "v41_inline" (512, 528):
        [pages, page, 1, bytes] or [pages, page, bytes] uint8, int8 or float8_e4m3fn, stride(1) == bytes, any page size
        and page stride.
    indices: [T, topk], [T, 1, topk] or [b, s_q, topk] int32, topk >= 1: slot = page number * page size + position in
        the page. A key counts when 0 <= slot < slots and its column is below clamp(length, 0, topk); duplicates count
        twice.
    sm_scale: a Python float. topk_length: int32 [T], or [b] for all positions of a batch row; None: the full width.
    attn_sink: fp32 [h], natural logarithm, not scaled; any value, +-inf included.
    extra_kv, extra_indices, extra_topk_length: a second cache of the same layout under the same softmax (v4, v41 only).
    out: [..., h, 512] bf16 and lse: [..., h] fp32, with q's leading dims; written in place when passed in.
    workspace: bytes for split keys, `workspace_size` of them, 16-byte aligned; else allocated (a graph's pool in a
    capture).
    scale_range: the caller's promise that every group scale of the caches lies in [low, high]. Inside [6e-5, 146] it allows
        kernels that keep the scaled latents, q and the parts of split keys in fp16, which are faster and more exact: q and
        the rope dims of a v4 row, which are values too, must be below 65504, then. Without it, or with a wider range,
        latents are bf16 and any scale is right. A broken promise gives infinities or lost digits.

    Returns out, then lse, then max_logits ([..., h] fp32) as asked for. lse is the logarithm to `lse_base` ("e" or
    "2") of sum_j exp(x_j), without the sink; max_logits is max_j x_j, always natural. A row without a valid key has
    out 0, lse -inf and max_logits -inf. Raises `Unsupported` (a ValueError with one sentence per reason) or
    `NoTarget`, before any launch.
    """
    call = build_call(
        q, kv, indices, sm_scale=sm_scale, kv_layout=kv_layout, topk_length=topk_length, attn_sink=attn_sink,
        extra_kv=extra_kv, extra_indices=extra_indices, extra_topk_length=extra_topk_length, out=out, lse=lse,
        return_lse=return_lse, return_max_logits=return_max_logits, lse_base=lse_base, scale_range=scale_range,
    )  # fmt: skip
    execute(call, workspace)
    if not return_lse and not return_max_logits:
        return call.out
    results = [call.out]
    if return_lse and call.lse is not None:
        results.append(call.lse)
    if call.max_logits is not None:
        results.append(call.max_logits)
    return tuple(results)


def supports(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    kv_layout: str,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    lse_base: str = "e",
    scale_range: tuple[float, float] | None = None,
) -> list[str]:
    """Why `sparse_mla` would refuse these arguments, one sentence per reason; empty when it would serve them."""
    reasons = refusals(
        q, kv, indices, sm_scale=sm_scale, kv_layout=kv_layout, topk_length=topk_length, attn_sink=attn_sink,
        extra_kv=extra_kv, extra_indices=extra_indices, extra_topk_length=extra_topk_length, out=out, lse=lse,
        lse_base=lse_base, scale_range=scale_range,
    )  # fmt: skip
    if reasons:
        return reasons
    try:
        target = target_of(q.device)
        shape = shape_of(q, kv, indices, kv_layout, extra_kv, extra_indices, scale_range, out, sm_scale)
        serving = serve(target.arch, target.device_class, shape, target.cluster)
        if workspace is not None:
            _check_workspace(workspace, serving.scratch, q.device)
    except Unsupported as error:
        return error.reasons
    except NoTarget as error:
        return [str(error)]
    return []


def execute(call: AttentionCall, workspace: torch.Tensor | None = None) -> None:
    """Look up and launch a validated call (the façades come in here, with their own `empty_lse`)."""
    device = call.q.device
    target = target_of(device)
    serving = serving_of(call, target)
    if workspace is not None:
        _check_workspace(workspace, serving.scratch, device)
    if call.tokens == 0:
        return
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(call, target.arch, serving.choice, workspace)
    else:
        _launch(call, target.arch, serving.choice, workspace)


def _launch(call: AttentionCall, arch: str, choice: Choice, workspace: torch.Tensor | None) -> None:
    entry, exact = choice.entry, choice.exact
    if (
        call.q.is_cuda
        and not launch.was_launched(call, entry, exact)
        and torch.cuda.is_current_stream_capturing()
        and not launch.is_compiled(call, arch, entry, exact, PACKAGE)
    ):
        raise RuntimeError(
            f"The kernel for {choice.shape} is not compiled yet, and a CUDA graph capture cannot compile: call "
            f"{PACKAGE}.dispatch.warmup([{choice.shape!r}]), or this function once, before the capture."
        )
    launch.run(call, arch, entry, exact, workspace, PACKAGE)


def _check_workspace(workspace: torch.Tensor, need: int, device: torch.device) -> None:
    reasons = []
    if workspace.device != device:
        reasons.append(f"workspace is on {workspace.device} and q on {device}: put every tensor on one device.")
    have = workspace.numel() * workspace.element_size()
    if have < need:
        reasons.append(f"workspace has {have} bytes and this call needs {need}: see workspace_size.")
    elif not workspace.is_contiguous():
        reasons.append("workspace is not contiguous: pass a contiguous tensor of bytes.")
    elif workspace.data_ptr() % 16:
        reasons.append("workspace does not start at a multiple of 16 bytes: pass one that does.")
    if reasons:
        raise Unsupported(reasons)

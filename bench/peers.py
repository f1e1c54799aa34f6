"""Peers that a benchmark puts beside ours when they can be imported. Never a dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kgen.check import Inputs

Call = Callable[[], object]


class FlashMLA:
    """The CUDA kernels of FlashMLA as packaged in `sgl-flash-mla` 1.0.0 (its `_C_legacy` library holds the SM90 ones).

    The package's own loader also loads a library for newer GPUs, which a Hopper machine cannot load; so the one library is
    loaded here and its operators are called with the arguments that the package's interface passes.
    """

    name = "FlashMLA CUDA (sgl-flash-mla 1.0.0)"

    def __init__(self, folder: str | None) -> None:
        root = Path(folder) / "flash_mla" if folder else _package_folder("flash_mla")
        torch.ops.load_library(str(next(root.glob("_C_legacy*.so"))))
        self._ops: Any = torch.ops.flash_mla_legacy

    def refusal(self, inputs: Inputs) -> str | None:
        """Why the peer cannot serve these inputs, or None."""
        if inputs.kv_layout not in ("bf16", "v32", "v4"):
            return f"no layout {inputs.kv_layout}"
        return None

    def bind(self, inputs: Inputs) -> Call:
        """A call without arguments. q is zero-padded to 64 or 128 heads outside the timing, as engines do."""
        if inputs.kv_layout == "bf16":
            return self._prefill(inputs)
        return self._decode(inputs)

    def _prefill(self, inputs: Inputs) -> Call:
        q, sink = _padded(inputs)
        kv = inputs.kv.view(inputs.kv.shape[0], 1, -1)
        indices = inputs.indices.view(inputs.indices.shape[0], 1, -1)

        def call() -> object:
            return self._ops.sparse_prefill_fwd(
                q, kv, indices, inputs.sm_scale, 512, sink, inputs.topk_length, False, True
            )

        return call

    def _decode(self, inputs: Inputs) -> Call:
        q, sink = _padded(inputs)
        if q.dim() == 3:
            q = q[:, None]
        schedule: list[Any] = [None, None]  # built by the first call and reused, as serving stacks do
        indices = _by_position(inputs.indices)
        extra_indices = None if inputs.extra_indices is None else _by_position(inputs.extra_indices)

        def call() -> object:
            out, lse, schedule[0], schedule[1] = self._ops.sparse_decode_fwd(
                q, inputs.kv, indices, inputs.topk_length, sink, schedule[0], schedule[1],
                inputs.extra_kv, extra_indices, inputs.extra_topk_length, 512, inputs.sm_scale, None,
            )  # fmt: skip
            return out, lse

        return call

    def output(self, result: Any, inputs: Inputs) -> torch.Tensor:
        out: torch.Tensor = result[0]
        return out.reshape(inputs.tokens, -1, 512)[:, : inputs.heads]


def padded_heads(heads: int) -> int:
    """Heads that FlashMLA's kernels run for a call of `heads`: they know 64 and 128."""
    return 64 if heads <= 64 else 128


def _padded(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q and sink with zeros up to a head count that the kernels know."""
    more = padded_heads(inputs.heads) - inputs.heads
    if not more:
        return inputs.q, inputs.attn_sink
    sink = None if inputs.attn_sink is None else torch.nn.functional.pad(inputs.attn_sink, (0, more))
    return torch.nn.functional.pad(inputs.q, (0, 0, 0, more)), sink


def _by_position(indices: torch.Tensor) -> torch.Tensor:
    """Indices as [batch, s_q, topk]."""
    return indices if indices.dim() == 3 else indices[:, None]


def _package_folder(name: str) -> Path:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"no package {name}")
    return Path(spec.origin).parent


def available(folder: str | None) -> tuple[list[FlashMLA], list[str]]:
    """Peers that import here, and a sentence for each that does not."""
    try:
        return [FlashMLA(folder)], []
    except (ImportError, OSError, StopIteration, RuntimeError) as error:
        return [], [f"{FlashMLA.name} is not here: {type(error).__name__}: {' '.join(str(error).split())[:160]}"]

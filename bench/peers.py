"""Peers that a benchmark puts beside ours when they can be imported. Never a dependency."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kgen.check import Inputs

Call = Callable[[], object]


class FlashMLA:
    """The CUDA kernels of FlashMLA as packaged in `sgl-flash-mla` 1.0.0 (its `_C_legacy` library holds the SM90 ones).

    The package's loader also loads a library for newer GPUs, which a Hopper machine cannot; so the library is loaded here and
    its operators are called through the package's own interface.
    """

    name = "FlashMLA CUDA (sgl-flash-mla 1.0.0)"

    def __init__(self, folder: str | None) -> None:
        if folder:
            sys.path.insert(0, str(Path(folder).resolve()))
        loader: Any = importlib.import_module("flash_mla._loader")
        root = Path(loader.__file__).parent
        library = next(root.glob("_C_legacy*.so"))
        torch.ops.load_library(str(library))
        self._interface: Any = importlib.import_module("flash_mla.flash_mla_interface")

    def refusal(self, inputs: Inputs) -> str | None:
        """Why the peer cannot serve these inputs, or None."""
        if inputs.kv_layout == "bf16" and inputs.heads % 64:
            return "prefill takes multiples of 64 heads only"
        if inputs.kv_layout not in ("bf16", "v32", "v4"):
            return f"no layout {inputs.kv_layout}"
        return None

    def bind(self, inputs: Inputs) -> Call:
        """A call without arguments. Decode pads q to 64 or 128 heads outside the timing, as engines do."""
        if inputs.kv_layout == "bf16":
            return self._prefill(inputs)
        return self._decode(inputs)

    def _prefill(self, inputs: Inputs) -> Call:
        kv = inputs.kv.view(inputs.kv.shape[0], 1, -1)
        indices = inputs.indices.view(inputs.indices.shape[0], 1, -1)

        def call() -> object:
            return self._interface.flash_mla_sparse_fwd(
                inputs.q, kv, indices, inputs.sm_scale, 512, inputs.attn_sink, inputs.topk_length, use_legacy=True
            )

        return call

    def _decode(self, inputs: Inputs) -> Call:
        heads = inputs.heads
        padded = 64 if heads <= 64 else 128
        q = inputs.q
        if padded != heads:
            q = torch.nn.functional.pad(q, (0, 0, 0, padded - heads))
        sink = inputs.attn_sink
        if sink is not None and padded != heads:
            sink = torch.nn.functional.pad(sink, (0, padded - heads))
        meta, _ = self._interface.get_mla_metadata()

        def call() -> object:
            return self._interface.flash_mla_with_kvcache(
                q[:, None], inputs.kv, None, None, 512, meta, None, inputs.sm_scale, False, True,
                inputs.indices[:, None], sink, inputs.extra_kv,
                None if inputs.extra_indices is None else inputs.extra_indices[:, None],
                inputs.topk_length, inputs.extra_topk_length, use_legacy=True,
            )  # fmt: skip

        return call

    def output(self, result: Any, inputs: Inputs) -> torch.Tensor:
        out: torch.Tensor = result[0]
        return out.reshape(out.shape[0], -1, 512)[:, : inputs.heads]


def available(folder: str | None) -> tuple[list[FlashMLA], list[str]]:
    """Peers that import here, and a sentence for each that does not."""
    try:
        return [FlashMLA(folder)], []
    except (ImportError, OSError, StopIteration, RuntimeError) as error:
        return [], [f"{FlashMLA.name} is not here: {type(error).__name__}: {' '.join(str(error).split())[:160]}"]

"""Dispatch table of sm121, Emitted by kgen 0.1.0.

Templates (hash): portable 07323bda6d0dcddd, combine 6c4c20e7d0525908,
cache_ops 19a17b444330d2aa, index_ops ffa2d885667e243d.

One entry per line: the shapes it was made for (ranges inclusive), the kernel module, its constants, and where
they come from: measured µs of the anchor's token count, or "static": ranked by a cost model, never timed.
"""

from dataclasses import replace

from ..table import Entry, Provenance, config

# patterns on the GPU's name; a leading ! excludes
DEVICE_CLASSES = {
    'gb10': ('GB10',),
}

# kernel constants and launch options

# where entries come from


def _e(layout, dual, heads, topk, extra_topk, page, extra_page, tokens, module, config, origin, **facts):
    return Entry(
        layout, dual, heads, topk, extra_topk, page, extra_page, tokens, module, config, replace(origin, **facts)
    )


ENTRIES: tuple[Entry, ...] = (
)

"""Timings survive an edit of a template's comments (`python -m kgen.keep_timings FAMILY OLD_TEMPLATE`).

Records are keyed by the hash of a template's text. Where a text changes in comments and docstrings alone, its kernels are the
same, and `configs/records/same_code.json` says so: the new text keeps the hash under which its code was timed. An entry is
made by comparing what both texts render to; it counts for that text alone, and the digest of the code that it holds is
compared with today's in the tests. Where the code of some layouts changed, the others may keep their timings: then the entry
names these layouts, and the text goes by its own hash. Both may happen, in any order: no timing is lost by an edit that left its
code alone. One entry, of sm90_ws, rests on equal machine code instead: of all forms that had been timed, by the Triton that they
were timed with (docs/kernels/sm90_ws.md, "Compiled").
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from kgen.config import config_root

__all__ = ["add_entry", "add_layouts", "code_digest", "known_as", "table_path", "timed_by"]


def code_digest(texts: list[str]) -> str:
    """First 16 hex digits of the SHA-256 of rendered modules without comments, docstrings and line numbers."""
    digest = hashlib.sha256()
    for text in texts:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                value = body[0].value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    del body[0]
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TEMPLATE_HASH":
                node.value = ast.Constant("")
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:16]


def table_path() -> Path:
    return Path(str(config_root())) / "records" / "same_code.json"


@functools.cache
def _table() -> dict[str, Any]:
    path = table_path()
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def known_as(family: str, text_hash: str) -> str:
    """The hash under which the code of this text was timed: its own, unless the table knows an earlier text of the same code."""
    entry = _table().get(family)
    if isinstance(entry, dict) and entry.get("text") == text_hash and isinstance(entry.get("timed_as"), str):
        return str(entry["timed_as"])
    return text_hash


def add_entry(family: str, text: str, timed_as: str, code: str) -> None:
    """`text` and `timed_as` are hashes of the two texts, `code` the digest that both have. Layouts that keep timings of still
    earlier texts beside `timed_as` go on keeping them."""
    entry: dict[str, Any] = {"text": text, "timed_as": timed_as, "code": code}
    kept = _kept(family, timed_as)
    _write({**_table(), family: entry | ({"layouts": kept} if kept else {})})


def timed_by(family: str, current: str, timed: str, layout: str) -> bool:
    """Whether a record with the hash `timed` is of the code that the template of hash `current` has for `layout`."""
    if timed == current:
        return bool(current)  # families that have no template any more go by an empty hash
    return timed in _hashes(_kept(family, current).get(layout))


def add_layouts(family: str, text: str, timed_as: str, codes: dict[str, str]) -> None:
    """`codes`: digest of the code that both texts have for each layout that keeps its timings, and those that it kept before."""
    before = _kept(family, timed_as)
    layouts = {}
    for layout, code in codes.items():
        hashes = [*_hashes(before.get(layout)), timed_as]
        layouts[layout] = {"timed_as": hashes if len(hashes) > 1 else timed_as, "code": code}
    _write({**_table(), family: {"text": text, "layouts": layouts}})


def _kept(family: str, known: str) -> dict[str, Any]:
    """What keeps timings of earlier texts, by layout, beside the text that goes by the hash `known`."""
    entry = _table().get(family)
    if not isinstance(entry, dict) or entry.get("timed_as", entry.get("text")) != known:
        return {}
    layouts = entry.get("layouts")
    return layouts if isinstance(layouts, dict) else {}


def _hashes(kept: Any) -> list[str]:
    """The earlier hashes of a layout: one, or a list of them."""
    found = kept.get("timed_as") if isinstance(kept, dict) else None
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, str)]


def _write(table: dict[str, Any]) -> None:
    table_path().write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")

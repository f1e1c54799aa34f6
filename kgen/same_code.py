"""Timings survive an edit of a template's comments: `python -m kgen.same_code FAMILY OLD_TEMPLATE`.

Records are keyed by the hash of a template's text. Where a text changes in comments and docstrings alone, its kernels are the
same, and `configs/records/same_code.json` says so: the new text keeps the hash under which its code was timed. An entry is
made here, by comparing what both texts render to, and holds a digest of that code; an entry whose digest or text is not
today's says nothing.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
from pathlib import Path

from kgen.config import config_root

__all__ = ["code_digest", "known_as", "main"]


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
def _table() -> dict[str, dict[str, str]]:
    path = table_path()
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def known_as(family: str, text_hash: str) -> str:
    """The hash under which the code of this text was timed: its own, unless the table knows an earlier text of the same code."""
    entry = _table().get(family)
    if isinstance(entry, dict) and entry.get("text") == text_hash and isinstance(entry.get("timed_as"), str):
        return entry["timed_as"]
    return text_hash


def main(arguments: list[str]) -> int:
    from kgen import render
    from kgen.runtime.families import FAMILIES

    if len(arguments) != 2 or arguments[0] not in FAMILIES or not Path(arguments[1]).is_file():
        print(
            "Usage: python -m kgen.same_code FAMILY OLD_TEMPLATE, with a file that holds the template's earlier text."
        )
        return 2
    family, old = arguments[0], Path(arguments[1])
    if family in render.CHUNK_FAMILIES:
        print(f"Family {family} has several texts per layout; only families with one can be compared.")
        return 2
    digests = {}
    for name, text in (("old", old.read_text()), ("new", render.template_path(family).read_text())):
        digests[name] = code_digest(
            [render.render_text(text, family, layout, "sm90") for layout in FAMILIES[family].layouts]
        )
    if digests["old"] != digests["new"]:
        print(f"The texts of {family} differ in code, not in comments alone: their timings are not each other's.")
        return 1
    entry = {
        "text": render.text_hash(family, render.template_path(family).read_bytes()),
        "timed_as": render.text_hash(family, old.read_bytes()),
        "code": digests["new"],
    }
    table = {**_table(), family: entry}
    table_path().write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"{family}: {entry['text']} is {entry['timed_as']} with other comments.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

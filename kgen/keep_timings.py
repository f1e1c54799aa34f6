"""`python -m kgen.keep_timings FAMILY OLD_TEMPLATE`: a template's comments changed, and its timings are to stay.

Both texts are rendered for every layout of the family; where the code is the same, `configs/records/same_code.json` says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jinja2

from kgen import render
from kgen.runtime.families import FAMILIES
from kgen.same_code import add_entry, code_digest, known_as

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in FAMILIES or not Path(arguments[1]).is_file():
        print(
            "Usage: python -m kgen.keep_timings FAMILY OLD_TEMPLATE, with a file that holds the template's earlier text."
        )
        return 2
    family, old = arguments[0], Path(arguments[1])
    if family in render.CHUNK_FAMILIES:
        print(f"Family {family} has several texts per layout; only families with one can be compared.")
        return 2
    try:
        texts = old.read_text(), render.template_path(family).read_text()
        digests = [
            code_digest([render.render_text(text, family, layout, "sm90") for layout in FAMILIES[family].layouts])
            for text in texts
        ]
    except (OSError, ValueError, SyntaxError, jinja2.TemplateError) as error:  # ValueError: no text, or with NUL bytes
        print(
            f"{old.name} is no template that can be compared ({type(error).__name__}): give the template's earlier text."
        )
        return 2
    if digests[0] != digests[1]:
        print(f"The texts of {family} differ in code, not in comments alone: their timings are not each other's.")
        return 1
    before, now = (render.text_hash(family, text.encode()) for text in texts)
    timed_as = known_as(family, before)  # whose comments may have changed before
    add_entry(family, now, timed_as, digests[1])
    print(f"{family}: {now} is {timed_as} with other comments.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

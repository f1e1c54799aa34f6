"""`python -m kgen.keep_timings FAMILY OLD_TEMPLATE`: a template's comments changed, or the code of some of its layouts, and
the other timings are to stay.

Both texts are rendered for every layout of the family; where the code is the same, `configs/records/same_code.json` says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jinja2

from kgen import render
from kgen.runtime.families import FAMILIES
from kgen.same_code import add_entry, add_layouts, code_digest, known_as

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
        rendered = [
            {layout: render.render_text(text, family, layout, "sm90") for layout in FAMILIES[family].layouts}
            for text in texts
        ]
        digests = [code_digest(list(by_layout.values())) for by_layout in rendered]
        codes = [{layout: code_digest([text]) for layout, text in by_layout.items()} for by_layout in rendered]
    except (OSError, ValueError, SyntaxError, jinja2.TemplateError) as error:  # ValueError: no text, or with NUL bytes
        print(
            f"{old.name} is no template that can be compared ({type(error).__name__}): give the template's earlier text."
        )
        return 2
    before, now = (render.text_hash(family, text.encode()) for text in texts)
    timed_as = known_as(family, before)  # whose comments may have changed before
    if digests[0] != digests[1]:
        same = {layout: code for layout, code in codes[1].items() if codes[0][layout] == code}
        if not same:
            print(f"The texts of {family} differ in code, not in comments alone: their timings are not each other's.")
            return 1
        add_layouts(family, now, timed_as, same)
        print(f"{family}: {now} is {timed_as} with other comments for {', '.join(same)}; other layouts differ in code.")
        return 0
    add_entry(family, now, timed_as, digests[1])
    print(f"{family}: {now} is {timed_as} with other comments.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

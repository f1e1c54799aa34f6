"""Cases of racecheck's plan by name, in this process: what `verify.racecheck` starts under the tool.

    PYTHONPATH=.:tests python tests/verify/racecheck_child.py [--as-shipped] SLUG ...

Prints a line per case as it ends. Exit code: 0 every case passed, 1 not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    begin = time.monotonic()
    slugs = [word for word in words if word != "--as-shipped"]
    if len(slugs) == len(words):
        from verify import arrivals

        arrivals.install()
    from kgen.verify import CaseResult, verify
    from kgen.verify_child import shipped_attention
    from verify.racecheck_plan import cases

    def tell(result: CaseResult) -> None:
        said = "passed" if result.ok else f"FAILED ({result.kind}: {result.sentence})"
        print(f"case {said} {result.slug} {result.seconds:.1f} s, at {time.monotonic() - begin:.1f} s", flush=True)

    known = {case.slug: case for case in cases()}
    print(f"ready at {time.monotonic() - begin:.1f} s", flush=True)
    summary = verify([known[slug] for slug in slugs], shipped_attention(), "cuda", on_result=tell)
    return 0 if len(summary.results) == len(slugs) and not summary.failures else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

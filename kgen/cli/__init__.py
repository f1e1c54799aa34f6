"""The command line: parses, calls, prints. Every command has `--json`; what goes wrong is a sentence and an exit code.

0 done · 1 a check found something (emit --check, verify, doctor) or nothing could be tuned · 2 bad arguments, files or
configuration · 3 the machine lacks what the command needs (a GPU, a package) · 130 interrupted
"""

from kgen.cli import emit, explore, keep, tune, verify  # noqa: F401, I001 - importing registers the commands
from kgen.cli.common import app

__all__ = ["app"]

"""`python -m kgen`: the same as the `kgen` command."""

from kgen.cli import app

if __name__ == "__main__":
    app()

"""Kernel tests of this folder run in Triton's interpreter, which is chosen when triton is first imported."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail(
            "These kernels run in Triton's interpreter: start the tests as TRITON_INTERPRET=1 pytest tests/ops."
        )

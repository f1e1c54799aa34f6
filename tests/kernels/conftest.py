"""Kernels run in Triton's interpreter: `TRITON_INTERPRET=1` must be set before python starts."""

from __future__ import annotations

import os

import pytest
import torch

STARTED_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def interpreted() -> None:
    if not STARTED_INTERPRETED:
        pytest.fail(
            "These tests run kernels on the CPU: start them with TRITON_INTERPRET=1 pytest tests/kernels.", False
        )

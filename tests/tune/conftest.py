"""Every test runs without the variables that forbid recording."""

from __future__ import annotations

import pytest

from kgen import environment


@pytest.fixture(autouse=True)
def _no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*environment._FORBIDDEN, *environment._CHANGES_CODE, "RANK"]:
        monkeypatch.delenv(name, raising=False)

"""Environments hold facts about versions and the card, and say when nothing may be recorded."""

from __future__ import annotations

import dataclasses
import getpass
import socket

import pytest

import kgen
from kgen import environment
from kgen.environment import current_environment, overrides, recording_refusals, require_recordable
from kgen.errors import RecordError


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_card", lambda cc: (environment.NO_GPU, cc, 0))
    here = current_environment("sm121", "gb10")
    assert (here.gpu, here.cc, here.sms, here.driver) == ("none", 121, 0, "none")
    assert here.triton != "missing" and here.python.count(".") == 2 and here.kgen == kgen.__version__


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_card", lambda cc: ("NVIDIA H200", 90, 132))
    monkeypatch.setattr(environment, "_driver", lambda: "580.1")
    here = current_environment("sm90", "h200")
    assert (here.gpu, here.cc, here.sms, here.driver) == ("NVIDIA H200", 90, 132, "580.1")
    with pytest.raises(RecordError, match="not that of sm120: tune for sm90, or use --static"):
        current_environment("sm120", "rtx")
    assert current_environment("sm120", "static").gpu == "none"  # static ranking does not look at the card
    with pytest.raises(RecordError, match="no arch name"):
        current_environment("hopper", "h200")


def test_no_host_user_or_path() -> None:
    words = [str(value) for value in dataclasses.astuple(current_environment("sm90", "static"))]
    assert not any("/" in word or socket.gethostname() in word or word == getpass.getuser() for word in words)


def test_overrides_are_sentences_without_values() -> None:
    assert overrides({}) == [] and overrides({"TRITON_INTERPRET": "0", "TRITON_DEBUG": ""}) == []
    found = overrides({"TRITON_PTXAS_PATH": "/opt/secret/ptxas", "TRITON_ALWAYS_COMPILE": "1"})
    assert len(found) == 2 and all(text.endswith(".") and "secret" not in text for text in found)
    assert len(overrides({"TRITON_DEFAULT_FP_FUSION": "0"})) == 1
    assert len(overrides({"TRITON_DISABLE_LINE_INFO": "1"})) == 1


def test_what_forbids_recording() -> None:
    require_recordable({"TRITON_DISABLE_LINE_INFO": "1", "RANK": "0"})
    with pytest.raises(RecordError, match="TRITON_OVERRIDE_ARCH is set, so .*: unset it"):
        require_recordable({"TRITON_OVERRIDE_ARCH": "sm90"})
    assert len(recording_refusals({"TRITON_OVERRIDE_ARCH": "sm90", "TRITON_INTERPRET": "1", "RANK": "2"})) == 3

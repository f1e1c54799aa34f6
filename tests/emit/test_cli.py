"""The command line: exit codes and sentences, never a traceback, JSON that parses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kgen.cli import app

RUNNER = CliRunner()


def run(*args: str) -> tuple[int, str]:
    result = RUNNER.invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("tune", "--arch", "sm9"), 2, "did you mean 'sm90'"),
        (("tune", "--arch", "sm120", "--model", "dsv5", "--dry-run"), 2, "did you mean"),
        (("tune", "--arch", "sm120", "--spec", "sm120-decode-nothing"), 2, "No spec of"),
        (("tune", "--arch", "sm120", "--model", "dsv4", "--trials", "2"), 3, "--static"),
        (("tune", "--arch", "sm120", "--budget", "soon"), 2, "90s, 10m or 1.5h"),
        (("tune", "--arch", "sm120", "--shard", "4/4"), 2, "from 0 to N-1"),
        (("tune", "--arch", "sm120", "--devices", "a", "--trials", "1"), 2, "list of device numbers"),
        (("tune", "--arch", "sm90", "--layout", "v33", "--heads", "8", "--topk", "4", "--tokens", "1"), 2, "did you mean"),
        (("tune", "--arch", "sm90", "--layout", "v32", "--heads", "8", "--topk", "4", "--tokens", "1"), 2, "is paged"),
        (("records", "show", "no-such-spec"), 2, "No record is of spec"),
        (("records", "merge", "absent.jsonl", "--into", "x.jsonl"), 2, "no record file"),
        (("emit", "--package", "a-b", "--check"), 2, "no Python package name"),
        (("explain", "--arch", "sm90", "--layout", "v32", "--heads", "8", "--topk", "4", "--tokens", "1"), 2, "is paged"),
    ],
)  # fmt: skip
def test_mistakes_are_sentences(args: tuple[str, ...], code: int, words: str) -> None:
    found, output = run(*args)
    assert (found, words in output) == (code, True), output


def test_mistakes_are_json_on_request() -> None:
    code, output = run("tune", "--arch", "sm120", "--budget", "soon", "--json")
    assert code == 2 and json.loads(output)["exit_code"] == 2


def test_list_and_explain_agree_with_the_models() -> None:
    code, output = run("list", "--arch", "sm120", "--model", "dsv4", "--all", "--json")
    assert code == 0 and len(json.loads(output)["specs"]) > 200
    shape = [
        "--layout",
        "v4",
        "--heads",
        "64",
        "--topk",
        "128",
        "--extra-topk",
        "512",
        "--page",
        "64",
        "--extra-page",
        "64",
    ]
    code, output = run("explain", "--arch", "sm120", *shape, "--tokens", "16", "--json")
    found = json.loads(output)
    assert code == 0 and found["exact"] is True and found["entry"]["provenance"]["source"] == "static"
    assert found["runner_up"] is not None and found["runner_up"] != found["entry"]


@pytest.mark.parametrize(
    ("more", "family", "latent"),
    [((), "sm90", "bf16"), (("--fp16",), "sm90", "fp16"), (("--fp16", "--unaligned"), "portable", None)],
)
def test_explain_asks_for_each_tier(more: tuple[str, ...], family: str, latent: str | None) -> None:
    shape = ["--layout", "v32", "--heads", "64", "--topk", "2048", "--page", "64", "--tokens", "64", "--device", "h200"]
    code, output = run("explain", "--arch", "sm90", *shape, *more, "--json")
    entry = json.loads(output)["entry"]
    assert code == 0 and entry["module"].startswith(f"{family}_") and "_v32" in entry["module"]
    assert dict(entry["config"]["tunables"]).get("latent") == latent


def test_damaged_records_are_named_and_the_rest_is_used(tmp_path: Path) -> None:
    """A damaged line is set aside with its number; the good lines count; the exit code says that something was found."""
    source = Path(__file__).parents[2] / "configs" / "records" / "h200.jsonl"
    lines = source.read_text().splitlines()[:3]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join([lines[0], lines[1][:200], "\x00junk", lines[2]]) + "\n")
    code, output = run("records", "list", "--file", str(path), "--json")
    found = json.loads(output)["files"][0]
    assert code == 1 and found["records"] == 2 and [aside["line"] for aside in found["aside"]] == [2, 3]


def test_emit_writes_elsewhere_and_checks(tmp_path: Path) -> None:
    out = str(tmp_path / "kernels")
    assert run("emit", "--out", out, "--package", "kernels")[0] == 0
    assert run("emit", "--out", out, "--package", "kernels", "--check")[0] == 0
    (tmp_path / "kernels" / "dispatch.py").write_text("")
    code, output = run("emit", "--out", out, "--package", "kernels", "--check")
    assert code == 1 and "dispatch.py differs" in output

"""Timings survive edits of comments, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kgen import keep_timings, render, same_code
from kgen.runtime.families import FAMILIES


def texts(family: str, text: str) -> list[str]:
    return [render.render_text(text, family, layout, "sm90") for layout in FAMILIES[family].layouts]


def test_every_entry_holds_the_code_of_todays_template() -> None:
    """An entry whose text is no longer the template's is dead; one of today's text must have its code."""
    for family, entry in json.loads(same_code.table_path().read_text()).items():
        text = render.template_path(family).read_text()
        assert entry["text"] == render.text_hash(family, text.encode()), f"{family}: remove the entry"
        for layout, kept in entry.get("layouts", {}).items():
            assert kept["code"] == same_code.code_digest([render.render_text(text, family, layout, "sm90")])
            assert entry["text"] not in same_code._hashes(kept)
        if "timed_as" not in entry:
            assert render.template_hash(family) == entry["text"] and entry["layouts"]
            continue
        assert entry["code"] == same_code.code_digest(texts(family, text))
        assert render.template_hash(family) == entry["timed_as"] != entry["text"]


@pytest.mark.parametrize("family", ["sm90_ws", "sm90_few"])
def test_comments_do_not_change_the_code_and_a_number_does(family: str) -> None:
    text = render.template_path(family).read_text()
    digest = same_code.code_digest(texts(family, text))
    commented = text.replace("import triton\n", "import triton  # the compiler\n", 1).replace(
        '"""Sparse', '"""A sparse', 1
    )
    assert commented != text
    assert same_code.code_digest(texts(family, commented)) == digest
    changed = text.replace("1.4426950408889634", "1.4426950408889635", 1)
    assert changed != text
    assert same_code.code_digest(texts(family, changed)) != digest


def test_an_entry_is_refused_for_other_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = same_code.table_path().read_text()
    other = tmp_path / "old.jinja"
    other.write_text(render.template_path("sm90_few").read_text().replace("0.6931471805599453", "0.69", 1))
    assert keep_timings.main(["sm90_few", str(other)]) == 1
    assert "differ in code" in capsys.readouterr().out
    assert keep_timings.main(["sm90_few", str(tmp_path / "none")]) == 2
    assert same_code.table_path().read_text() == before


@pytest.mark.parametrize("held", [b"\xff\xfe", b"{{ unclosed", b"def broken(:\n", b"{{ nowhere }}", b"x = 1\0"])
def test_a_file_that_is_no_template_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: bytes
) -> None:
    before = same_code.table_path().read_text()
    (tmp_path / "old.jinja").write_bytes(held)
    assert keep_timings.main(["sm90_few", str(tmp_path / "old.jinja")]) == 2
    assert "no template that can be compared" in capsys.readouterr().out
    assert same_code.table_path().read_text() == before


def test_another_text_keeps_its_own_hash() -> None:
    assert same_code.known_as("sm90_few", "0123456789abcdef") == "0123456789abcdef"
    assert same_code.known_as("portable", "0123456789abcdef") == "0123456789abcdef"


def test_comments_may_change_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timings stay those of the text that was timed."""
    table, text = tmp_path / "same_code.json", render.template_path("sm90_few").read_text()
    monkeypatch.setattr(same_code, "table_path", lambda: table)
    second = text.replace("import triton\n", "import triton  # the compiler\n", 1)
    third = second.replace("# the compiler", "# the compiler and its language", 1)
    assert len({text, second, third}) == 3
    try:
        for old, new in ((text, second), (second, third)):
            (tmp_path / "old").write_text(old)
            (tmp_path / "new").write_text(new)
            monkeypatch.setattr(render, "template_path", lambda family: tmp_path / "new")
            same_code._table.cache_clear()
            assert keep_timings.main(["sm90_few", str(tmp_path / "old")]) == 0
        entry = json.loads(table.read_text())["sm90_few"]
    finally:
        same_code._table.cache_clear()
    assert entry["timed_as"] == render.text_hash("sm90_few", text.encode())
    assert entry["text"] == render.text_hash("sm90_few", third.encode())


def test_layouts_whose_code_did_not_change_keep_their_timings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of the earlier text count for these layouts alone, and only beside the text that was compared."""
    table, text = tmp_path / "same_code.json", render.template_path("sm90_few").read_text()
    monkeypatch.setattr(same_code, "table_path", lambda: table)
    changed = text.replace('FAMILY = "sm90_few"', 'FAMILY = "sm90_few"\n{% if fp8 %}\nOTHER = 1\n{% endif %}', 1)
    (tmp_path / "old").write_text(text)
    (tmp_path / "new").write_text(changed)
    monkeypatch.setattr(render, "template_path", lambda family: tmp_path / "new")
    old, new = (render.text_hash("sm90_few", some.encode()) for some in (text, changed))
    try:
        same_code._table.cache_clear()
        assert keep_timings.main(["sm90_few", str(tmp_path / "old")]) == 0
        assert "for bf16_d576, bf16_d512" in capsys.readouterr().out
        same_code._table.cache_clear()
        assert {type(x["timed_as"]) for x in json.loads(table.read_text())["sm90_few"]["layouts"].values()} == {str}
        kept = {x for x in FAMILIES["sm90_few"].layouts if same_code.timed_by("sm90_few", new, old, x)}
        assert kept == {"bf16_d576", "bf16_d512"}
        assert same_code.known_as("sm90_few", new) == new
        assert all(same_code.timed_by("sm90_few", new, new, layout) for layout in FAMILIES["sm90_few"].layouts)
        assert not same_code.timed_by("sm90_few", "f" * 16, old, "bf16_d576")
        assert not same_code.timed_by("sm90_few", new, "f" * 16, "bf16_d576")
        assert not same_code.timed_by("sm90_ws", new, old, "bf16_d576")
    finally:
        same_code._table.cache_clear()


@pytest.mark.parametrize(
    "held",
    ["", "[]", "NaN", "[" * 100_000, '{"sm90_few": []}', '{"sm90_few": {"text": 3, "timed_as": 4}}',
     '{"sm90_few": {"text": "TEXT", "timed_as": 4, "layouts": ["v32"]}}',
     '{"sm90_few": {"text": "TEXT", "layouts": {"v32": "OLD"}}}',
     '{"sm90_few": {"text": "TEXT", "layouts": {"v32": {"timed_as": {"OLD": 1}}}}, "none": {"text": ""}}'],
)  # fmt: skip
def test_an_odd_table_keeps_nothing(held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "same_code.json"
    table.write_text(held)
    monkeypatch.setattr(same_code, "table_path", lambda: table)
    try:
        same_code._table.cache_clear()
        assert same_code.known_as("sm90_few", "TEXT") == "TEXT"
        assert not same_code.timed_by("sm90_few", "TEXT", "OLD", "v32")
    finally:
        same_code._table.cache_clear()


def test_a_family_without_a_template_has_no_timings() -> None:
    assert not same_code.timed_by("gone", "", "", "v32")


def test_no_timing_is_lost_by_later_edits_that_leave_its_code_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of fp8 changes, then a comment, then the code of fp8, then a comment twice: bf16 keeps all its timings, fp8
    those since its code changed."""
    table, text = tmp_path / "same_code.json", render.template_path("sm90_few").read_text()
    monkeypatch.setattr(same_code, "table_path", lambda: table)
    other = 'FAMILY = "sm90_few"\n{{% if fp8 %}}\nOTHER = {}\n{{% endif %}}'

    def made(number: int, comment: str) -> str:
        return text.replace('FAMILY = "sm90_few"', other.format(number), 1).replace("import triton\n", comment, 1)

    words = [f"import triton  # {word}\n" for word in ("the compiler", "a compiler", "any compiler")]
    steps = [
        text,
        made(1, "import triton\n"),
        made(1, words[0]),
        made(2, words[0]),
        made(2, words[1]),
        made(2, words[2]),
    ]
    hashes = [render.text_hash("sm90_few", step.encode()) for step in steps]
    assert len(set(hashes)) == len(steps)
    # what new records go by beside each text: its own hash, or that of the text whose comments changed
    goes_by = [hashes[0], hashes[1], hashes[1], hashes[3], hashes[3], hashes[3]]
    try:
        for at in range(1, len(steps)):
            (tmp_path / "old").write_text(steps[at - 1])
            (tmp_path / "new").write_text(steps[at])
            monkeypatch.setattr(render, "template_path", lambda family: tmp_path / "new")
            same_code._table.cache_clear()
            assert keep_timings.main(["sm90_few", str(tmp_path / "old")]) == 0
            same_code._table.cache_clear()
            current = same_code.known_as("sm90_few", hashes[at])
            assert current == goes_by[at]
            for layout, since in (("bf16_d576", 0), ("v32", 1 if at < 3 else 3)):
                counted = {h for h in hashes if same_code.timed_by("sm90_few", current, h, layout)}
                assert counted == set(goes_by[since : at + 1]), (at, layout)
    finally:
        same_code._table.cache_clear()

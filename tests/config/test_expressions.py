"""The expression language: what it computes, and everything that it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.errors import ConfigError
from kgen.expressions import parse_expression

ENV = {"heads": 24, "block_h": 16, "layout": "v32", "fp8": True, "maxnreg": None}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-(-heads // block_h)", 2),
        ("heads % block_h + 2 * 3 - 1", 13),
        ("heads / block_h", 1.5),
        ("16 <= heads < 32", True),
        ("16 <= heads < 20", False),
        ('layout in ("v32", "v4")', True),
        ('layout not in ["v4"]', True),
        ("maxnreg is None or maxnreg * 32 <= 65536", True),
        ("maxnreg is not None", False),
        ("not fp8", False),
        ("fp8 and heads > 1", True),
        ("heads if fp8 else block_h", 24),
        ("+heads == 24", True),
    ],
)
def test_values(text: str, value: object) -> None:
    result = parse_expression(text, ENV)(ENV)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "heads.bit_length()",
        "layout.upper",
        "__import__('os')",
        "min(heads, 3)",
        "().__class__",
        "__builtins__",
        "_hidden",
        "layout[0]",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "f'{heads}'",
        "heads ** heads",
        "1 << heads",
        "heads | 1",
        "~heads",
        "b'x' == layout",
        "1j",
        "...",
        "(heads := 3)",
        "{1: 2}",
        "{1, 2}",
        "(1, 2)",
        "layout in layout",
        "heads; block_h",
        "import os",
        "",
        "heads >",
        "head > 1",
        "await heads",
        "1or heads",
        "*heads",
        "\x00",
        "(" * 300,
        "1 + " * 150 + "1",
        "9" * 5000,
    ],
)
def test_refusals(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_expression(text, ENV)


def test_near_miss_and_names() -> None:
    with pytest.raises(ConfigError, match="unknown name 'block_hh' .did you mean 'block_h'"):
        parse_expression("block_hh > 1", ENV)
    assert parse_expression("heads + block_h > heads", ENV).names == {"heads", "block_h"}


@pytest.mark.parametrize(
    "text",
    [
        "layout * 1000000",
        "layout < 3",
        "maxnreg + 1",
        "heads // (block_h - 16)",
        "heads and fp8",
        "not heads",
        "fp8 + 1",
        "-layout",
    ],
)
def test_wrong_types_are_sentences(text: str) -> None:
    with pytest.raises(ConfigError, match="has no value here"):
        parse_expression(text, ENV)(ENV)


@settings(max_examples=300, deadline=None)
@given(st.text("abh_ek()[]{}.,:+-*/%<>=!'\"0129 \\\nnotindi", max_size=40))
def test_any_text_gives_a_value_or_a_sentence(text: str) -> None:
    try:
        parse_expression(text, ENV)(ENV)
    except ConfigError:
        pass

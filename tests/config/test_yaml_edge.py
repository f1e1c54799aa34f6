"""The YAML edge: whatever a file holds, the answer is a value or one ConfigError sentence with the place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kgen import config
from kgen.archs import read_arch
from kgen.config import parse_yaml, read_yaml
from kgen.errors import ConfigError
from kgen.models import read_model
from kgen.space import read_space

READERS = (read_arch, read_model, read_space)


def refusal(text: str) -> str:
    """The sentence with which a document {a: int, b: text} is refused."""
    with pytest.raises(ConfigError) as caught:
        fields = parse_yaml(text, "f.yaml").fields(("alpha", "beta"), ("gamma",))
        fields["alpha"].integer(1, 10)
        fields["beta"].text()
        if "gamma" in fields:
            fields["gamma"].integers(1, 9)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("alpha: 1\nbeta: x\ngama: [1]\n", "f.yaml:3: gama", "did you mean 'gamma'"),
        ("alpa: 1\nbeta: x\n", "f.yaml:1: alpa", "did you mean 'alpha'"),
        ("alpha: 1\nbeta: x\nzzz: 1\n", "f.yaml:3: zzz", "known: alpha, beta, gamma"),
        ("alpha: 1\n", "f.yaml:1: the document", "the key 'beta' is missing"),
        ("alpha: 1\nbeta: x\nalpha: 2\n", "f.yaml:3: alpha", "given twice, first on line 1"),
        ("alpha: one\nbeta: x\n", "f.yaml:1: alpha", "whole number, found 'one'"),
        ("alpha: 1.0\nbeta: x\n", "f.yaml:1: alpha", "whole number, found '1.0'"),
        ("alpha: true\nbeta: x\n", "f.yaml:1: alpha", "whole number"),
        ("alpha: 11\nbeta: x\n", "f.yaml:1: alpha", "from 1 to 10, found 11"),
        ("alpha: [1]\nbeta: x\n", "f.yaml:1: alpha", "found a list"),
        ("alpha: 1\nbeta: yes\n", "f.yaml:2: beta", "expected text"),
        ("alpha: 1\nbeta:\n", "f.yaml:2: beta", "expected text, found nothing"),
        ("alpha: 1\nbeta: 2026-11-30\n", "f.yaml:2: beta", "found date"),
        ("alpha: 1\nbeta: 2026-13-45\n", "f.yaml:2: beta", "cannot be read"),
        ("alpha: !!python/object:os.system x\nbeta: x\n", "f.yaml:1: alpha", "cannot be read"),
        ("alpha: 1\nbeta: x\ngamma: []\n", "f.yaml:3: gamma", "empty list"),
        ("alpha: 1\nbeta: x\ngamma: [3, 4, 3]\n", "f.yaml:3: gamma[2]", "3 is listed twice"),
        ("alpha: 1\nbeta: x\ngamma: 3\n", "f.yaml:3: gamma", "expected a list"),
        ("[alpha, beta]\n", "f.yaml:1: the document", "found a list"),
        ("just words\n", "f.yaml:1: the document", "expected a mapping"),
        ("? [1, 2]\n: x\n", "f.yaml:1: the document", "a key must be a single name"),
        ("alpha: 1\n  beta: x\n", "f.yaml:2:7", "not valid YAML"),
        ("alpha: [1\nbeta: x\n", "f.yaml:2", "not valid YAML"),
        ("alpha: 1\n\tbeta: x\n", "f.yaml:2", "not valid YAML"),
        ("alpha: *nowhere\n", "f.yaml:1", "not valid YAML"),
        ("alpha: 1\n---\nbeta: x\n", "f.yaml:2", "not valid YAML"),
        ("alpha: 1\nbeta: \x01\n", "f.yaml", "unprintable character"),
        ("&a [*a]\n", "f.yaml:1", "found a list"),
        ("[" * 5000, "f.yaml", "not valid YAML"),
        ("# only a comment\n", "f.yaml", "no YAML value"),
    ],
)
def test_refusal_names_place_and_reason(text: str, place: str, words: str) -> None:
    sentence = refusal(text)
    assert sentence.startswith(place), sentence
    assert words in sentence


def test_number_explains_yaml_exponents() -> None:
    with pytest.raises(ConfigError, match="1.0e"):
        parse_yaml("a: 1e3", "f").fields(("a",))["a"].number(0, 1e4)
    assert parse_yaml("a: 1.0e+3", "f").fields(("a",))["a"].number(0, 1e4) == 1000.0
    with pytest.raises(ConfigError, match="from 0 to 1"):
        parse_yaml("a: .nan", "f").fields(("a",))["a"].number(0, 1)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\n\n",
        b"\x00\x01\x02\xff\xfe binary",
        b"\x7fELF" + bytes(range(256)),
        "\ufeffname: sm90\n".encode(),
        "name: x\n".encode("utf-16"),
        b"- a\n- b\n",
        b"name: [1, 2\n",
        b"name: sm90\nname: sm90\n",
        b"{}",
        b"null",
        b"42",
    ],
)
def test_junk_files_never_give_a_traceback(tmp_path: Path, reader, junk: bytes) -> None:
    path = tmp_path / "archs" / "sm90.yaml"
    path.parent.mkdir()
    path.write_bytes(junk)
    with pytest.raises(ConfigError) as caught:
        reader(path)
    assert "sm90.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=80), st.text("ab:-[]{}&*!|>'\"#%@ \n\t0.", max_size=60).map(str.encode)))
def test_random_bytes_never_give_a_traceback(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "portable.yaml"
    path.write_bytes(data)
    for reader in READERS:
        with pytest.raises(ConfigError):
            reader(path)


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes("\ufeffa: 1\n".encode())
    assert read_yaml(path).fields(("a",))["a"].integer(0, 2) == 1


def test_unreadable_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (config.MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_yaml(big)


def test_roots_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (config.config_root() / "archs" / "sm90.yaml").is_file()
    assert config.template_root().name == "templates"
    for variable, root in (("KGEN_CONFIGS", config.config_root), ("KGEN_TEMPLATES", config.template_root)):
        monkeypatch.setenv(variable, str(tmp_path))
        assert root() == tmp_path
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
        with pytest.raises(ConfigError, match=variable):
            root()


def test_roots_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In site-packages the data lie inside the package, and a foreign `configs` beside it is not ours."""
    for variable in ("KGEN_CONFIGS", "KGEN_TEMPLATES"):
        monkeypatch.delenv(variable, raising=False)
    package = tmp_path / "kgen"
    (package / "_data" / "configs").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(config, "_PACKAGE", package)
    assert config.config_root() == package / "_data" / "configs"
    with pytest.raises(ConfigError, match="set KGEN_TEMPLATES"):
        config.template_root()


ODD = [None, True, -1, 0, 10**400, 1.5, float("inf"), "", "x", "\x85", [], [[]], {}, {"a": 1}, {1: 2}, b"\x00"]


def places(value, path=()):
    """Paths of every value in a document."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize(
    ("folder", "name", "reader"),
    [("archs", "sm90", read_arch), ("models", "dsv41", read_model), ("spaces", "portable", read_space)],
)
def test_any_value_replaced_by_an_odd_one_loads_or_is_refused(tmp_path: Path, folder: str, name: str, reader) -> None:
    """Each value of a shipped file in turn, by one odd value of a fixed random choice: never a traceback."""
    source = config.config_root()
    (tmp_path / "archs").mkdir()
    (tmp_path / "archs" / "sm100.yaml").write_bytes((source / "archs" / "sm100.yaml").read_bytes())
    path = tmp_path / folder / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    document = yaml.safe_load((source / folder / f"{name}.yaml").read_text())
    rng = random.Random(54)
    refused = 0
    chosen = rng.sample(list(places(document)), 90)
    for place in chosen:
        path.write_text(yaml.safe_dump(replaced(document, place, rng.choice(ODD)), sort_keys=False))
        try:
            reader(path)
        except ConfigError as error:
            assert path.name in str(error)
            refused += 1
    assert refused > 60

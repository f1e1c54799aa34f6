"""YAML in, checked values out: the edge at which dicts stop.

`read_yaml` gives a `Node`: a YAML value that knows its file, line and path, and that hands out checked Python values.
Whatever a file holds, the only exception that leaves this module is a `ConfigError` of one sentence with file, line,
path and, for a misspelt name, the nearest known one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from kgen.errors import ConfigError
from kgen.types import Scalar

MAX_BYTES = 4 << 20
"""A configuration file larger than this is not one (the largest shipped is a few kB)."""

_PACKAGE = Path(__file__).resolve().parent


def config_root() -> Path:
    """The folder that holds `archs/`, `models/`, `spaces/` and `records/`.

    `$KGEN_CONFIGS` if set, else `configs/` of the checkout, else the copy in the wheel (`kgen/_data/configs`).
    """
    return _root("KGEN_CONFIGS", "configs")


def template_root() -> Path:
    """The folder of the Jinja templates: `$KGEN_TEMPLATES`, else that of the checkout, else `kgen/_data/templates`."""
    return _root("KGEN_TEMPLATES", "templates")


def _root(variable: str, folder: str) -> Path:
    override = os.environ.get(variable)
    if override:
        path = Path(override).expanduser()
        if not path.is_dir():
            raise ConfigError(
                f"{variable} names {override!r}, which is not a folder; unset it or point it at a copy of {folder}/."
            )
        return path
    # In site-packages the parent may hold a foreign `configs`: only a folder with all of ours beside it is a checkout.
    checkout = _PACKAGE.parent
    is_checkout = (checkout / "configs" / "archs").is_dir() and (checkout / "templates").is_dir()
    places = ([checkout / folder] if is_checkout else []) + [_PACKAGE / "_data" / folder]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"No {folder}/ folder beside or inside the kgen package; set {variable} to one.")


def yaml_files(folder: Path) -> dict[str, Path]:
    """The YAML files of a folder by stem, sorted; a missing folder is an error, an empty one is not."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; a configuration folder has archs/, models/ and spaces/.")
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_yaml(folder: Path, name: str, what: str) -> Path:
    """The file of a named thing (`what` is "arch", "model", …), or a sentence with the nearest name."""
    files = yaml_files(folder)
    if name not in files:
        raise ConfigError(
            f"Unknown {what} {name!r}{suggestion(name, files)}; known: {', '.join(files) or 'none'} (in {folder})."
        )
    return files[name]


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known name is near."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


@dataclass(frozen=True)
class Node:
    """A YAML value with its place. Every accessor checks, and refuses with file, line, path and what it wants."""

    file: str
    path: str  # e.g. `device_classes.h100.sms`; empty for the document
    raw: yaml.Node

    @property
    def line(self) -> int:
        return int(self.raw.start_mark.line) + 1

    def fail(self, message: str) -> NoReturn:
        """Raise a ConfigError about this value; `message` continues the sentence after the place."""
        raise ConfigError(f"{self.file}:{self.line}: {self.path or 'the document'}: {message}")

    def scalar(self) -> Scalar:
        """A number, text, boolean or null; a date, a binary or a tagged object is refused."""
        if not isinstance(self.raw, yaml.ScalarNode):
            self.fail(f"expected a single value, found {self.kind}.")
        try:
            value = yaml.constructor.SafeConstructor().construct_object(self.raw)
        except (yaml.YAMLError, ValueError, OverflowError, KeyError, TypeError):
            self.fail(f"the value {_short(self.raw.value)} with tag {self.raw.tag!r} cannot be read.")
        if value is not None and not isinstance(value, (bool, int, float, str)):
            self.fail(
                f"expected a number, text, true, false or null, found {type(value).__name__} {_short(self.raw.value)}."
            )
        return value

    @property
    def kind(self) -> str:
        if isinstance(self.raw, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.raw, yaml.SequenceNode):
            return "a list"
        return f"{_short(self.raw.value)}" if self.raw.value != "" else "nothing"

    @property
    def is_null(self) -> bool:
        return isinstance(self.raw, yaml.ScalarNode) and self.raw.tag == "tag:yaml.org,2002:null"

    def text(self) -> str:
        value = self.scalar()
        if not isinstance(value, str) or not value.strip():
            self.fail(
                f"expected text, found {self.kind}; put quotes around a text that reads as a number or a boolean."
            )
        return value.strip()

    def integer(self, low: int, high: int) -> int:
        """A whole number in [low, high]; true, 3.0 and "3" are not whole numbers here."""
        value = self.scalar()
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"expected a whole number, found {self.kind}.")
        if not low <= value <= high:
            self.fail(f"expected a whole number from {low} to {high}, found {value}.")
        return value

    def number(self, low: float, high: float) -> float:
        """A finite number in [low, high]."""
        value = self.scalar()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(
                f"expected a number, found {self.kind} (YAML reads an exponent only with a sign and a point: 1.0e+3)."
            )
        if not low <= value <= high:  # false for NaN, too
            self.fail(f"expected a number from {low:g} to {high:g}, found {value}.")
        return float(value)

    def boolean(self) -> bool:
        value = self.scalar()
        if not isinstance(value, bool):
            self.fail(f"expected true or false, found {self.kind}.")
        return value

    def choice(self, known: Sequence[str], what: str) -> str:
        """One of the known words; `what` names the kind of thing (layout, arch, …)."""
        word = self.text()
        if word not in known:
            self.fail(f"unknown {what} {word!r}{suggestion(word, known)}; known: {', '.join(known)}.")
        return word

    def items(self) -> list[Node]:
        """The elements of a list."""
        if not isinstance(self.raw, yaml.SequenceNode):
            self.fail(f"expected a list, found {self.kind}.")
        return [Node(self.file, f"{self.path}[{i}]", child) for i, child in enumerate(self.raw.value)]

    def integers(self, low: int, high: int) -> tuple[int, ...]:
        """A list of at least one whole number, without repetition."""
        nodes = self.items()
        values = tuple(node.integer(low, high) for node in nodes)
        if not values:
            self.fail("expected at least one number, found an empty list.")
        for i, value in enumerate(values):
            if value in values[:i]:
                nodes[i].fail(f"{value} is listed twice.")
        return values

    def mapping(self) -> dict[str, Node]:
        """A mapping with free names as keys; a key given twice is an error (YAML itself keeps the last, silently)."""
        if not isinstance(self.raw, yaml.MappingNode):
            self.fail(f"expected a mapping of names to values, found {self.kind}.")
        result: dict[str, Node] = {}
        for key_node, value_node in self.raw.value:
            key = self._key(key_node)
            child = Node(self.file, f"{self.path}.{key}" if self.path else key, value_node)
            if key in result:
                place = Node(self.file, child.path, key_node)
                place.fail(f"the key {key!r} is given twice, first on line {result[key].line}.")
            result[key] = child
        return result

    def fields(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Node]:
        """A mapping with exactly these keys: an unknown or a missing one is refused, with the nearest known name."""
        found = self.mapping()
        known = [*required, *optional]
        missing = [name for name in required if name not in found]
        for name, node in found.items():
            if name not in known:
                # A misspelt required key is best explained by the missing one.
                hint = suggestion(name, missing) or suggestion(name, known)
                node.fail(f"unknown key {name!r}{hint}; known: {', '.join(known)}.")
        if missing:
            self.fail(f"the key {missing[0]!r} is missing; needed: {', '.join(required)}.")
        return found

    def _key(self, node: yaml.Node) -> str:
        place = Node(self.file, self.path, node)
        if not isinstance(node, yaml.ScalarNode):
            place.fail(f"a key must be a single name, found {place.kind}.")
        return str(node.value)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def read_yaml(path: Path) -> Node:
    """The document of a YAML file: one, in UTF-8 (a byte-order mark is allowed), not empty."""
    text = _read_text(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty; see docs/adding.md for what it must hold.")
    return parse_yaml(text, str(path))


def parse_yaml(text: str, file: str) -> Node:
    """The document in a text; `file` names it in errors."""
    try:
        loader = yaml.SafeLoader(text)
        try:
            raw = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{file}: not valid YAML: unprintable character at offset {error.position}.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError(f"{file}: not valid YAML: {reason}.") from None
    if raw is None:
        raise ConfigError(f"{file} holds no YAML value (only comments?); see docs/adding.md for what it must hold.")
    return Node(file, "", raw)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes: not a configuration file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from None

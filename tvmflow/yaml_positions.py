"""Reads YAML into plain values that remember where they stand. The one door to YAML.

Only what recipes need: mappings with text keys, lists, text, numbers, true, false, null and
aliases. Tags, merge keys, duplicate keys, several documents and documents that unfold into
too much are problems with a place, not surprises.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tvmflow.errors import RecipeError

Loc = tuple[str | int, ...]

_MAX_BYTES: Final = 1 << 20
_MAX_NODES: Final = 20_000
_MAX_DEPTH: Final = 40
_TAG: Final = "tag:yaml.org,2002:"
# YAML 1.1 takes 1e-3 for text, because it has no dot
_FLOAT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_ODD_WORDS: Final = frozenset("yes no on off y n".split())


class Document(NamedTuple):
    """A YAML document: its value, and where each part of it stands.

    `places` maps the path of each value to `(line, column)`, counted from 1; `keys` the path
    of each field to the place of its name; `raw` the path of each scalar to its text.
    """

    path: Path
    value: Any
    places: dict[Loc, tuple[int, int]]
    keys: dict[Loc, tuple[int, int]]
    raw: dict[Loc, str]

    def where(self, *loc: str | int) -> str:
        """`file:line:column` of a value, or of the nearest thing around it that is there."""
        for length in range(len(loc), -1, -1):
            place = self.places.get(loc[:length])
            if place is not None:
                return f"{self.path}:{place[0]}:{place[1]}"
        return f"{self.path}:1:1"

    def where_key(self, *loc: str | int) -> str:
        """`file:line:column` of a field's name."""
        place = self.keys.get(loc)
        return self.where(*loc) if place is None else f"{self.path}:{place[0]}:{place[1]}"


def read_yaml(path: Path) -> Document:
    """The document in a file. Raises RecipeError with every problem that can be told at once."""
    text = _read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise RecipeError(f"{_mark(path, error.problem_mark)}: {_syntax(error, text)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{path}:{line}:1: there is a character that YAML does not allow"
        ) from None
    except RecursionError:
        raise RecipeError(f"{path}:1:1: nested more than {_MAX_DEPTH} deep") from None
    if node is None:
        raise RecipeError(f"{path}:1:1: the file is empty", fix="start with the line `recipe: 1`")
    reader = _Reader(path, loader)
    value = reader.read(node, (), 0)
    if reader.problems:
        raise RecipeError(reader.problems)
    return Document(path, value, reader.places, reader.keys, reader.raw)


def nearest(name: str, valid: Any) -> str:
    """`; did you mean 'x'?` for the valid name that is most like `name`, or nothing."""
    near = difflib.get_close_matches(name, [str(word) for word in valid], 1, 0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        siblings = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
        hint = nearest(path.name, [sibling.name for sibling in siblings])
        raise RecipeError(f"{path}:1:1: there is no such file{hint}") from None
    except OSError as error:
        raise RecipeError(f"{path}:1:1: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise RecipeError(f"{path}:1:1: is larger than 1 MiB; is this really a recipe?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise RecipeError(f"{path}:{line}:{column}: is not UTF-8 text") from None


def _mark(path: Path, mark: Any) -> str:
    return f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else f"{path}:1:1"


def _syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    problem = str(error.problem)
    if "'\\t'" in problem:
        return "a tab; YAML is indented with spaces"
    if "expected a single document" in str(error.context):
        return "a second document begins here; a file holds one"
    if "undefined alias" in problem:
        return f"{problem}: nothing above is marked with that name"
    context = f"{error.context}: " if error.context else ""
    return f"this is not YAML: {context}{problem}"


class _Reader:
    """Turns nodes into values, and notes places and problems."""

    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader
        self._nodes = 0
        self.places: dict[Loc, tuple[int, int]] = {}
        self.keys: dict[Loc, tuple[int, int]] = {}
        self.raw: dict[Loc, str] = {}
        self.problems: list[str] = []

    def read(self, node: yaml.Node, loc: Loc, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            what = "more than it shows" if self._nodes > _MAX_NODES else f"{_MAX_DEPTH} levels"
            self.problems.append(f"{_mark(self._path, node.start_mark)}: unfolds into {what}")
            raise RecipeError(self.problems)
        self.places[loc] = (node.start_mark.line + 1, node.start_mark.column + 1)
        plain = node.tag.startswith(_TAG) and node.tag.removeprefix(_TAG) in _READERS
        if not plain:
            return self._odd(node)
        return _READERS[node.tag.removeprefix(_TAG)](self, node, loc, depth)

    def _problem(self, node: yaml.Node, text: str) -> None:
        self.problems.append(f"{_mark(self._path, node.start_mark)}: {text}")

    def _odd(self, node: yaml.Node) -> None:
        kind = node.tag.removeprefix(_TAG)
        if kind == "timestamp":
            self._problem(node, f"YAML reads {node.value} as a date; put it in quotes")
        elif kind == "value":
            self._problem(node, "a lone = means something to YAML; put it in quotes")
        else:
            self._problem(node, f"the tag {node.tag} is not allowed; recipes hold plain values")

    def _mapping(self, node: yaml.MappingNode, loc: Loc, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                self._problem(key, "merge keys (<<) are not supported; write the fields out")
                continue
            name = key.value
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
                self._problem(key, f"a field's name must be text{self._quote(key)}")
                continue
            place = (*loc, name)
            if name in values:
                line = self.keys[place][0]
                self._problem(key, f"{name}: stands here a second time (first in line {line})")
                continue
            self.keys[place] = (key.start_mark.line + 1, key.start_mark.column + 1)
            values[name] = self.read(value, place, depth + 1)
        return values

    def _quote(self, key: yaml.Node) -> str:
        if isinstance(key, yaml.ScalarNode):
            return f"; YAML reads {key.value} as something else; put it in quotes"
        return ""

    def _list(self, node: yaml.SequenceNode, loc: Loc, depth: int) -> list[Any]:
        return [self.read(item, (*loc, i), depth + 1) for i, item in enumerate(node.value)]

    def _text(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Any:
        self.raw[loc] = node.value
        if node.style is None and _FLOAT.fullmatch(node.value):
            return float(node.value)
        return node.value

    def _bool(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Any:
        self.raw[loc] = node.value
        if node.value.lower() in _ODD_WORDS:
            self._problem(
                node, f"YAML reads {node.value} as true or false; write that, or put it in quotes"
            )
        return self._loader.construct_yaml_bool(node)

    def _number(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Any:
        self.raw[loc] = node.value
        digits = node.value.lstrip("+-")
        if ":" in digits:
            self._problem(node, f"YAML reads {node.value} as a number to base 60; put it in quotes")
            return 0
        if digits[:1] == "0" and digits[1:].isdigit():
            self._problem(node, f"YAML reads {node.value} as an octal number; drop the leading 0")
            return 0
        try:
            kind = node.tag.removeprefix(_TAG)
            return getattr(self._loader, f"construct_yaml_{kind}")(node)
        except ValueError:
            self._problem(node, f"{node.value[:40]} is not a number that can be read")
            return 0

    def _null(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> None:
        self.raw[loc] = node.value


_READERS: Final[dict[str, Callable[[_Reader, Any, Loc, int], Any]]] = {
    "map": _Reader._mapping,
    "seq": _Reader._list,
    "str": _Reader._text,
    "bool": _Reader._bool,
    "int": _Reader._number,
    "float": _Reader._number,
    "null": _Reader._null,
}

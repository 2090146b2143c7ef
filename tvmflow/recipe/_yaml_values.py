"""Turns YAML nodes into plain values, and records positions and problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import yaml

from tvmflow.core.formatting import excerpt
from tvmflow.core.types import Json
from tvmflow.recipe.yaml_document import UNREADABLE, Loc, Position, Problem, dotted
from tvmflow.recipe.yaml_writer import FLOAT_WITHOUT_DOT

TAG_PREFIX: Final = "tag:yaml.org,2002:"
MAX_DEPTH: Final = 40
TOO_DEEP: Final = f"nested more than {MAX_DEPTH} levels deep"
_MAX_DIGITS: Final = 100
_BOOLEAN_WORDS: Final = frozenset("yes no on off".split())
_LONE_SURROGATE: Final = "the string contains a lone surrogate (half of a character)"
_QUOTE: Final = "put it in quotes"
# What YAML 1.1 reads a plain scalar as, by its tag.
_READ_AS: Final = {
    "bool": "true or false",
    "float": "a number",
    "int": "a number",
    "null": "null",
    "timestamp": "a date",
    "value": "a special value",
    "merge": "a special value",
}

_CONSTRUCTOR: Final = yaml.constructor.SafeConstructor()
_NUMBERS: Final[dict[str, Callable[[Any], Json]]] = {
    "int": _CONSTRUCTOR.construct_yaml_int,
    "float": _CONSTRUCTOR.construct_yaml_float,
}


class TooLarge(Exception):
    """The document is too large or too deep to go on."""

    def __init__(self, position: Position, text: str) -> None:
        super().__init__(text)
        self.position = position
        self.text = text


def too_many(max_values: int) -> str:
    """Return the message for a document with more values than allowed."""
    return f"more than {max_values} names and values"


def position_of(mark: Any) -> Position:
    """Return the position of PyYAML's mark."""
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


class ValueReader:
    """Reads the nodes of one document.

    Args:
        implicit_tag: Returns the tag that YAML gives a node that has none written.
        max_values: The most values of a document, each alias counted with all that it stands for.
    """

    def __init__(self, implicit_tag: Callable[[yaml.Node], str], max_values: int) -> None:
        self._implicit_tag = implicit_tag
        self._max_values = max_values
        self._values = 0
        self.positions: dict[Loc, Position] = {}
        self.name_positions: dict[Loc, Position] = {}
        self.scalars: dict[Loc, str] = {}
        self.problems: list[Problem] = []
        self.unreadable: set[Loc] = set()

    def read(self, node: yaml.Node, loc: Loc, depth: int = 0) -> Json:
        """Return the value of a node, or `UNREADABLE` after recording why.

        Raises:
            TooLarge: when the document has too many values or is nested too deep.
        """
        self._values += 1
        if depth > MAX_DEPTH or self._values > self._max_values:
            text = f"{too_many(self._max_values)} after expanding aliases"
            # The top-level field that expands so far says more than the value that hit the limit.
            position = self.name_positions.get(loc[:1]) or position_of(node.start_mark)
            raise TooLarge(position, TOO_DEEP if depth > MAX_DEPTH else text)
        self.positions[loc] = position_of(node.start_mark)
        kind = node.tag.removeprefix(TAG_PREFIX)
        if node.tag != self._implicit_tag(node):
            name = excerpt(node.tag.replace(TAG_PREFIX, "!!"))
            return self._reject(node, loc, f"the tag {name} is not allowed; remove it")
        if kind not in _READERS:
            return self._reject(node, loc, f"YAML reads {node.value} as {_READ_AS[kind]}; {_QUOTE}")
        return _READERS[kind](self, node, loc, depth)

    def _reject(self, node: yaml.Node, loc: Loc, text: str) -> Json:
        """Record a problem with the value at `loc`, or with a name in the mapping there."""
        name = dotted(loc)
        position = position_of(node.start_mark)
        self.problems.append(Problem(*position, f"{name}: {text}" if name else text))
        self.unreadable.add(loc)
        return UNREADABLE

    def _read_mapping(self, node: yaml.MappingNode, loc: Loc, depth: int) -> dict[str, Json]:
        values: dict[str, Json] = {}
        for key, value in node.value:
            problem = self._name_problem(key)
            if problem:
                self._reject(key, loc, problem)
                continue
            field = (*loc, key.value)
            if key.value in values:
                line = self.name_positions[field][0]
                self._reject(key, field, f"duplicate field; first defined in line {line}")
                continue
            self.name_positions[field] = position_of(key.start_mark)
            values[key.value] = self.read(value, field, depth + 1)
        return values

    def _name_problem(self, key: yaml.Node) -> str:
        """Return why a key is not a valid field name, or an empty string."""
        kind = key.tag.removeprefix(TAG_PREFIX)
        if kind == "merge":
            return "merge keys (<<) are not supported; write the fields out"
        if not isinstance(key, yaml.ScalarNode):
            return "a field name must be a string"
        if kind != "str" and kind in _READ_AS:
            name = excerpt(key.value)
            return f"a field name must be a string; YAML reads {name} as {_READ_AS[kind]}; {_QUOTE}"
        if key.tag != self._implicit_tag(key):
            return "a field name must be a string without a tag"
        return "" if _is_unicode(key.value) else _LONE_SURROGATE

    def _read_list(self, node: yaml.SequenceNode, loc: Loc, depth: int) -> list[Json]:
        return [self.read(item, (*loc, i), depth + 1) for i, item in enumerate(node.value)]

    def _read_string(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Json:
        self.scalars[loc] = node.value
        if not _is_unicode(node.value):
            return self._reject(node, loc, _LONE_SURROGATE)
        is_short = len(node.value) <= _MAX_DIGITS
        if node.style is None and is_short and FLOAT_WITHOUT_DOT.fullmatch(node.value):
            return float(node.value)
        return node.value

    def _read_bool(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Json:
        self.scalars[loc] = node.value
        if node.value.lower() in _BOOLEAN_WORDS:
            text = f"YAML reads {node.value} as true or false; write true or false, or {_QUOTE}"
            return self._reject(node, loc, text)
        return node.value.lower() == "true"

    def _read_number(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Json:
        self.scalars[loc] = node.value
        digits = node.value.lstrip("+-")
        shown = excerpt(node.value)
        if ":" in digits:
            return self._reject(node, loc, f"YAML reads {shown} as a base-60 number; {_QUOTE}")
        if digits[:1] == "0" and digits[1:].isdigit():
            text = f"YAML reads {shown} as an octal number; remove the leading 0, or {_QUOTE}"
            return self._reject(node, loc, text)
        if len(digits) > _MAX_DIGITS:
            text = f"the number has {len(digits)} digits, more than {_MAX_DIGITS}"
            return self._reject(node, loc, text)
        try:
            return _NUMBERS[node.tag.removeprefix(TAG_PREFIX)](node)
        except ValueError:
            return self._reject(node, loc, f"{node.value} is not a valid number")

    def _read_null(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> None:
        self.scalars[loc] = node.value


def _is_unicode(text: str) -> bool:
    """Return whether the text can be encoded; an escape in YAML can give a lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


_READERS: Final[dict[str, Callable[[ValueReader, Any, Loc, int], Json]]] = {
    "map": ValueReader._read_mapping,
    "seq": ValueReader._read_list,
    "str": ValueReader._read_string,
    "bool": ValueReader._read_bool,
    "int": ValueReader._read_number,
    "float": ValueReader._read_number,
    "null": ValueReader._read_null,
}

"""Reads YAML into plain values that remember where they stand. The one door to YAML.

Only what recipes need: mappings with text keys, lists, text, numbers, true, false, null and
aliases. Tags, merge keys, duplicate keys, several documents and documents that unfold into
too much are problems with a place, not surprises.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tvmflow.errors import RecipeError

Loc = tuple[str | int, ...]

UNREAD: Final = object()
"""Stands for a value that could not be read and has been complained about."""

_MAX_BYTES: Final = 1 << 20
_MAX_NODES: Final = 40_000
_MAX_DEPTH: Final = 40
_MAX_DIGITS: Final = 100
_MAX_SHOWN: Final = 120
_TOO_DEEP: Final = f"nested more than {_MAX_DEPTH} deep"
_TOO_MANY: Final = f"more than {_MAX_NODES} names and values"
_TAG: Final = "tag:yaml.org,2002:"
# YAML 1.1 takes 1e-3 for text, because it has no dot
_FLOAT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_ODD_WORDS: Final = frozenset("yes no on off".split())


class Problem(NamedTuple):
    """A mistake in a document, and its place, counted from 1."""

    line: int
    column: int
    text: str


class Document(NamedTuple):
    """A YAML document: its value, and where each part of it stands.

    `places` maps the path of each value to `(line, column)`, counted from 1; `keys` the path
    of each field to the place of its name; `raw` the path of each scalar to its text.
    `problems` are the mistakes that have already been found, and `unread` the paths of the
    values and mappings that they leave in doubt; the former are `UNREAD` in `value`.
    """

    path: Path
    value: Any
    places: dict[Loc, tuple[int, int]]
    keys: dict[Loc, tuple[int, int]]
    raw: dict[Loc, str]
    problems: tuple[Problem, ...] = ()
    unread: frozenset[Loc] = frozenset()

    def at(self, *loc: str | int) -> Any:
        """The value at a path of field names and places in lists; None when there is none."""
        value = self.value
        for step in loc:
            if isinstance(value, list) and isinstance(step, int):
                value = value[step] if step < len(value) else None
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value

    def where(self, *loc: str | int) -> str:
        """`file:line:column` of a value, or of the nearest thing around it that is there."""
        line, column = self.place(*loc)
        return f"{self.path}:{line}:{column}"

    def place(self, *loc: str | int) -> tuple[int, int]:
        """Line and column of a value, or of the nearest thing around it that is there."""
        nearby = (self.places.get(loc[:length]) for length in range(len(loc), -1, -1))
        return next((place for place in nearby if place is not None), (1, 1))

    def place_of_name(self, *loc: str | int) -> tuple[int, int]:
        """Line and column of a field's name."""
        return self.keys.get(loc) or self.place(*loc)

    def error(self, problems: Iterable[Problem], *, fix: str = "") -> RecipeError:
        """All of these problems, in the order of their places."""
        found = [f"{self.path}:{p.line}:{p.column}: {p.text}" for p in sorted(set(problems))]
        return RecipeError(found, fix=fix)


def write_yaml(value: Any) -> str:
    """Plain values as YAML that is easily compared and merged: a field a line, in the order given.

    Lists of single values, and empty mappings, stand on one line.
    """
    text: str = yaml.dump(
        value, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=sys.maxsize
    )
    return text


class _Writer(yaml.SafeDumper):
    """PyYAML, without anchors, and with short lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        flow = not any(isinstance(each, dict | list) for each in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        return super().represent_mapping(tag, mapping, flow_style=not mapping)

    def represent_text(self, text: str) -> Any:
        # what we read as a number and PyYAML does not
        return self.represent_scalar(
            f"{_TAG}str", text, style="'" if _FLOAT.fullmatch(text) else None
        )


_Writer.add_representer(str, _Writer.represent_text)


def read_yaml(path: Path, *, times: int = 1) -> Document:
    """The document in a file. `times` is how much larger than a recipe it may be.

    Raises RecipeError when there is none: no readable file, or not YAML. Values that YAML
    allows and recipes do not are `problems` of the document.
    """
    text = _read_text(path, _MAX_BYTES * times)
    try:
        loader = _Loader(text, _MAX_NODES * times)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(path, error) from None
    except yaml.reader.ReaderError as error:
        raise _at(path, *_place_in(text[: error.position]), _odd_character(error)) from None
    if node is None or node.tag == f"{_TAG}null":
        raise RecipeError(f"{path}:1:1: the file is empty", fix="start with the line `recipe: 1`")
    reader = _Reader(loader, _MAX_NODES * times)
    try:
        value = reader.read(node, (), 0)
    except _TooMuch:
        raise Document(path, None, {}, {}, {}).error(reader.problems) from None
    return Document(
        path,
        value,
        reader.places,
        reader.keys,
        reader.raw,
        tuple(reader.problems),
        frozenset(reader.unread),
    )


def nearest(name: str, valid: Any) -> str:
    """`; did you mean 'x'?` for the valid name that is most like `name`, or nothing."""
    near = difflib.get_close_matches(name[:_MAX_SHOWN], [str(word) for word in valid], 1, 0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def shown(text: str, limit: int = _MAX_SHOWN) -> str:
    """Text from a file as a message can show it: on one line, and not too long of it."""
    short = text if len(text) <= limit else f"{text[:limit]}…"
    return short if short.isprintable() else repr(short)


def quoted(text: str) -> str:
    """The same in quotes."""
    short = shown(text)
    return short if short[-1:] == "'" else f"'{short}'"


def dotted(loc: Loc) -> str:
    """A path as messages name it: `inputs.data.shape`."""
    return shown(".".join(str(step) for step in loc))


def neighbours(path: Path) -> list[str]:
    """The names of what lies in the folder of this file, as far as one can look."""
    try:
        return sorted(other.name for other in path.parent.iterdir())
    except (OSError, ValueError):
        return []


def _read_text(path: Path, max_bytes: int) -> str:
    try:
        with path.open("rb") as handle:
            content = handle.read(max_bytes + 1)
    except FileNotFoundError:
        others = [name for name in neighbours(path) if name.endswith((".yaml", ".yml"))]
        raise _at(path, 1, 1, f"there is no such file{nearest(path.name, others)}") from None
    except IsADirectoryError:
        raise _at(path, 1, 1, "is a folder; name a file in it") from None
    except OSError as error:
        raise _at(path, 1, 1, f"cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        size = f"{max_bytes >> 20} MiB"
        raise _at(path, 1, 1, f"is larger than {size}; is this the right file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig")
        raise _at(path, *_place_in(before), "is not UTF-8 text; save the file as UTF-8") from None


def _place_in(before: str) -> tuple[int, int]:
    """Line and column of what comes after this text."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _at(path: Path, line: int, column: int, text: str) -> RecipeError:
    return RecipeError(f"{path}:{line}:{column}: {text}")


def _odd_character(error: yaml.reader.ReaderError) -> str:
    return f"the character U+{error.character:04X} is not allowed in YAML"


class _Syntax(NamedTuple):
    """What we say when PyYAML's message has `needle` in it, and whether at the place where the construct began."""

    needle: str
    text: str
    at_start: bool = False


_STRAY: Final = "this does not belong to what stands above; is it indented as it should be?"
_SYNTAX: Final = (
    _Syntax(_TOO_DEEP, _TOO_DEEP),
    _Syntax(_TOO_MANY, _TOO_MANY),
    _Syntax("'\\t'", "a tab; YAML wants spaces"),
    _Syntax("expected a single document", "a second document begins here; a file holds one"),
    _Syntax("undefined alias", "this alias refers to an anchor that nothing above has"),
    _Syntax("duplicate anchor", "this anchor has been given to something else above"),
    _Syntax(
        "mapping values are not allowed",
        "a ':' cannot stand here: the indentation is wrong, or text with ': ' in it needs quotes",
    ),
    _Syntax("could not find expected ':'", "here a field should begin, such as `name: …`", True),
    _Syntax("scanning a quoted scalar: found unexpected end", "this quote is never closed", True),
    _Syntax("parsing a flow", "this bracket is not closed, or a comma is missing in it", True),
    _Syntax("expected <block end>", _STRAY),
    _Syntax("expected '<document start>'", _STRAY),
    _Syntax("that cannot start any token", "text that begins with this character needs quotes"),
)


def _not_yaml(path: Path, error: yaml.MarkedYAMLError) -> RecipeError:
    said = ": ".join(str(part) for part in (error.context, error.problem) if part)
    for case in _SYNTAX:
        if case.needle in said:
            mark = error.context_mark if case.at_start else error.problem_mark
            return _at(path, *_place(mark), case.text)
    return _at(path, *_place(error.problem_mark), f"this is not YAML: {shown(said)}")


def _place(mark: Any) -> tuple[int, int]:
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


class _TooMuch(Exception):
    """The document is too large or too deep to go on."""


class _Loader(yaml.SafeLoader):
    """PyYAML, stopping where a document is larger or deeper than any recipe."""

    def __init__(self, text: str, max_nodes: int) -> None:
        super().__init__(text)
        self._max_nodes = max_nodes
        self._nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        if self._depth > _MAX_DEPTH + 1 or self._nodes > self._max_nodes:
            problem = _TOO_DEEP if self._nodes <= self._max_nodes else _TOO_MANY
            # PyYAML has types for some of its methods only, here and below
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, problem, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def tag_without_being_told(self, node: yaml.Node) -> str:
        """What YAML takes a node for that has no tag."""
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        tag = self.resolve(type(node), node.value, (plain, not plain))  # type: ignore[no-untyped-call]
        return str(tag)


class _Reader:
    """Turns nodes into values, and notes places and problems."""

    def __init__(self, loader: _Loader, max_values: int) -> None:
        self._loader = loader
        self._max_values = max_values
        self._values = 0
        self.places: dict[Loc, tuple[int, int]] = {}
        self.keys: dict[Loc, tuple[int, int]] = {}
        self.raw: dict[Loc, str] = {}
        self.problems: list[Problem] = []
        self.unread: set[Loc] = set()

    def read(self, node: yaml.Node, loc: Loc, depth: int) -> Any:
        self._values += 1
        if depth > _MAX_DEPTH or self._values > self._max_values:
            text = _TOO_DEEP if depth > _MAX_DEPTH else f"{_TOO_MANY}, with those that aliases add"
            # the field that unfolds into so much says more than the leaf at which the count was full
            place = self.keys.get(loc[:1]) or _place(node.start_mark)
            self.problems = [Problem(*place, text)]
            raise _TooMuch
        self.places[loc] = _place(node.start_mark)
        kind = node.tag.removeprefix(_TAG)
        if node.tag != self._loader.tag_without_being_told(node):
            name = node.tag.replace(_TAG, "!!")
            return self._problem(node, loc, f"the tag {shown(name)} is not allowed; leave it out")
        if kind not in _READERS:
            return self._problem(node, loc, f"YAML reads {node.value} as {_MEANS[kind]}; {_QUOTE}")
        return _READERS[kind](self, node, loc, depth)

    def _problem(self, node: yaml.Node, loc: Loc, text: str) -> Any:
        """Note what is wrong with the value at `loc`, or with a name in the mapping there."""
        name = dotted(loc)
        place = _place(node.start_mark)
        self.problems.append(Problem(*place, f"{name}: {text}" if name else text))
        self.unread.add(loc)
        return UNREAD

    def _mapping(self, node: yaml.MappingNode, loc: Loc, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            wrong = self._wrong_name(key)
            if wrong:
                self._problem(key, loc, wrong)
                continue
            name = key.value
            place = (*loc, name)
            if name in values:
                line = self.keys[place][0]
                self._problem(key, place, f"stands here a second time (first in line {line})")
                continue
            self.keys[place] = _place(key.start_mark)
            values[name] = self.read(value, place, depth + 1)
        return values

    def _wrong_name(self, key: yaml.Node) -> str:
        kind = key.tag.removeprefix(_TAG)
        if kind == "merge":
            return "merge keys (<<) are not supported; write the fields out"
        if not isinstance(key, yaml.ScalarNode):
            return "a field's name must be text"
        if kind != "str" and kind in _MEANS:
            return f"a field's name must be text; YAML reads {shown(key.value)} as {_MEANS[kind]}; {_QUOTE}"
        if key.tag != self._loader.tag_without_being_told(key):
            return "a field's name must be text, without a tag"
        return "" if _is_unicode(key.value) else _SURROGATE

    def _list(self, node: yaml.SequenceNode, loc: Loc, depth: int) -> list[Any]:
        return [self.read(item, (*loc, i), depth + 1) for i, item in enumerate(node.value)]

    def _text(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Any:
        self.raw[loc] = node.value
        if not _is_unicode(node.value):
            return self._problem(node, loc, _SURROGATE)
        if node.style is None and _FLOAT.fullmatch(node.value) and len(node.value) <= _MAX_DIGITS:
            return float(node.value)
        return node.value

    def _bool(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Any:
        self.raw[loc] = node.value
        if node.value.lower() in _ODD_WORDS:
            text = f"YAML reads {node.value} as true or false; write that, or put it in quotes"
            return self._problem(node, loc, text)
        return self._loader.construct_yaml_bool(node)

    def _number(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Any:
        self.raw[loc] = node.value
        digits = node.value.lstrip("+-")
        if ":" in digits:
            text = f"YAML reads {shown(node.value)} as a number to base 60; {_QUOTE}"
            return self._problem(node, loc, text)
        if digits[:1] == "0" and digits[1:].isdigit():
            text = f"YAML reads {shown(node.value)} as an octal number; drop the leading 0, or put it in quotes"
            return self._problem(node, loc, text)
        if len(digits) > _MAX_DIGITS:
            return self._problem(node, loc, f"a number with {len(digits)} digits")
        try:
            kind = node.tag.removeprefix(_TAG)
            return getattr(self._loader, f"construct_yaml_{kind}")(node)
        except ValueError:
            return self._problem(node, loc, f"{node.value} is not a number that can be read")

    def _null(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> None:
        self.raw[loc] = node.value


def _is_unicode(text: str) -> bool:
    """Whether it can be printed and written: an escape can make half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


_SURROGATE: Final = "an escape in this text makes half a character"
_QUOTE: Final = "put it in quotes"
_MEANS: Final = {
    "bool": "true or false",
    "float": "a number",
    "int": "a number",
    "null": "nothing",
    "timestamp": "a date",
    "value": "a sign of its own",
    "merge": "a sign of its own",
}
_READERS: Final[dict[str, Callable[[_Reader, Any, Loc, int], Any]]] = {
    "map": _Reader._mapping,
    "seq": _Reader._list,
    "str": _Reader._text,
    "bool": _Reader._bool,
    "int": _Reader._number,
    "float": _Reader._number,
    "null": _Reader._null,
}

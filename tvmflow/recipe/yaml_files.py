"""Reader, validator and writer of YAML files; problems are reported with their positions.

The subset for recipes has mappings with string keys, lists, strings, numbers, true, false, null and aliases. Tags,
merge keys, duplicate keys, several documents and huge documents are errors.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.named_files import list_siblings, obstacle
from tvmflow.core.text import did_you_mean, nearest
from tvmflow.core.types import Json

_MAX_BYTES: Final = 1 << 20
_MAX_NODES: Final = 40_000
_START: Final = "start with the line `recipe: 1`"
_NOT_UTF_8: Final = "is not UTF-8 text; save the file as UTF-8"


def read_yaml(path: Path, *, size_factor: int = 1, fix: str = _START) -> Document:
    """Read the document in a file; values that recipes do not allow are among its problems.

    The file may be `size_factor` times as large as a recipe; `fix` is the advice for an empty file. Raises RecipeError
    if the file is unreadable or not YAML.
    """
    text = _read_text(path, _MAX_BYTES * size_factor)
    return parse_yaml(path, text, size_factor=size_factor, fix=fix)


def parse_yaml(path: Path, text: str, *, size_factor: int = 1, fix: str = _START) -> Document:
    """Parse a text like `read_yaml`; `path` is for messages."""
    max_nodes = _MAX_NODES * size_factor
    try:
        loader = _Loader(text, max_nodes)
        reader = ValueReader(loader.implicit_tag, max_nodes)
        node = loader.get_single_node()
        if node is None or node.tag == f"{TAG_PREFIX}null":
            raise RecipeError(f"{path}:1:1: the file is empty", fix=fix)
        value = reader.read(node, ())
    except TooLarge as error:
        raise _error(path, *error.position, error.text) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(path, error) from None
    except yaml.reader.ReaderError as error:
        character = f"the character U+{error.character:04X} is not allowed in YAML"
        raise _error(path, *_end_position(text[: error.position]), character) from None
    return Document(
        path=path,
        value=value,
        positions=reader.positions,
        name_positions=reader.name_positions,
        scalars=reader.scalars,
        problems=tuple(reader.problems),
        unreadable=frozenset(reader.unreadable),
    )


def _read_text(path: Path, max_bytes: int) -> str:
    if problem := obstacle(path):
        raise _error(path, 1, 1, problem)
    try:
        with path.open("rb") as handle:
            content = handle.read(max_bytes + 1)
    except (FileNotFoundError, ValueError):
        # ValueError: the name is invalid for files.
        others = [name for name in list_siblings(path) if name.endswith((".yaml", ".yml"))]
        hint = did_you_mean(path.name, others)
        raise _error(path, 1, 1, f"there is no such file{hint}") from None
    except OSError as error:
        raise _error(path, 1, 1, f"cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        size = f"{max_bytes >> 20} MiB"
        raise _error(path, 1, 1, f"is larger than {size}; is this the right file?")
    # UTF-16 without a byte order mark would decode as UTF-8 with NUL characters.
    if b"\0" in content[:2]:
        raise _error(path, 1, 1, _NOT_UTF_8)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = _end_position(content[: error.start].decode("utf-8-sig"))
        raise _error(path, *position, _NOT_UTF_8) from None


def _end_position(text: str) -> tuple[int, int]:
    """Return line and column, from 1, of the character after a text."""
    return text.count("\n") + 1, len(text) - (text.rfind("\n") + 1) + 1


def _error(path: Path, line: int, column: int, text: str) -> RecipeError:
    return RecipeError(f"{path}:{line}:{column}: {text}")


_INDENTATION: Final = "this line does not continue what is above; check its indentation"

# Part of PyYAML's message -> our message, about the position of the mistake.
_MISTAKES: Final = {
    "'\\t'": "found a tab; YAML allows only spaces here",
    "expected a single document": "a second document starts here; a file may hold only one",
    "undefined alias": "unknown alias; no anchor above has this name",
    "duplicate anchor": "duplicate anchor; another value above has this name",
    "mapping values are not allowed": "a ':' is not allowed here: the indentation is wrong, or a string with ': ' needs quotes",
    "expected <block end>": _INDENTATION,
    "expected '<document start>'": _INDENTATION,
    "that cannot start any token": "a string that starts with this character needs quotes",
}
# The same, about the beginning of the construct that contains the mistake.
_UNFINISHED: Final = {
    "could not find expected ':'": "expected a field, such as `name: …`",
    "scanning a quoted scalar: found unexpected end": "this quote is never closed",
    "parsing a flow": "this bracket is not closed, or a comma is missing in it",
}


def _syntax_error(path: Path, error: yaml.MarkedYAMLError) -> RecipeError:
    message = ": ".join(str(part) for part in (error.context, error.problem) if part)
    for mark, texts in ((error.problem_mark, _MISTAKES), (error.context_mark, _UNFINISHED)):
        for part, text in texts.items():
            if part in message:
                return _error(path, *position_of(mark), text)
    return _error(path, *position_of(error.problem_mark), f"this is not YAML: {excerpt(message)}")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with limits on the number of values and the nesting depth."""

    def __init__(self, text: str, max_nodes: int) -> None:
        super().__init__(text)
        self._max_nodes = max_nodes
        self._nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        if self._depth > MAX_DEPTH + 1 or self._nodes > self._max_nodes:
            # PyYAML has types only for some of its methods.
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            text = TOO_DEEP if self._nodes <= self._max_nodes else too_many(self._max_nodes)
            raise TooLarge(position_of(mark), text)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def implicit_tag(self, node: yaml.Node) -> str:
        """Return the tag that YAML resolves for a node without an explicit tag."""
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        tag: Any = self.resolve(type(node), node.value, (plain, not plain))  # type: ignore[no-untyped-call]
        return str(tag)


# ---------------------------------------------------------------- values of nodes

TAG_PREFIX: Final = "tag:yaml.org,2002:"
MAX_DEPTH: Final = 40
TOO_DEEP: Final = f"nested more than {MAX_DEPTH} levels deep"
_MAX_DIGITS: Final = 100
_BOOLEAN_WORDS: Final = frozenset("yes no on off".split())
# The only field that accepts `on` and `off`.
_SWITCH: Final = "checks"

_LONE_SURROGATE: Final = "the string contains a lone surrogate (half of a character)"
_QUOTE: Final = "put it in quotes"
# Tag of a plain scalar in YAML 1.1 -> its type, for messages.
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
    """The document exceeds a limit of size or depth."""

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
    """A converter of YAML nodes to values; each use of an alias counts towards `max_values`."""

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
        """Return the value of a node, or record a problem and return `UNREADABLE`.

        Raises TooLarge if the document has too many values or is nested too deeply.
        """
        self._values += 1
        if depth > MAX_DEPTH or self._values > self._max_values:
            text = f"{too_many(self._max_values)} after expanding aliases"
            # The top-level field is more helpful than the value at which the limit was reached.
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
        """Record a problem with a value or a field name at `loc`; return `UNREADABLE`."""
        name = dotted(loc)
        position = position_of(node.start_mark)
        self.problems.append(Problem(*position, f"{name}: {text}" if name else text))
        self.unreadable.add(loc)
        return UNREADABLE

    def _read_mapping(self, node: yaml.MappingNode, loc: Loc, depth: int) -> dict[str, Json]:
        values: dict[str, Json] = {}
        for key, value in node.value:
            if problem := self._name_problem(key):
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
        word = node.value.lower()
        if loc[-1:] == (_SWITCH,) and word in ("on", "off"):
            return word == "on"
        if word in _BOOLEAN_WORDS:
            text = f"YAML reads {node.value} as true or false; write true or false, or {_QUOTE}"
            return self._reject(node, loc, text)
        return word == "true"

    def _read_number(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> Json:
        self.scalars[loc] = node.value
        digits = node.value.lstrip("+-")
        shown = excerpt(node.value)
        text = f"{node.value} is not a valid number"
        if ":" in digits:
            text = f"YAML reads {shown} as a base-60 number; {_QUOTE}"
        elif digits[:1] == "0" and digits[1:].isdigit():
            text = f"YAML reads {shown} as an octal number; remove the leading 0, or {_QUOTE}"
        elif len(digits) > _MAX_DIGITS:
            text = f"the number has {len(digits)} digits, more than {_MAX_DIGITS}"
        else:
            with contextlib.suppress(ValueError):
                return _NUMBERS[node.tag.removeprefix(TAG_PREFIX)](node)
        return self._reject(node, loc, text)

    def _read_null(self, node: yaml.ScalarNode, loc: Loc, depth: int) -> None:
        self.scalars[loc] = node.value


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates, which YAML escapes can produce."""
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


# ---------------------------------------------------------------- documents

Loc = tuple[str | int, ...]
"""The path of a value: field names and list indices, as in pydantic."""

Position = tuple[int, int]
"""Line and column, counted from 1."""

UNREADABLE: Final[Any] = object()
"""Placeholder for a value with a reported problem."""


class Problem(NamedTuple):
    """A mistake in a document, with its position."""

    line: int
    column: int
    text: str


class Document(NamedTuple):
    """A YAML document: its value, and by path the positions of values and names and the text of scalars.

    `value` contains `UNREADABLE` in place of values with problems; `unreadable` lists the paths of such values.
    """

    path: Path
    value: Json
    positions: dict[Loc, Position]
    name_positions: dict[Loc, Position]
    scalars: dict[Loc, str]
    problems: tuple[Problem, ...] = ()
    unreadable: frozenset[Loc] = frozenset()

    def value_at(self, *loc: str | int) -> Json:
        """Return the value at a path, or None."""
        value = self.value
        for step in loc:
            if isinstance(value, list) and isinstance(step, int):
                value = value[step] if step < len(value) else None
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value

    def where(self, *loc: str | int) -> str:
        """Return `file:line:column` of a value, or of its nearest existing parent."""
        line, column = self.position(*loc)
        return f"{self.path}:{line}:{column}"

    def position(self, *loc: str | int) -> Position:
        """Return the position of a value, or of its nearest existing parent."""
        enclosing = (self.positions.get(loc[:length]) for length in range(len(loc), -1, -1))
        return next((position for position in enclosing if position is not None), (1, 1))

    def name_position(self, *loc: str | int) -> Position:
        """Return the position of a field's name."""
        return self.name_positions.get(loc) or self.position(*loc)

    def problem(self, text: str, *loc: str | int) -> Problem:
        """Return a problem with the value at a path: `field.path: text`."""
        return Problem(*self.position(*loc), f"{dotted(loc)}: {text}" if loc else text)

    def error(self, problems: Iterable[Problem], *, fix: str = "") -> RecipeError:
        """Return the error with all problems, sorted by position."""
        lines = [f"{self.path}:{p.line}:{p.column}: {p.text}" for p in sorted(set(problems))]
        return RecipeError(lines, fix=fix)


def dotted(loc: Loc) -> str:
    """Return a path for messages: `inputs.data.shape`."""
    return excerpt(".".join(str(step) for step in loc))


# YAML 1.1 reads 1e-3, which has no dot, as a string. Recipes read it as a number.
FLOAT_WITHOUT_DOT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_UNICODE_LINE_BREAK: Final = re.compile("[\x85\u2028\u2029]")


def write_yaml(value: Json) -> str:
    """Return YAML that is easy to compare and merge: one field per line, short lists inline."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize
    )
    return text


def inline_yaml(value: Json | tuple[Json, ...]) -> str:
    """Return a value as one line of YAML, for messages and docs."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {inline_yaml(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(inline_yaml(part) for part in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper without anchors, and with short lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        flow = not any(isinstance(item, dict | list) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        return super().represent_mapping(tag, mapping, flow_style=not mapping)

    def represent_string(self, text: str) -> Any:
        # `read_yaml` reads the first as numbers, but PyYAML would not quote them. It folds lines at the others.
        style = "'" if FLOAT_WITHOUT_DOT.fullmatch(text) else None
        style = '"' if _UNICODE_LINE_BREAK.search(text) else style
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_string)


# ---------------------------------------------------------------- validation

_AnyModel = TypeVar("_AnyModel", bound=BaseModel)


class _Kinds(NamedTuple):
    """The model of a document, and the model of another document kind, for hints about misplaced fields."""

    model: type[BaseModel]
    other: type[BaseModel] | None
    other_noun: str


def validate(
    document: Document,
    model: type[_AnyModel],
    other: type[BaseModel] | None = None,
    other_noun: str = "",
) -> tuple[_AnyModel | None, list[Problem]]:
    """Return the document as a model, or None, and all problems.

    `other` is the model of another document kind, whose misplaced fields get a hint; `other_noun` names this kind.
    """
    problems = list(document.problems)
    if not isinstance(document.value, dict):
        if document.value is not UNREADABLE:
            kind = "a list" if isinstance(document.value, list) else "a single value"
            text = f"must be a mapping, such as `name: …`, not {kind}"
            problems.append(document.problem(text))
        return None, problems
    try:
        value = model.model_validate(document.value)
    except ValidationError as error:
        for detail in error.errors():
            problems += _list_problems(document, _Kinds(model, other, other_noun), detail)
        return None, problems
    return None if problems else value, problems


class FieldType(NamedTuple):
    """The type of a model's field without `Optional`, and an example of a value."""

    kind: Any = None
    example: Any = None


# pydantic appends this to the path of an invalid key in a mapping.
_KEY: Final = "[key]"
# The similarity from which a field name is suggested first.
_CLEARLY_MEANT: Final = 0.85


def field_type(model: type[BaseModel], loc: Loc) -> FieldType:
    """Return the expected type at a path of a document; `kind` is None if the path is invalid."""
    kind: Any = model
    example: Any = None
    for step in loc:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(step))
            if field is None:
                return FieldType()
            kind, example = strip_annotation(field.annotation), (field.examples or [None])[0]
        else:
            args = get_args(kind)
            if not args:
                return FieldType()
            kind = strip_annotation(args[1] if get_origin(kind) is dict else args[0])
            parts = list(example.values()) if isinstance(example, dict) else example
            example = parts[-1] if isinstance(parts, list) and parts else None
    return FieldType(kind, example)


def strip_annotation(kind: Any) -> Any:
    """Return `X` for `Annotated[X | None, …]`."""
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return kind


def _list_problems(document: Document, kinds: _Kinds, detail: ErrorDetails) -> Iterator[Problem]:
    """Yield the problem of a pydantic error, unless it only follows from an unreadable value."""
    place = [step for step in detail["loc"] if step != _KEY]
    loc: Loc = (*place, *detail.get("ctx", {}).get("path", ()))
    if _follows_from_unreadable(document, loc, detail):
        return
    if detail["type"] == "extra_forbidden":
        text = f"{dotted(loc)}: {_unknown_field_text(document, kinds, loc)}"
        yield Problem(*document.name_position(*loc), text)
    else:
        yield document.problem(_error_text(document, kinds.model, loc, detail), *loc)


def _follows_from_unreadable(document: Document, loc: Loc, detail: ErrorDetails) -> bool:
    if detail["type"] == "too_short" and detail["input"]:
        # pydantic counts only valid items, and invalid items are reported already.
        return True
    if detail["type"] == "missing" and loc[:-1] in document.unreadable:
        return True
    return any(unreadable[: len(loc)] == loc for unreadable in document.unreadable)


def _unknown_field_text(document: Document, kinds: _Kinds, loc: Loc) -> str:
    """Return the message for an unknown field: where it belongs, or a similar field."""
    name = str(loc[-1])
    section = field_type(kinds.model, loc[:-1]).kind
    fields = list(section.model_fields)
    # `output` in a target is `outputs`, although a state has a field of that name
    if f"{name}s" not in fields and (places := _find_places(kinds, name)):
        return f"belongs {' or '.join(places)}"
    if nearest(name, fields, cutoff=_CLEARLY_MEANT):
        return f"unknown field{did_you_mean(name, fields)}"
    inside = document.value_at(*loc)
    sections = (*_nested_models(kinds.model), *_nested_models(kinds.other))
    every = [field for _, model in sections for field in model.model_fields]
    for wrong in (name, *(inside if isinstance(inside, dict) else ())):
        for meant in nearest(wrong, every, cutoff=_CLEARLY_MEANT):
            hint = f"'{meant}' {_find_places(kinds, meant)[0]}"
            return f"unknown field; did you mean {hint}?"
    hint = did_you_mean(name, fields) or f" (valid: {', '.join(fields)})"
    return f"unknown field{hint}"


def _find_places(kinds: _Kinds, name: str) -> list[str]:
    """Return where a field of this name belongs: `under verify`, or `under verify of a recipe`.

    Overrides of a listed section, and sections inside a listed section, are omitted.
    """
    own, other = (_sections_with(model, name) for model in (kinds.model, kinds.other))
    for sections, suffix in ((own, ""), (other, f" of {kinds.other_noun}")):
        levels = [
            path
            for section, path in sections.items()
            if not any(section is not one and issubclass(section, one) for one in (*own, *other))
        ]
        levels = [p for p in levels if not any(q and p.startswith(f"{q}.") for q in levels)]
        if levels:
            return [f"{f'under {p}' if p else 'at the top level'}{suffix}" for p in levels]
    return []


def _sections_with(model: type[BaseModel] | None, name: str) -> dict[type[BaseModel], str]:
    """Return the sections with a field of this name, each with its outermost path."""
    paths: dict[type[BaseModel], str] = {}
    for path, section in sorted(_nested_models(model), key=lambda level: level[0].count(".")):
        if name in section.model_fields:
            paths.setdefault(section, path)
    return paths


def _nested_models(
    model: type[BaseModel] | None, path: str = ""
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield path and model of every nesting level, outermost first."""
    if model is None:
        return
    yield path, model
    for name, field in model.model_fields.items():
        inner = strip_annotation(field.annotation)
        while get_args(inner):
            inner = strip_annotation(get_args(inner)[1 if get_origin(inner) is dict else 0])
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _nested_models(inner, f"{path}.{name}" if path else name)


_EXPECTED: Final = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_short": "a list with at least one item",
}
_LIMITS: Final = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
}
_NAME_RULE: Final = "must start with a lowercase letter or digit and contain only lowercase letters, digits and . _ -"


def _error_text(document: Document, model: type[BaseModel], loc: Loc, detail: ErrorDetails) -> str:
    """Return the message for a pydantic error."""
    kind, context = detail["type"], detail.get("ctx", {})
    expected = field_type(model, loc)
    example = "" if expected.example is None else f", such as {inline_yaml(expected.example)}"
    actual = _actual_text(document, loc, detail["input"])
    if kind == "missing":
        write = f"; write `{loc[-1]}: {inline_yaml(expected.example)}`" if example else ""
        return f"is missing{write}"
    # int_parsing_size is pydantic's error for an integer with too many digits.
    if kind in ("literal_error", "int_parsing_size"):
        choices = [str(choice) for choice in get_args(expected.kind)]
        hint = did_you_mean(detail["input"], choices) if isinstance(detail["input"], str) else ""
        return f"must be one of {', '.join(choices)}, {actual}{hint}"
    if kind == "string_pattern_mismatch":
        return f"{_NAME_RULE}, {actual}"
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}{example}, {actual}"
    if kind in _LIMITS:
        plain = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
        return _LIMITS[kind].format_map(plain)
    return detail["msg"]


def _actual_text(document: Document, loc: Loc, value: Json) -> str:
    if value is None:
        return "but is empty"
    if isinstance(value, dict):
        return "not a mapping"
    if isinstance(value, list | tuple):
        return "not a list" if value else "not an empty list"
    if isinstance(value, str):
        return f"not the string {quoted(value)}"
    kind = "" if isinstance(value, bool) else "the number "
    return f"not {kind}{document.scalars.get(loc, value)}"

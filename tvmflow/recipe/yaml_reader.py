"""Reads YAML files into documents.

Only what recipes need is allowed: mappings with string keys, lists, strings, numbers, true,
false, null and aliases. Tags, merge keys, duplicate keys, several documents and documents
that expand into too many values are problems with a position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import excerpt
from tvmflow.core.named_files import list_siblings, obstacle
from tvmflow.core.suggestions import did_you_mean
from tvmflow.recipe._yaml_values import (
    MAX_DEPTH,
    TAG_PREFIX,
    TOO_DEEP,
    TooLarge,
    ValueReader,
    position_of,
    too_many,
)
from tvmflow.recipe.yaml_document import Document

_MAX_BYTES: Final = 1 << 20
_MAX_NODES: Final = 40_000
_NOT_UTF_8: Final = "is not UTF-8 text; save the file as UTF-8"


def read_yaml(path: Path, *, size_factor: int = 1) -> Document:
    """Return the document in a file; values that recipes do not allow are among its problems.

    Args:
        path: A YAML file.
        size_factor: How many times larger than a recipe it may be.

    Raises:
        RecipeError: when the file cannot be read or is not YAML.
    """
    return parse_yaml(path, _read_text(path, _MAX_BYTES * size_factor), size_factor=size_factor)


def parse_yaml(path: Path, text: str, *, size_factor: int = 1) -> Document:
    """Return the document in a text, as `read_yaml` returns that in a file.

    Args:
        path: The file that messages name.
        text: Its content.
        size_factor: How many times more names and values it may have than a recipe.

    Raises:
        RecipeError: when the text is not YAML.
    """
    max_nodes = _MAX_NODES * size_factor
    try:
        loader = _Loader(text, max_nodes)
        reader = ValueReader(loader.implicit_tag, max_nodes)
        node = loader.get_single_node()
        if node is None or node.tag == f"{TAG_PREFIX}null":
            fix = "start with the line `recipe: 1`"
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
        path,
        value,
        reader.positions,
        reader.name_positions,
        reader.scalars,
        tuple(reader.problems),
        frozenset(reader.unreadable),
    )


def _read_text(path: Path, max_bytes: int) -> str:
    if problem := obstacle(path):
        raise _error(path, 1, 1, problem)
    try:
        with path.open("rb") as handle:
            content = handle.read(max_bytes + 1)
    except (FileNotFoundError, ValueError):
        # ValueError: it is not a name that a file can have
        others = [name for name in list_siblings(path) if name.endswith((".yaml", ".yml"))]
        raise _error(
            path, 1, 1, f"there is no such file{did_you_mean(path.name, others)}"
        ) from None
    except OSError as error:
        raise _error(path, 1, 1, f"cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        size = f"{max_bytes >> 20} MiB"
        raise _error(path, 1, 1, f"is larger than {size}; is this the right file?")
    # UTF-16 without a byte order mark can be decoded as UTF-8, to every other character
    if b"\0" in content[:2]:
        raise _error(path, 1, 1, _NOT_UTF_8)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig")
        position = _end_position(before)
        raise _error(path, *position, _NOT_UTF_8) from None


def _end_position(text: str) -> tuple[int, int]:
    """Return line and column of the character after this text."""
    return text.count("\n") + 1, len(text) - (text.rfind("\n") + 1) + 1


def _error(path: Path, line: int, column: int, text: str) -> RecipeError:
    return RecipeError(f"{path}:{line}:{column}: {text}")


class _SyntaxMessage(NamedTuple):
    """Our message for PyYAML's messages that contain `needle`; `at_start`: where the construct began."""

    needle: str
    text: str
    at_start: bool = False


_INDENTATION: Final = "this line does not continue what is above; check its indentation"
_SYNTAX_MESSAGES: Final = (
    _SyntaxMessage("'\\t'", "found a tab; YAML allows only spaces here"),
    _SyntaxMessage(
        "expected a single document", "a second document starts here; a file may hold only one"
    ),
    _SyntaxMessage("undefined alias", "unknown alias; no anchor above has this name"),
    _SyntaxMessage("duplicate anchor", "duplicate anchor; another value above has this name"),
    _SyntaxMessage(
        "mapping values are not allowed",
        "a ':' is not allowed here: the indentation is wrong, or a string with ': ' needs quotes",
    ),
    _SyntaxMessage("could not find expected ':'", "expected a field, such as `name: …`", True),
    _SyntaxMessage(
        "scanning a quoted scalar: found unexpected end", "this quote is never closed", True
    ),
    _SyntaxMessage(
        "parsing a flow", "this bracket is not closed, or a comma is missing in it", True
    ),
    _SyntaxMessage("expected <block end>", _INDENTATION),
    _SyntaxMessage("expected '<document start>'", _INDENTATION),
    _SyntaxMessage(
        "that cannot start any token", "a string that starts with this character needs quotes"
    ),
)


def _syntax_error(path: Path, error: yaml.MarkedYAMLError) -> RecipeError:
    message = ": ".join(str(part) for part in (error.context, error.problem) if part)
    for case in _SYNTAX_MESSAGES:
        if case.needle in message:
            mark = error.context_mark if case.at_start else error.problem_mark
            return _error(path, *position_of(mark), case.text)
    return _error(path, *position_of(error.problem_mark), f"this is not YAML: {excerpt(message)}")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, which stops where a document is larger or deeper than any recipe."""

    def __init__(self, text: str, max_nodes: int) -> None:
        super().__init__(text)
        self._max_nodes = max_nodes
        self._nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        if self._depth > MAX_DEPTH + 1 or self._nodes > self._max_nodes:
            # PyYAML has types for some of its methods only, here and below.
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            text = TOO_DEEP if self._nodes <= self._max_nodes else too_many(self._max_nodes)
            raise TooLarge(position_of(mark), text)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def implicit_tag(self, node: yaml.Node) -> str:
        """Return the tag that YAML gives a node that has none written."""
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        tag: Any = self.resolve(type(node), node.value, (plain, not plain))  # type: ignore[no-untyped-call]
        return str(tag)

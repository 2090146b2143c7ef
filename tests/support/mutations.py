"""Mutations of bytes, of trees (YAML and JSON), and of protobuf messages; the same draw gives the same mutation."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from google.protobuf.message import Message

Draw: TypeAlias = random.Random

INTEGERS: Final = (-1, 0, 1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63))
TEXTS: Final = (
    "",
    " ",
    "\x1b[2J\x1b]0;title\x07",
    "a\nb\r\tc",
    "\u202eoffered",
    "a\x00b",
    "../../etc/passwd",
    "/etc/passwd",
    "~",
    "%s%n{0}",
    "x" * 50_000,
    "\N{PILE OF POO}",
    "-",
    "host",
    "http://[::1",
    "file:///etc/passwd",
)
VALUES: Final[tuple[Any, ...]] = (
    *INTEGERS,
    *TEXTS,
    2**70,
    1e308,
    float("nan"),
    float("inf"),
    -0.5,
    True,
    None,
    [],
    {},
    [[[[[]]]]],
    {"": {"": {"": None}}},
    [1] * 1000,
    {"x": 1, "y": [2]},
)


# ---------------------------------------------------------------- bytes


def _flip(draw: Draw, data: bytearray) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _overwrite(draw: Draw, data: bytearray) -> None:
    start = draw.randrange(len(data))
    data[start : start + 8] = struct.pack("<q", draw.choice(INTEGERS))[: len(data) - start]


def _remove(draw: Draw, data: bytearray) -> None:
    start = draw.randrange(len(data))
    del data[start : start + draw.choice((1, 2, 8, 64, 4096))]


def _repeat(draw: Draw, data: bytearray) -> None:
    start = draw.randrange(len(data))
    part = data[start : start + draw.choice((1, 8, 64, 4096))]
    data[start:start] = part * draw.choice((1, 2, 50))


def _insert(draw: Draw, data: bytearray) -> None:
    start = draw.randrange(len(data))
    data[start:start] = draw.choice(
        (
            draw.randbytes(16),
            b"\x00" * 64,
            b"\xff" * 9,
            b"[" * 5000,
            b"{" * 5000,
            b"&a [*a, *a]",
            b"\r\n",
        )
    )


def _truncate(draw: Draw, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


_BYTE_MUTATIONS: Final = (_flip, _flip, _overwrite, _remove, _repeat, _insert, _truncate)


def mutate_bytes(draw: Draw, content: bytes) -> bytes:
    """Return other bytes, after one to four mutations."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        if data:
            draw.choice(_BYTE_MUTATIONS)(draw, data)
    return bytes(data)


# ---------------------------------------------------------------- trees


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each (container, key or index) of a tree of dicts and lists."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key])


def _misspell(draw: Draw, word: str) -> str:
    cut = draw.randrange(len(word)) if word else 0
    return word[:cut] + draw.choice(("", "x", "_", "\x07")) + word[cut + 1 :]


def mutate_tree(draw: Draw, tree: Any) -> Any:
    """Return a copy of a tree in which one to three values are replaced, removed, swapped or renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return draw.choice(VALUES)
        container, key = draw.choice(places)
        change = draw.randrange(8)
        if change == 0:
            del container[key]
        elif change == 1:
            other, other_key = draw.choice(places)
            container[key] = copy.deepcopy(other[other_key])
        elif change == 2 and isinstance(container, dict):
            container[_misspell(draw, str(key))] = container.pop(key)
        elif change == 3:
            container[key] = [container[key], copy.deepcopy(draw.choice(VALUES))]
        elif change == 4 and isinstance(container[key], str):
            container[key] = _misspell(draw, container[key])
        elif change > 5 and isinstance(container[key], (int, float)):
            container[key] = container[key] * draw.choice((2, 3, 1000)) + draw.choice((0, 1, -1))
        else:
            container[key] = copy.deepcopy(draw.choice(VALUES))
    return tree


# ---------------------------------------------------------------- protobuf


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from _messages(part)


_SCALARS: Final[dict[type, tuple[Any, ...]]] = {
    int: INTEGERS,
    float: (float("nan"), float("inf"), -1.0, 0.0, 1e30),
    str: TEXTS,
    bytes: (b"", b"\x00" * 3, b"\xff" * 64, b"\x1b[2J"),
}


def _mutate_field(draw: Draw, message: Message) -> None:
    """Change a field that is set: remove it, repeat, drop or swap items, or take another value."""
    fields = message.ListFields()
    if not fields:
        return
    field, value = draw.choice(fields)
    if draw.random() < 0.15:
        message.ClearField(field.name)
    elif field.is_repeated and len(value):
        index = draw.randrange(len(value))
        change = draw.choice(("drop", "repeat", "swap", "value"))
        items = list(value)
        if change == "drop":
            del items[index]
        elif change == "repeat":
            items.insert(index, items[index])
        elif change == "swap":
            draw.shuffle(items)
        elif field.message_type is None:
            items[index] = draw.choice(_SCALARS[type(items[index])])
        items = [copy.deepcopy(item) for item in items]
        message.ClearField(field.name)
        _assign(lambda: getattr(message, field.name).extend(items))
    elif field.message_type is None:
        _assign(lambda: setattr(message, field.name, draw.choice(_SCALARS[type(value)])))


def _assign(action: Callable[[], None]) -> None:
    """Assign unless the field's type admits no such value (an int32 above its range)."""
    try:
        action()
    except (ValueError, TypeError):
        return


def mutate_message(draw: Draw, message: Message) -> bytes:
    """Return the bytes of a copy of a message in which one to four fields, at any depth, are changed."""
    mutated = copy.deepcopy(message)
    for _ in range(draw.choice((1, 1, 2, 4))):
        _mutate_field(draw, draw.choice(list(_messages(mutated))))
    content: bytes = mutated.SerializePartialToString()
    return content

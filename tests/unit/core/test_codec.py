"""Named tuples as JSON: what is written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

import pytest

from tvmflow.core.codec import from_json, to_json
from tvmflow.core.types import Json


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Shape(NamedTuple):
    kind: Literal["line", "area"]
    points: tuple[Point, ...]
    names: Mapping[str, str] | None
    size: tuple[int, str]
    extra: Json = None
    is_closed: bool = False


SHAPE = Shape("line", (Point(1), Point(2, 3)), {"a": "b"}, (4, "mm"), {"any": [1]})


def test_a_value_comes_back_as_it_was() -> None:
    """Tuples are lists in JSON, and named tuples objects; lists of fields are read, too."""
    value = json.loads(json.dumps(to_json(SHAPE)))
    assert value["points"] == [{"x": 1, "y": 0.5}, {"x": 2, "y": 3}]
    assert from_json(Shape, value) == SHAPE
    assert from_json(Shape, json.loads(json.dumps(SHAPE))) == SHAPE


def test_missing_fields_have_their_defaults_and_unknown_ones_are_left_out() -> None:
    """Another version may have written them."""
    assert from_json(Point, {"x": 1, "z": 2}) == Point(1)
    assert from_json(Shape, {**to_json(SHAPE), "names": None}).names is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"kind": "dot"}, "kind"), ({"points": 5}, "points"), ({"names": []}, "names")),
        *(({"points": [{"x": "1"}]}, "points.0.x"), ({"points": [[1, None]]}, "points.0.y")),
        *(({"points": [[True]]}, "points.0.x"), ({"points": [[1, 2, 3]]}, "points.0")),
        *(({"names": {"a": 1}}, "names.a"), ({"size": [1]}, "size"), ({"size": [1, 2]}, "size.1")),
        *(({"is_closed": 0}, "is_closed"), ({"points": [{}]}, "points.0.x")),
    ],
)
def test_another_type_is_refused_with_the_name_of_the_field(
    changes: dict[str, Json], field: str
) -> None:
    """Whoever wrote it."""
    with pytest.raises(ValueError, match=f"'{field}'"):
        from_json(Shape, {**to_json(SHAPE), **changes})


@pytest.mark.parametrize("value", [None, 5, "text", [], {}])
def test_what_is_no_object_is_refused(value: Json) -> None:
    """By a message, never by another error."""
    with pytest.raises(ValueError, match="field"):
        from_json(Shape, value)

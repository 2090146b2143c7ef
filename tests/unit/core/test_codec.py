"""JSON as values of types: what is read, what is refused, and that what is written is read again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict

import pytest

from tvmflow.core.codec import Mismatch, from_json, to_json, without_empty


class Inner(NamedTuple):
    name: str
    times: tuple[float, ...] = ()


class _Required(TypedDict):
    passed: bool


class Judged(_Required, total=False):
    error: float | str
    limits: dict[str, float]


class Outer(NamedTuple):
    number: int
    inner: tuple[Inner, ...]
    by_width: Mapping[int, float]
    judged: Judged
    pair: tuple[str, str] = ("", "")
    peak: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return without_empty(self._asdict(), ("note",))


VALUE: dict[str, Any] = {
    "number": 3,
    "inner": [{"name": "a", "times": [1, 2.5]}, {"name": "b", "times": []}],
    "by_width": {"256": 1.5},
    "judged": {"passed": True, "error": "nan", "limits": {"rms": 0.5}},
    "pair": ["cpu", "cuda"],
    "peak": None,
}


def test_what_is_written_is_read_again() -> None:
    """A field that may be left out where it is empty is left out."""
    value = from_json(Outer, VALUE)
    assert value == Outer(
        number=3,
        inner=(Inner("a", (1, 2.5)), Inner("b")),
        by_width={256: 1.5},
        judged={"passed": True, "error": "nan", "limits": {"rms": 0.5}},
        pair=("cpu", "cuda"),
    )
    assert to_json(value) == VALUE
    assert json.loads(json.dumps(to_json(value._replace(note="n")))) == {**VALUE, "note": "n"}


def test_what_a_type_does_not_have_is_left_out() -> None:
    """A later version may record more."""
    assert from_json(Inner, {"name": "a", "colour": 1}) == Inner("a")
    assert from_json(Judged, {"passed": False, "colour": 1}) == {"passed": False}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_none_is_text_where_text_may_be(number: float) -> None:
    """JSON lacks such numbers, and Python writes them all the same."""
    assert from_json(Judged, {"passed": True, "error": number})["error"] == str(number)
    with pytest.raises(Mismatch):
        from_json(Inner, {"name": "a", "times": [number]})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("number",), True, "number: true or false instead of an integer"),
        (("number",), 3.0, "number: a number instead of an integer"),
        (("number",), 10**400, "number: an integer that is too large"),
        (("inner",), {}, "inner: an object instead of a list"),
        (("inner",), [3], "inner: an integer instead of an object"),
        (("inner",), [{}], "inner: name missing"),
        (("inner",), [{"name": None}], "inner: name: null instead of a text"),
        (("by_width",), {"x\n": 1.0}, r"by_width: x\\n is not an integer"),
        (("by_width",), {"1": "x"}, "by_width: 1: a text instead of a number"),
        (("judged",), {}, "judged: passed missing"),
        (("judged",), [], "judged: a list instead of an object"),
        (("pair",), ["a"], "pair: a list instead of a list of 2"),
        (("peak",), 1e300, "peak: a number that is too large or not finite"),
        (("peak",), 10**400, "peak: a number that is too large or not finite"),
        (("peak",), "x", "peak: a text instead of a number"),
        (("judged",), {"passed": True, "error": "x"}, "judged: error: a text instead of a number"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        from_json(Outer, {**VALUE, path[0]: value})


def test_every_field_that_is_missing_is_named() -> None:
    with pytest.raises(Mismatch, match="by_width, inner, judged, number missing"):
        from_json(Outer, {})


class Choice(NamedTuple):
    kind: Literal["line", "area"]
    size: int = 1


def test_a_list_of_fields_is_read_in_their_order() -> None:
    """As plain JSON writes a NamedTuple: between processes and in files of older versions."""
    assert from_json(Choice, ["area", 2]) == Choice("area", 2)
    assert from_json(Choice, ["line"]) == Choice("line")
    for wrong, message in (
        (["line", 1, 2], "a list"),
        ([], "kind missing"),
        (["dot"], "kind: a text"),
    ):
        with pytest.raises(Mismatch, match=message):
            from_json(Choice, wrong)

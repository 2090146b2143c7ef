"""Canonical JSON: equal values have equal bytes and digests."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from tvmflow.core.canonical_json import canonical, digest_of, document


def test_the_order_of_keys_does_not_matter() -> None:
    """Keys are sorted at every level; lists keep their order."""
    one = {"b": [2, 1], "a": {"d": None, "c": True}}
    other = {"a": {"c": True, "d": None}, "b": [2, 1]}
    assert canonical(one) == canonical(other) == b'{"a":{"c":true,"d":null},"b":[2,1]}'
    assert canonical({"b": [1, 2]}) != canonical({"b": [2, 1]})


def test_text_is_ascii() -> None:
    """The bytes do not depend on an encoding."""
    assert canonical("µs") == b'"\\u00b5s"'


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_have_is_refused(number: float) -> None:
    """NaN would make a key that no other program can compute."""
    with pytest.raises(ValueError):
        canonical({"x": number})


def test_a_digest_is_the_sha256_of_the_canonical_bytes() -> None:
    """Anybody can compute a key."""
    assert digest_of({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()


def test_a_document_is_the_same_value_for_people() -> None:
    """Sorted, one field a line, with a newline at the end."""
    text = document({"b": 1, "a": [1]})
    assert json.loads(text) == {"a": [1], "b": 1}
    assert text.splitlines()[1].strip() == '"a": ['
    assert text.endswith("}\n")

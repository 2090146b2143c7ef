"""The base of models that are read from files, and messages about what is wrong in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BeforeValidator, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.named_files import is_file, list_siblings, missing_file_text
from tvmflow.core.schema import (
    ClosedModel,
    FormatVersion,
    check_choice,
    field_error,
    first_field_error,
    one_of,
    schema_enum,
    to_tuple,
)

COLORS = ("red", "green")


class Paint(ClosedModel):
    """A model with every kind of shared field."""

    version: FormatVersion = 1
    color: Annotated[str, one_of(COLORS, "a color"), schema_enum(COLORS)] = "red"
    coats: Annotated[tuple[int, ...], BeforeValidator(to_tuple)] = ()

    @field_validator("coats")
    @classmethod
    def _check(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if 0 in value:
            raise field_error("is no coat", value.index(0))
        return value


def test_a_closed_model_is_frozen_strict_and_rejects_unknown_fields() -> None:
    paint = Paint.model_validate({"coats": [1, 2]})
    assert paint.coats == (1, 2)
    with pytest.raises(ValidationError, match="frozen"):
        paint.color = "green"
    for wrong in (
        {"colour": "red"},
        {"color": 3},
        {"coats": ["1"]},
        {"version": 2},
        {"version": True},
    ):
        with pytest.raises(ValidationError):
            Paint.model_validate(wrong)


def test_an_error_has_its_path_from_the_validated_value() -> None:
    with pytest.raises(ValidationError) as caught:
        Paint.model_validate({"coats": [1, 0]})
    assert first_field_error(caught.value) == ("is no coat", (1,))


def test_an_unknown_choice_suggests_the_nearest_one() -> None:
    """And lists all, or says where they are listed."""
    assert check_choice("red", COLORS, "a color") == "red"
    with pytest.raises(PydanticCustomError) as caught:
        check_choice("rod", COLORS, "a color")
    assert caught.value.message() == "'rod' is not a color; did you mean 'red'? (valid: green, red)"
    with pytest.raises(PydanticCustomError) as caught:
        check_choice("blue", COLORS, "a color", "see the shop")
    assert caught.value.message() == "'blue' is not a color (see the shop)"


def test_the_schema_lists_the_choices() -> None:
    assert Paint.model_json_schema()["properties"]["color"]["enum"] == ["red", "green"]


def test_a_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").touch()
    path = tmp_path / "nett.onnx"
    assert not is_file(path)
    assert missing_file_text(path) == f"there is no file {path}; did you mean 'net.onnx'?"
    assert missing_file_text(path, suggest=False) == f"there is no file {path}"
    assert missing_file_text(tmp_path) == f"{tmp_path} is a folder, not a file"


def test_a_path_that_no_file_can_have_is_missing(tmp_path: Path) -> None:
    for path in (tmp_path / ("a" * 5000), tmp_path / "a\0b", tmp_path / "no" / "such"):
        assert not is_file(path)
        assert missing_file_text(path).startswith("there is no file ")
    assert list_siblings(tmp_path / "no" / "such") == []


def test_text_of_a_file_is_shown_on_one_line() -> None:
    """Long text is truncated, unprintable text is escaped, and quotes are not doubled."""
    assert excerpt("a" * 130) == "a" * 120 + "…"
    assert excerpt("a\nb") == "a\\nb"
    assert quoted("a") == "'a'"
    assert quoted("a\nb") == "'a\\nb'"

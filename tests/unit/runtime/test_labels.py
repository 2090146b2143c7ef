"""Labels: a file of names, and the best classes for scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tvmflow.core import generated_text
from tvmflow.core.types import TensorSpec
from tvmflow.runtime.labels import (
    MAX_NAME,
    Labels,
    format_predictions,
    parse_labels,
    predictions_json,
)

THREE = Labels(("cat", "dog", "owl"), "", "0" * 64)


def test_a_file_has_one_name_a_line() -> None:
    """Spaces around names and a last empty line are left out; names may have spaces."""
    labels = parse_labels(b"\xef\xbb\xbftabby cat\r\n dog \n\n", "softmax")
    assert labels.names == ("tabby cat", "dog") and labels.activation == "softmax"
    assert Labels.from_json(labels.to_json()) == labels


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"", "no names"), (b"a\n\nb\n", "line 2 is empty"), (b"\xff\xfe", "not text in UTF-8")],
)
def test_a_file_without_names_is_an_error(content: bytes, text: str) -> None:
    """Each with its line where there is one."""
    with pytest.raises(ValueError, match=text):
        parse_labels(content)


def test_scores_become_probabilities_only_once() -> None:
    """Softmax for logits; what the last operator or the sums say are probabilities stays as it is."""
    logits = np.array([[1.0, 3.0, 2.0]], np.float32)
    softmax = np.exp(logits) / np.exp(logits).sum()
    (best,) = THREE.rank(logits, 2)
    assert [prediction.label for prediction in best] == ["dog", "owl"]
    assert best[0].position == 1 and best[0].probability == pytest.approx(softmax[0, 1])
    assert THREE.rank(softmax)[0][0].probability == softmax[0, 1]
    independent = np.array([[0.9, 0.1, 0.8]])
    assert THREE._replace(activation="sigmoid").probabilities(independent)[0, 0] == 0.9
    quantized = np.array([[-128, 127, 0]], np.int8)
    assert THREE._replace(activation="softmax").probabilities(quantized)[0, 1] == 255 / 256
    assert "softmax of the output 'y'" in THREE.describe(logits, "y")
    assert "the output 'y'" in THREE.describe(softmax, "y")


def test_scores_that_are_all_nan_have_no_probabilities() -> None:
    """Without a warning of NumPy; other samples keep theirs."""
    broken, good = THREE.rank(np.array([[np.nan] * 3, [0.0, 9.0, 0.0]], np.float32))
    assert all(math.isnan(prediction.probability) for prediction in broken)
    assert good[0].position == 1


def test_nan_is_never_the_best() -> None:
    """Nor does it spoil the others."""
    (best,) = THREE.rank(np.array([[np.nan, 1.0, 2.0]], np.float32))
    assert [prediction.label for prediction in best] == ["owl", "dog", "cat"]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (TensorSpec("y", (1, 4), "float32"), "there are 3 names, and 4 scores for a sample"),
        (TensorSpec("y", (1, 3), "int64"), "scores are floating-point numbers"),
    ],
)
def test_labels_that_do_not_fit_the_output_are_an_error(output: TensorSpec, text: str) -> None:
    """With both numbers, and the output."""
    THREE.check(TensorSpec("y", (8, 1, 3), "float16"))
    with pytest.raises(ValueError, match=text):
        THREE.check(output)


def test_predictions_are_shown_by_file() -> None:
    """As lines and as JSON."""
    report = predictions_json(["a.png"], THREE.rank(np.array([[0.0, 100.0, 0.0]]), 1))
    assert list(format_predictions(report)) == ["a.png:", "  100.00%  dog"]
    assert report[0]["classes"] == [{"label": "dog", "probability": 1.0, "position": 1}]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it has no names"),
        (b" \r\n\n", "it has no names"),
        (b"a\n\nb\n", "its line 2 is empty"),
        (b"a\nb\0\n", r"its line 2 has a control character: 'b\\x00'"),
        (b"a\nb\x1b[2J\n", r"its line 2 has a control character: 'b\\x1b\[2J'"),
        ("a\u2028b\nc\n".encode(), "its line 1 has a control character"),
        ("\u202ea\nb\n".encode(), "its line 1 has a control character"),
        (b"a\n" + b"b" * 501, r"its line 2 \('b.*\) has a name of 501 characters, more than 500"),
        ("é".encode("latin-1"), "it is not text in UTF-8"),
        ("a\nb\n".encode("utf-16"), "it is not text in UTF-8"),
    ],
)
def test_a_file_of_labels_from_anybody(content: bytes, problem: str) -> None:
    """What a terminal would obey, or show as something else, is not a name."""
    with pytest.raises(ValueError, match=problem):
        parse_labels(content)


def test_every_label_is_a_name_that_code_holds() -> None:
    """There is one rule for labels, which is stricter than that for names of inputs: RTL marks are none of theirs."""
    assert MAX_NAME == generated_text.MAX_NAME
    for code in {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029} - {*b"\r\n"}:
        with pytest.raises(ValueError):
            parse_labels(f"a{chr(code)}b\nc\n".encode())
        assert generated_text.find_name_problem(f"a{chr(code)}b")


def test_names_end_with_the_lines_of_any_system() -> None:
    assert parse_labels(b"\xef\xbb\xbfa\r\n b \rc\nd").names == ("a", "b", "c", "d")

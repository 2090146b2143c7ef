"""`run-model`: what is run, written and shown, and what is said of a file that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow import cli


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five rows of three numbers, for a bundle that takes two at a time."""
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(15, dtype="float32").reshape(5, 3))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = cli.main(["run-model", *map(str, words)])
    return code, *capsys.readouterr()


def test_all_samples_of_a_file_are_run_and_their_outputs_written(
    small_bundle: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In batches of the model's size; what filled up the last one is not among the outputs."""
    written = tmp_path / "y.npz"
    code, out, _ = run(capsys, small_bundle, "--input", data, "--output", written)
    assert code == 0
    assert "ran on 5 samples" in out
    x = np.arange(15, dtype="float32").reshape(5, 3)
    with np.load(written) as found:
        np.testing.assert_array_equal(found["plus_one"], x + 1)
        np.testing.assert_array_equal(found["twice"], x * 2)
    assert sorted(tmp_path.iterdir()) == [data, written]


def test_an_output_may_be_called_file(
    file_bundle: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is what NumPy calls the file that it writes to."""
    written = tmp_path / "y.npz"
    assert run(capsys, file_bundle, "--input", data, "--output", written)[0] == 0
    with np.load(written) as found:
        np.testing.assert_array_equal(found["file"], np.load(data)["x"] + 1)


def test_the_largest_outputs_of_each_sample_are_shown(
    small_bundle: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest first, with their places."""
    _, out, _ = run(capsys, small_bundle, "--input", data, "--top", 2, "--json")
    assert json.loads(out)["top"]["twice"][1] == [[2, 10.0], [1, 8.0]]


@pytest.mark.parametrize(("fill", "twice"), [("zeros", 0.0), ("ones", 2.0)])
def test_inputs_can_be_filled(
    small_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fill: str,
    twice: float,
) -> None:
    """With one number everywhere."""
    run(capsys, small_bundle, "--fill", fill, "--output", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        np.testing.assert_array_equal(found["twice"], np.full((2, 3), twice))


def test_random_inputs_follow_their_seed(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same seed gives the same, another one another."""
    outputs = []
    for seed in (1, 1, 2):
        run(capsys, small_bundle, "--seed", seed, "--output", tmp_path / "y.npz")
        with np.load(tmp_path / "y.npz") as found:
            outputs.append(found["twice"])
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert (outputs[0] != outputs[2]).any()


def test_times_and_operators_are_shown(
    small_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a call takes, and each kernel's part of it."""
    words = (small_bundle, "--print-time", "--profile", "--repeat", 3)
    code, out, _ = run(capsys, *words)
    assert code == 0
    header = next(line for line in out.splitlines() if "median" in line)
    assert header.split() == ["mean", "median", "max", "min", "std"]
    assert any(line.split()[1] == "1" for line in out.splitlines() if line.startswith("add"))
    _, out, _ = run(capsys, *words, "--json")
    report = json.loads(out)
    assert 0 < report["ms"]["min"] <= report["ms"]["median"] <= report["ms"]["max"]
    names = {each["name"]: each["us"] for each in report["operators"]}
    assert {"add", "multiply"} <= set(names) and min(names.values()) >= 0


@pytest.mark.parametrize(
    ("arrays", "needle"),
    [
        ({"z": np.ones((2, 3))}, "there is no array 'x' (there are ['z'])"),
        ({"x": np.ones((2, 4), "float32")}, "'x' has shape (2, 4), the model takes (2, 3)"),
    ],
)
def test_a_file_that_does_not_fit_is_a_sentence(
    small_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arrays: dict[str, Any],
    needle: str,
) -> None:
    """Exit code 2, the file, what is wrong with it, and what the model takes."""
    path = tmp_path / "wrong.npz"
    np.savez(path, **arrays)
    code, _, err = run(capsys, small_bundle, "--input", path)
    assert code == 2
    assert f"--input {path} does not fit the model: " in err and needle in err
    assert "x: float32[2, 3]" in err


def test_files_that_are_not_there_or_cannot_be_written_are_sentences(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its name."""
    code, _, err = run(capsys, small_bundle, "--input", tmp_path / "none.npz")
    assert (code, "--input: there is no file" in err) == (2, True)
    code, _, err = run(capsys, tmp_path / "none.tvmflow")
    assert (code, "there is no file" in err) == (1, True)
    code, _, err = run(capsys, small_bundle, "--output", tmp_path / "no" / "y.npz")
    assert (code, "cannot be written: No such file or directory" in err) == (4, True)
    code, _, _ = run(capsys, small_bundle, "--repeat", "0")
    assert code == 2

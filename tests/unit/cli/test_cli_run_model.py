"""`run-model`: what it runs, writes and shows, and its errors for files that do not fit."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.images import brightness_module, write_images
from tests.support.trace_checks import check_trace
from tvmflow.cli import main
from tvmflow.core import signing
from tvmflow.core.errors import EXIT_USAGE
from tvmflow.runtime import loading


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five rows of three numbers, for a bundle with a batch of two."""
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(15, dtype="float32").reshape(5, 3))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main.main(["run-model", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_all_samples_of_a_file_are_run_and_their_outputs_written(
    small_bundle: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In batches of the model's size; samples that only fill the last batch are not written."""
    written = tmp_path / "y.npz"
    code, out, _ = run(capsys, small_bundle, "--input", data, "--output", written)
    assert code == 0
    assert "ran on 5 samples" in out
    x = np.arange(15, dtype="float32").reshape(5, 3)
    with np.load(written) as arrays:
        np.testing.assert_array_equal(arrays["plus_one"], x + 1)
        np.testing.assert_array_equal(arrays["twice"], x * 2)
    assert sorted(tmp_path.iterdir()) == [data, written]


def test_an_output_can_have_the_name_file(
    file_bundle: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NumPy has a parameter of this name when it writes a file."""
    written = tmp_path / "y.npz"
    assert run(capsys, file_bundle, "--input", data, "--output", written)[0] == 0
    with np.load(written) as arrays:
        np.testing.assert_array_equal(arrays["file"], np.load(data)["x"] + 1)


def test_the_largest_outputs_of_each_sample_are_shown(
    small_bundle: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest first, with their positions."""
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
    """With the same number everywhere."""
    run(capsys, small_bundle, "--fill", fill, "--output", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as arrays:
        np.testing.assert_array_equal(arrays["twice"], np.full((2, 3), twice))


def test_random_inputs_follow_their_seed(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same seed gives the same numbers, another seed others."""
    outputs = []
    for seed in (1, 1, 2):
        run(capsys, small_bundle, "--seed", seed, "--output", tmp_path / "y.npz")
        with np.load(tmp_path / "y.npz") as arrays:
            outputs.append(arrays["twice"])
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert (outputs[0] != outputs[2]).any()


def test_times_and_operators_are_shown(
    small_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latency of a call, and the time of each kernel."""
    arguments = (small_bundle, "--print-time", "--profile", "--repeat", 3)
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    header = next(line for line in out.splitlines() if "median" in line)
    assert header.split() == ["mean", "median", "max", "min", "std"]
    assert any(line.split()[1] == "1" for line in out.splitlines() if line.startswith("add"))
    _, out, _ = run(capsys, *arguments, "--json")
    report = json.loads(out)
    assert 0 < report["ms"]["min"] <= report["ms"]["median"] <= report["ms"]["max"]
    names = {row["name"]: row["us"] for row in report["operators"]}
    assert {"add", "multiply"} <= set(names) and min(names.values()) >= 0


def test_a_trace_has_the_kernels_of_each_call(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within the slice of the call; without the store that built it, their nodes are not known."""
    written = tmp_path / "t.json"
    code, out, _ = run(capsys, small_bundle, "--trace", written, "--repeat", 2)
    assert code == 0
    assert f"trace of 2 calls: {written}" in out
    assert "the nodes that its kernels compute are not known" in out
    (items,) = check_trace(json.loads(written.read_text())).slices.values()
    names = [item["name"] for item in items if not item["name"].startswith("vm.")]
    assert [name for name in names if name in ("call 1", "call 2", "add", "multiply")] == [
        *("call 1", "add", "multiply"),
        *("call 2", "add", "multiply"),
    ]
    assert run(capsys, small_bundle, "--trace", small_bundle)[0] == EXIT_USAGE


@pytest.mark.parametrize(
    ("arrays", "needle"),
    [
        ({"z": np.ones((2, 3))}, "there is no array 'x' (there are ['z'])"),
        ({"x": np.ones((2, 4), "float32")}, "'x' has shape (2, 4), the model takes (2, 3)"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error(
    small_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arrays: dict[str, Any],
    needle: str,
) -> None:
    """Exit code 2 with the file, the problem, and the inputs of the model."""
    path = tmp_path / "wrong.npz"
    np.savez(path, **arrays)
    code, _, err = run(capsys, small_bundle, "--input", path)
    assert code == 2
    assert f"{path} does not fit the model: " in err and needle in err


def test_missing_and_unwritable_files_are_errors(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the name of the file."""
    code, _, err = run(capsys, small_bundle, "--input", tmp_path / "none.npz")
    assert (code, "there is no file" in err) == (2, True)
    code, _, err = run(capsys, tmp_path / "none.tvmflow")
    assert (code, "there is no file" in err) == (2, True)
    code, _, err = run(capsys, small_bundle, "--output", tmp_path / "no" / "y.npz")
    assert (code, "cannot be written: No such file or directory" in err) == (4, True)
    code, _, _ = run(capsys, small_bundle, "--repeat", "0")
    assert code == 2


def test_a_folder_is_no_bundle(small_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the bundle in it."""
    code, _, err = run(capsys, small_bundle.parent)
    assert (code, err) == (
        2,
        f"tvmflow: {small_bundle.parent} is a folder, not a file\n"
        f"  fix: name the bundle in it: {small_bundle}\n",
    )


def test_a_model_is_named_only_for_a_comparison(
    small_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who forgot --compare would believe that it agrees."""
    code, _, err = run(capsys, small_bundle, "--model", "net.onnx")
    assert (code, "add --compare" in err) == (2, True)


def test_only_what_a_trusted_key_signed_is_run(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 with the reason; tests/unit/runtime/test_trust.py signs one."""
    signing.generate_key(tmp_path / "key")
    bundle = tmp_path / "net.tvmflow"
    bundle.write_bytes(small_bundle.read_bytes())
    code, _, err = run(capsys, bundle, "--trusted", tmp_path / "key.pub")
    assert code == 1 and "no trusted key signed for it: no statement of provenance" in err
    code, _, err = run(capsys, bundle, "--trusted", tmp_path / "gone.pub")
    assert code == 2 and "there is no key" in err


# ---------------------------------------------------------------- files with inputs


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", b"1 2 3\n4 5 6"),
        ("x.csv", b"# a comment\n1,2,3\n4;5;6\n"),
        ("x.npy", np.arange(1, 7, dtype="float64").reshape(2, 3)),
    ],
)
def test_an_input_may_be_an_array_or_numbers_as_text(
    small_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: Any,
) -> None:
    """In the shape of the input, with or without its name; few numbers of an output are all shown."""
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    for word in (path, f"x={path}"):
        code, out, _ = run(capsys, small_bundle, word)
        assert code == 0 and "twice: float32[2, 3] = 2 4 6 8 10 12" in out
    _, out, _ = run(capsys, small_bundle, path, "--json")
    assert json.loads(out)["summaries"]["twice"]["max"] == 12


def test_numbers_come_from_the_standard_input(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `-`, once."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"0 0 0 0 0 1")))
    code, out, _ = run(capsys, small_bundle, "-")
    assert code == 0 and "plus_one: float32[2, 3] = 1 1 1 1 1 2" in out
    code, _, err = run(capsys, small_bundle, "-", "-")
    assert code == 2 and "named more than once" in err


def test_outputs_that_are_no_numbers_are_counted(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is summarized."""
    path = tmp_path / "x.txt"
    path.write_text("nan inf 1 2 3 4")
    _, out, _ = run(capsys, small_bundle, path)
    assert "twice: float32[2, 3] from 2 to 8, mean 5, 1 NaN, 1 infinite" in out


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b"1 2 3 4", "has 4 numbers, and the input 'x' takes [2, 3]"),
        (b"", "has 0 numbers"),
        (b"1 2 three", "neither an npz nor an npy file, nor an image, nor numbers as text"),
        (b"\xff\xfe", "neither an npz"),
        (b"1 2 3 4 5 1e300", "has 1e+300, which float32 cannot hold"),
        (b"\x93NUMPY", "is not an npy file"),
        (b"PK\x03\x04", "is a damaged archive"),
        (np.zeros((2, 3), "uint8"), "'x' is uint8, the model takes float32: convert it, scaled"),
    ],
)
def test_a_file_of_another_kind_is_an_error(
    small_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Any,
    needle: str,
) -> None:
    """Exit code 2, and what to do."""
    path = tmp_path / "x.dat"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with path.open("wb") as stream:
            np.save(stream, content)
    code, _, err = run(capsys, small_bundle, path)
    assert code == 2 and needle in err and "fix: " in err


# ---------------------------------------------------------------- images


def test_the_best_classes_of_images_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, with probabilities, and what those are; as JSON too."""
    monkeypatch.setattr(loading, "load", lambda *_, **__: brightness_module())
    bundle = tmp_path / "x.tvmflow"
    bundle.touch()
    light, dark, gray = write_images(tmp_path)
    code, out, _ = run(capsys, bundle, light, dark, gray, "--top", 1)
    assert code == 0
    assert out.splitlines()[1:] == [
        "ran on 3 samples",
        "probabilities: softmax of the output 'scores'",
        f"{light}:",
        "   99.99%  light",
        f"{dark}:",
        "   99.98%  dark",
        f"{gray}:",
        "   99.98%  gray",
    ]
    _, out, _ = run(capsys, bundle, dark, "--json")
    (image,) = json.loads(out)["predictions"]
    assert image["file"] == str(dark)
    assert [best["label"] for best in image["classes"]] == ["dark", "gray", "light"]


def test_images_that_cannot_be_run_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with exit code 2 and what to do."""
    made = [brightness_module()]
    monkeypatch.setattr(loading, "load", lambda *_, **__: made[0])
    bundle = tmp_path / "x.tvmflow"
    bundle.touch()
    (light, *_) = write_images(tmp_path)
    (tmp_path / "text.png").write_text("no image")
    code, _, err = run(capsys, bundle, light, tmp_path / "text.png")
    assert code == 2 and "text.png cannot be read as an image" in err
    code, _, err = run(capsys, bundle, light, tmp_path / "none.png")
    assert code == 2 and "there is no file" in err and "none.png" in err
    made[0] = brightness_module(images={})
    code, _, err = run(capsys, bundle, light)
    assert code == 2 and "no input of this model takes images" in err
    monkeypatch.setitem(sys.modules, "PIL", None)
    made[0] = brightness_module()
    code, _, err = run(capsys, bundle, light)
    assert code == 4 and "pip install pillow" in err

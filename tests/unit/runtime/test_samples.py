"""Samples: inputs from files and at random, batches, joined outputs, and messages for arrays that do not fit."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.mutations import mutate_bytes
from tvmflow.core.errors import StageError
from tvmflow.core.types import Dimension, Feed, TensorSpec
from tvmflow.runtime import npz, samples
from tvmflow.runtime.npz import read_npz

F = np.float32
IMAGE = TensorSpec("data", (2, 3), "float32")


def save(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def read(path: Path, *inputs: TensorSpec) -> samples.Samples:
    return samples.make_samples(
        inputs or (IMAGE,), read_npz(path, "verify.data"), source="verify.data"
    )


def test_samples_are_cut_into_batches_and_the_last_is_filled_up(tmp_path: Path) -> None:
    """Five samples for a library of batch size two: three batches, of which five samples count."""
    data = np.arange(15, dtype=F).reshape(5, 3)
    loaded = read(save(tmp_path, data=data, label=np.arange(5)))
    assert [batch["data"].shape for batch in loaded.batches] == [(2, 3)] * 3
    assert loaded.total == 5
    np.testing.assert_array_equal(np.concatenate([b["data"] for b in loaded.batches])[:5], data)


@pytest.mark.parametrize("rows", [2, 5])
def test_numbers_that_float32_does_not_reach_are_refused(rows: int, tmp_path: Path) -> None:
    """One batch as it is, and several: the file has numbers, and infinity would be none of its own."""
    data = np.ones((rows, 3))
    data[0, 0], data[1, 1] = 1e300, np.inf
    path = save(tmp_path, data=data)
    with pytest.raises(StageError, match=r"verify.data: 'data' is float64 and has values beyond"):
        _ = read(path).batches[0]
    data[0, 0] = -3e38
    np.testing.assert_array_equal(
        read(save(tmp_path, data=data)).batches[0]["data"], data[:2].astype(F)
    )


def test_outputs_come_together_without_the_padding(tmp_path: Path) -> None:
    """An output without samples along its first axis is left whole."""
    data = np.arange(15, dtype=F).reshape(5, 3)

    def run(feed: Feed) -> Feed:
        return {"sum": feed["data"].sum(axis=1), "constant": np.ones(7, F), "scalar": F(1)}

    outputs = samples.run_samples(run, read(save(tmp_path, data=data)))
    np.testing.assert_array_equal(outputs["sum"], data.sum(axis=1))
    assert outputs["constant"].shape == (21,)
    assert outputs["scalar"].shape == (3,)


def test_inputs_of_the_models_own_shapes_are_taken_as_they_are(tmp_path: Path) -> None:
    """Whatever their first axes mean: a table of 9 rows beside a batch of 2, and a scalar."""
    specs = (IMAGE, TensorSpec("table", (9, 4), "int64"), TensorSpec("scale", (), "float32"))
    path = save(tmp_path, data=np.ones((2, 3), F), table=np.ones((9, 4), np.int32), scale=F(2))
    (feed,) = read(path, *specs).batches
    assert {name: (v.shape, str(v.dtype)) for name, v in feed.items()} == {
        "data": ((2, 3), "float32"),
        "table": ((9, 4), "int64"),
        "scale": ((), "float32"),
    }


@pytest.mark.parametrize(
    ("arrays", "needle"),
    [
        ({"other": np.ones((2, 3), F)}, "there is no array 'data'"),
        ({"data": np.ones((2, 4), F)}, "'data' has shape"),
        ({"data": np.ones((2, 3, 1), F)}, "'data' has shape"),
        ({"data": np.ones((2, 3), np.complex64)}, "complex64"),
        ({"data": np.ones((0, 3), F)}, "'data' has shape"),
        ({"data": np.ones((2, 3), F), "label": np.ones(3)}, "2 samples and 3 labels"),
        ({"data": np.ones((5, 3), F), "label": np.ones(3)}, "5 samples and 3 labels"),
    ],
)
def test_data_that_does_not_fit_is_explained(
    tmp_path: Path, arrays: dict[str, Any], needle: str
) -> None:
    """Missing, of another shape or type, empty, or with another number of labels."""
    with pytest.raises(StageError, match=needle) as caught:
        read(save(tmp_path, **arrays))
    assert caught.value.fix


STEP = (
    TensorSpec("chunk", (1, 4), "float32"),
    TensorSpec("state", (2, 1, 3), "float32"),
    TensorSpec("rate", (), "int64"),
)


def test_samples_are_stacked_where_the_first_axis_is_something_else(tmp_path: Path) -> None:
    """A state of two layers: each sample is a whole state, and so is each of the outputs."""
    chunk, state = (
        np.arange(20, dtype=F).reshape(5, 1, 4),
        np.arange(30, dtype=F).reshape(5, 2, 1, 3),
    )
    path = save(tmp_path, chunk=chunk, state=state, rate=np.int32(8), label=np.arange(5))
    loaded = read(path, *STEP)
    assert (loaded.total, len(loaded.batches)) == (5, 5)
    for place, feed in enumerate(loaded.batches):
        np.testing.assert_array_equal(feed["chunk"], chunk[place])
        np.testing.assert_array_equal(feed["state"], state[place])
        assert (feed["rate"].shape, feed["rate"].dtype, int(feed["rate"])) == ((), np.int64, 8)

    def run(feed: Feed) -> Feed:
        return {"next": feed["state"] + F(1), "score": feed["chunk"].sum()}

    outputs = samples.run_samples(run, loaded)
    np.testing.assert_array_equal(outputs["next"], state + 1)
    np.testing.assert_array_equal(outputs["score"], chunk.sum(axis=(1, 2)))


def test_stacked_samples_are_divided_where_sizes_are_open() -> None:
    """They have the sizes of the arrays."""
    chunk = TensorSpec("chunk", (1, 8), "float32", sizes=(1, "T"))
    arrays = {"chunk": np.ones((3, 1, 5), F), "state": np.ones((3, 2, 1, 3), F)}
    read = samples.make_samples(
        (chunk, STEP[1]), arrays, source="verify.data", dimensions=(Dimension("T", 1, 8),)
    )
    assert (read.total, [feed["chunk"].shape for feed in read.batches]) == (3, [(1, 5)] * 3)
    arrays["chunk"] = np.ones((3, 1, 9), F)
    with pytest.raises(StageError, match="9"):
        samples.make_samples(
            (chunk, STEP[1]), arrays, source="verify.data", dimensions=(Dimension("T", 1, 8),)
        )


def test_numbered_arrays_may_have_stacked_samples() -> None:
    """Each number has sizes of its own; of some numbers alone, outputs would not be one array."""
    chunk = TensorSpec("chunk", (1, 8), "float32", sizes=(1, "T"))
    arrays = {
        f"{number}/{name}": np.ones((count, *shape), F)
        for number, count in enumerate((3, 4))
        for name, shape in (("chunk", (1, 5 + number)), ("state", (2, 1, 3)))
    }
    inputs, dimensions = (chunk, STEP[1]), (Dimension("T", 1, 8),)
    loaded = samples.make_samples(inputs, arrays, source="verify.data", dimensions=dimensions)
    outputs = samples.run_samples(lambda feed: {"next": feed["state"]}, loaded)
    assert (loaded.total, outputs["next"].shape) == (7, (7, 2, 1, 3))
    arrays |= {"1/chunk": np.ones((1, 6), F), "1/state": np.ones((2, 1, 3), F)}
    with pytest.raises(StageError, match="some of its numbered arrays") as caught:
        samples.make_samples(inputs, arrays, source="verify.data", dimensions=dimensions)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("arrays", "needle"),
    [
        ({"state": np.ones((4, 2, 1, 3), F)}, "not have the same number of samples"),
        ({"state": np.ones((5, 2, 1, 4), F)}, r"'state' has shape \(5, 2, 1, 4\)"),
        ({"state": np.ones((2, 2, 3), F)}, r"'state' has shape \(2, 2, 3\)"),
        ({"state": np.ones((5, 2, 1, 3), "complex64")}, "complex64"),
        ({"label": np.arange(4)}, "5 samples and 4 labels"),
    ],
)
def test_stacked_samples_that_do_not_fit_are_explained(
    tmp_path: Path, arrays: dict[str, Any], needle: str
) -> None:
    """Other numbers of samples or labels, shapes and types."""
    own = {"chunk": np.ones((5, 1, 4), F), "state": np.ones((2, 1, 3), F), "rate": np.int64(8)}
    with pytest.raises(StageError, match=needle) as caught:
        read(save(tmp_path, **{**own, **arrays}), *STEP)
    assert caught.value.fix


@pytest.mark.parametrize(
    "labels", [np.int64(3), np.zeros((5, 4)), np.array(["cat"] * 5)], ids=["one", "rows", "names"]
)
@pytest.mark.parametrize("dimensions", [(), (Dimension("N", 1, 2),)], ids=["fixed", "open"])
def test_labels_that_are_not_one_number_each_are_explained(
    dimensions: tuple[Dimension, ...], labels: Any
) -> None:
    """A single number had no length, and of rows or names no accuracy follows."""
    spec = TensorSpec("data", (2, 3), "float32", sizes=("N", 3) if dimensions else ())
    arrays = {"data": np.ones((5, 3), F), "label": np.asarray(labels)}
    with pytest.raises(StageError, match="labels are one number for each sample") as caught:
        samples.make_samples((spec,), arrays, source="verify.data", dimensions=dimensions)
    assert caught.value.fix


def test_an_input_with_the_name_of_labels_is_an_input() -> None:
    """Its array has no labels."""
    spec = TensorSpec("label", (2, 3), "float32")
    read = samples.make_samples((spec,), {"label": np.ones((4, 3), F)}, source="verify.data")
    assert (len(read.batches), read.labels) == (2, None)


@pytest.mark.parametrize("shape", [(20,), (0, 10)])
def test_accuracy_of_an_output_without_scores_is_refused(shape: tuple[int, ...]) -> None:
    """Such as a sum over the batch, of which no sample has one."""
    with pytest.raises(StageError, match=r"'y' has shape .* for 40 labels") as caught:
        samples.top1_accuracy({"y": np.zeros(shape, F)}, "y", np.zeros(40))
    assert caught.value.fix


@pytest.mark.parametrize("name", ["data", "0/data"])
def test_no_samples_are_refused_where_their_number_is_open(name: str) -> None:
    """No batch follows from them."""
    spec = TensorSpec("data", (2, 3), "float32", sizes=("N", 3))
    with pytest.raises(StageError, match="does not fit the model") as caught:
        samples.make_samples(
            (spec,),
            {name: np.ones((0, 3), F)},
            source="quantize.data",
            dimensions=(Dimension("N", 1, 2),),
        )
    assert "N" in caught.value.message


@pytest.mark.parametrize("read", [npz.open_npz, npz.read_npz])
@pytest.mark.parametrize("count", [1, 5_000])
def test_arrays_of_objects_are_refused_as_such(
    count: int, read: Callable[..., Any], tmp_path: Path
) -> None:
    """Their elements take fewer bytes in the file than in memory, and were said to be missing."""
    path = save(tmp_path, data=np.array([None] * count))
    with pytest.raises(StageError, match=r"'data\.npy' holds Python objects"):
        read(path, "quantize.data")


def test_missing_labels_are_an_error(tmp_path: Path) -> None:
    """The message names the setting that needs them."""
    path = save(tmp_path, data=np.ones((4, 3), F))
    with pytest.raises(StageError, match=r"verify.min_accuracy is set and there is no array 'y'"):
        samples.make_samples(
            (IMAGE,),
            read_npz(path, "verify.data"),
            source="verify.data",
            label="y",
            labels_needed_by="verify.min_accuracy",
        )


def test_a_file_that_is_no_npz_is_explained(tmp_path: Path) -> None:
    """Whatever it is."""
    path = tmp_path / "data.npz"
    path.write_bytes(b"not a zip")
    with pytest.raises(StageError, match=r"verify\.data is not an npz file"):
        read(path)


def test_random_inputs_are_seeded_and_stay_in_their_range() -> None:
    """The same seed gives the same inputs; integers reach both ends."""
    specs = (TensorSpec("f", (4, 50), "float32"), TensorSpec("i", (4, 50), "uint8"))
    ranges = {"f": (-2.0, -1.0), "i": (7.0, 9.0)}
    first, second = (samples.random_samples(specs, ranges, batches=2, seed=3) for _ in range(2))
    for a, b in zip(first.batches, second.batches, strict=True):
        np.testing.assert_array_equal(a["f"], b["f"])
        assert a["f"].min() >= -2 and a["f"].max() <= -1
        assert set(np.unique(a["i"])) == {7, 8, 9}
        assert (a["f"].dtype, a["i"].dtype) == (F, np.uint8)


@pytest.mark.parametrize(
    ("values", "dtype", "problem"),
    [
        ([0, 255], "uint8", "holds -128 to 127"),
        ([0, 127], "uint8", ""),
        ([1, 2], "int64", ""),
        ([-(1 << 40), 2], "int64", "holds -128 to 127"),
        ([1.0, 2.0], "float32", "'data' is float32, the model takes int8"),
    ],
)
def test_integers_become_others_that_hold_them(
    tmp_path: Path, values: list[float], dtype: str, problem: str
) -> None:
    """They never wrap around."""
    path = save(tmp_path, data=np.array([values], dtype))
    spec = TensorSpec("data", (1, 2), "int8")
    if not problem:
        np.testing.assert_array_equal(read(path, spec).batches[0]["data"], [values])
        return
    with pytest.raises(StageError, match=problem):
        read(path, spec)


def test_a_damaged_npz_file_is_read_or_refused() -> None:
    """Flipped, cut and repeated bytes, and headers of arrays that no memory holds: always the same error."""
    made = io.BytesIO()
    np.savez_compressed(made, data=np.ones((2, 3), np.float32), label=np.arange(2))
    content = made.getvalue()
    files = [mutate_bytes(random.Random(seed), content) for seed in range(300)]
    for shape, dtype in (("(10**15,)", "<f4"), ("(1000000000000000,)", "<f4"), ("(1,)", "|O")):
        head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("data.npy", b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head)
        files.append(made.getvalue())
    refused = 0
    for file in files:
        try:
            read_npz(io.BytesIO(file), "data.npz")
        except StageError as error:
            assert error.message.startswith("data.npz is not an npz file of plain arrays: ")
            refused += 1
    assert refused > 200


def test_a_small_npz_file_takes_no_more_memory_than_its_size_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Arrays that unpack to more are refused before one is read, those that no input has included."""
    monkeypatch.setattr(npz, "_MAX_NPZ", 1 << 20)
    monkeypatch.setattr(npz, "_MAX_ARRAYS", 100)
    np.savez_compressed(tmp_path / "a.npz", data=np.zeros((4, 3)), other=np.zeros(1 << 19))
    with pytest.raises(StageError, match="its arrays have 4,194,656 bytes when they are unpacked"):
        read_npz(tmp_path / "a.npz", "verify.data")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        head = b"\x93NUMPY\2\0" + (1 << 16).to_bytes(4, "little")
        archive.writestr("data.npy", head + bytes(1 << 16))
    with pytest.raises(StageError, match=r"'data\.npy' is not an array, or has fields"):
        read_npz(tmp_path / "b.npz", "verify.data")
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        for number in range(101):
            archive.writestr(f"{number}", b"")
    with pytest.raises(StageError, match="it holds 101 arrays, and the limit is 100"):
        read_npz(tmp_path / "c.npz", "verify.data")

"""Large weights of ONNX models stay in their files until they are used, and are the same weights then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_models import model, value
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.frontends.onnx import graph
from tvmflow.frontends.onnx.graph import array_of, place_of, read_without_large_tensors

frontend = FRONTENDS["onnx"]

GIB = 1 << 30


def weights(seed: int) -> list[TensorProto]:
    """Return weights of several types, small and large, in each of the fields that ONNX has for data."""
    rng = np.random.default_rng(seed)
    tensors = []
    for index, dtype in enumerate(
        ("float32", "float64", "float16", "int8", "uint8", "int64", "bool")
    ):
        shape = tuple(int(size) for size in rng.integers(1, 9, rng.integers(1, 4)))
        array = (rng.standard_normal(shape) * 100).astype(dtype)
        name = f"w{index}"
        if dtype.startswith("float") and rng.integers(2):
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            tensors.append(helper.make_tensor(name, kind, shape, array.ravel()))
        else:
            tensors.append(numpy_helper.from_array(array, name))
    return [tensors[index] for index in rng.permutation(len(tensors))]


def summed(tensors: list[TensorProto]) -> onnx.ModelProto:
    """Return a model whose outputs are the weights as float32, each plus an input; the importer reads it to cast it."""
    nodes, outputs = [], []
    for tensor in tensors:
        name = tensor.name
        nodes.append(helper.make_node("Cast", [name], [f"{name}_cast"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Add", [f"{name}_cast", "x"], [f"{name}_out"]))
        outputs.append(value(f"{name}_out", None))
    made = model(nodes, [value("x", [1])], outputs)
    made.graph.initializer.extend(tensors)
    return made


def load(path: Path, **external: Path) -> LoadedModel:
    return frontend.load({"model": path, **{f"external/{k}": v for k, v in external.items()}}, ())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_external", [False, True])
def test_weights_in_files_give_the_same_model(
    seed: int, is_external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their types and fields, and whether they are in the model's file or in another."""
    path = tmp_path / "m.onnx"
    onnx.save(
        summed(weights(seed)),
        path,
        save_as_external_data=is_external,
        location="data",
        size_threshold=0,
    )
    external = {"data": tmp_path / "data"} if is_external else {}
    expected = load(path, **external)
    monkeypatch.setattr(graph, "_MIN_BYTES", 24)
    actual = load(path, **external)
    assert tvm.ir.save_json(actual.mod) == tvm.ir.save_json(expected.mod)
    assert list(actual.params) == list(expected.params)
    for name, array in expected.params.items():
        np.testing.assert_array_equal(actual.params[name], array)


@pytest.mark.parametrize("seed", range(4))
def test_values_are_read_where_they_are(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that stays in the file has its name, type and shape in the model, and its values there."""
    monkeypatch.setattr(graph, "_MIN_BYTES", 24)
    tensors = weights(seed)
    path = tmp_path / "m.onnx"
    onnx.save(summed(tensors), path)
    read = {tensor.name: tensor for tensor in read_without_large_tensors(path).graph.initializer}
    staying = [name for name, tensor in read.items() if place_of(tensor)]
    assert staying
    for tensor in tensors:
        assert (read[tensor.name].data_type, read[tensor.name].dims) == (
            tensor.data_type,
            tensor.dims,
        )
        np.testing.assert_array_equal(array_of(read[tensor.name]), numpy_helper.to_array(tensor))


def test_changes_of_an_array_do_not_reach_the_file(tmp_path: Path) -> None:
    """The file may be the user's own."""
    weight = numpy_helper.from_array(np.ones(1 << 16, np.float32), "w")
    path = tmp_path / "m.onnx"
    onnx.save(summed([weight]), path)
    before = path.read_bytes()
    (tensor,) = read_without_large_tensors(path).graph.initializer
    assert place_of(tensor)
    array_of(tensor)[:] = 2
    assert path.read_bytes() == before


def test_a_model_of_more_than_two_gibibytes_is_imported(tmp_path: Path) -> None:
    """Protobuf can hold no such model; its weights are mapped, so that they need no memory here."""
    side = 25_000
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[side, side])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="data")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    made = model(nodes, [value("x", [1, side])], [value("y", None)])
    made.graph.initializer.append(weight)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with (tmp_path / "data").open("wb") as stream:
        # a hole at the end: the file takes no disk
        stream.truncate(4 * side * side)
    loaded = load(tmp_path / "m.onnx", data=tmp_path / "data")
    assert loaded.params["w"].nbytes > 2 * GIB
    assert loaded.outputs[0].shape == (1, side)


@pytest.mark.parametrize("missing", [4, -4])
def test_data_of_another_size_than_the_shape_is_refused(missing: int, tmp_path: Path) -> None:
    """A large weight is checked like a small one."""
    weight = numpy_helper.from_array(np.ones(1 << 16, np.float32), "w")
    content = weight.raw_data + bytes(4)
    weight.raw_data = content[: len(content) - 4 - missing]
    onnx.save(summed([weight]), tmp_path / "m.onnx")
    with pytest.raises(ImportFailed, match="bytes of data, and needs"):
        load(tmp_path / "m.onnx")


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    """Also where the cut is in the data of a large weight."""
    path = tmp_path / "m.onnx"
    onnx.save(summed([numpy_helper.from_array(np.ones(1 << 16, np.float32), "w")]), path)
    path.write_bytes(path.read_bytes()[: 1 << 17])
    with pytest.raises(ImportFailed, match="not an ONNX model"):
        load(path)

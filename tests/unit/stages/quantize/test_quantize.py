"""`quantize`: a float model on calibration data becomes one of integers, whatever it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper, numpy_helper

from tests.support.onnx_models import model, save, value
from tests.unit.frontends.tflite.tflite_cases import make
from tests.unit.stages.quantize.quantizing import (
    AVX2,
    RNG,
    VNNI,
    import_files,
    list_kernels,
    run,
    settings_of,
)
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.errors import StageError
from tvmflow.graph import ir
from tvmflow.runtime.weights import read_safetensors
from tvmflow.stages import import_model, quantize
from tvmflow.stages.base import KnownFacts, parse_settings
from tvmflow.stages.quantize import calibration, conversion
from tvmflow.stages.quantize.calibration import ModelObserver, Signature
from tvmflow.stages.quantize.points import FloatModel, fold_model, list_layers
from tvmflow.targets.host import read_host

DIGITS = Path(__file__).resolve().parents[4] / "recipes" / "models"


def test_layers_become_integers(files: dict[str, Path], tmp_path: Path) -> None:
    """Convolutions and the dense layer multiply int8, and tensors between them stay int8."""
    facts = run(settings_of(), files, tmp_path / "once")
    assert [(layer.name, layer.weight_bits, layer.data_bits) for layer in facts.layers] == [
        ("first", 8, 8),
        ("second", 8, 8),
        ("shortcut", 8, 8),
        ("head", 8, 8),
    ]
    assert facts.samples == 8
    assert 0 < (facts.error or 0) < 0.03
    assert facts.weight_bytes is not None and facts.weight_bytes < facts.float_bytes / 2
    kernels = list_kernels(tmp_path / "once")
    products = [name for name in kernels if "quantized_" in name]
    assert len(products) == 4
    assert [name.rpartition(" ")[2] for name in products] == ["uint8"] * 2 + ["float32"] * 2


@pytest.mark.slow
def test_threads_do_not_matter(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread and several give the same bytes."""
    for threads in (1, 3):
        monkeypatch.setattr(calibration, "count_usable_cpus", lambda own=threads: own)
        run(settings_of(), files, tmp_path / f"of{threads}")
    for name in (import_model.MODEL, import_model.PARAMS):
        once, again = (tmp_path / f"of{threads}" / name for threads in (1, 3))
        assert once.read_bytes() == again.read_bytes()


@pytest.mark.slow
def test_one_library_knows_the_values_of_smoothed_tensors(tmp_path: Path) -> None:
    """They are those of the float model times powers of two, as the smoothed model computes them."""
    weights = {name: RNG.normal(0, 0.3, (16, 16)) for name in ("w0", "w1")}
    weights |= {"gain": np.where(np.arange(16) == 3, 100.0, 1.0), "shift": np.zeros(16)}
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["n"], "norm"),
        helper.make_node("MatMul", ["n", "w0"], ["a"], "query"),
        helper.make_node("MatMul", ["a", "w1"], ["y"], "key"),
    ]
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    made = model(nodes, [value("x", [4, 16])], [value("y", [4, 16])], arrays)
    imported = import_files(save(made, tmp_path), tmp_path / "import")
    settings = parse_settings(quantize.run, settings_of())
    signature = Signature(json.loads(imported["import/signature.json"].read_text()))
    plain = conversion._list_candidates(settings, signature, conversion._load(imported))
    batches = [{"x": RNG.normal(size=(4, 16)).astype(np.float32)} for _ in range(4)]
    smoothed = conversion._smooth(plain, batches)
    assert smoothed is not plain
    own = ModelObserver(smoothed.model, smoothed.ranged, signature)
    for tensors in zip(
        own.iterate_values(smoothed.ranged, batches),
        smoothed.observer.iterate_values(smoothed.ranged, batches),
        strict=True,
    ):
        (var, expected), (same, values) = tensors
        assert var.same_as(same) and np.array_equal(expected, values)


def test_the_numbers_do_not_depend_on_the_machine(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a target with AVX-512, kernels have its vectors; code for AVX2 gives the same bits, if more slowly."""
    host = read_host()
    if host.arch != "x86_64" or not host.flags >= {"avx2", "fma", "bmi2"}:
        pytest.skip("no x86-64 with AVX2")
    document = json.loads(files["import/signature.json"].read_text())
    model = fold_model(
        FloatModel(
            ir.load_module(files["import/model.json"]),
            read_safetensors(files["import/params.safetensors"]),
            (),
        )
    )
    features = frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
    outputs, cpus = [], []
    for flags in (host.flags | features, host.flags - features):
        if not flags <= host.flags:
            continue
        monkeypatch.setattr(calibration, "read_host", lambda: host._replace(flags=flags))  # noqa: B023
        targets = calibration.find_targets(VNNI.tvm)
        cpus.append([targets.kernels["mcpu"], targets.code["mcpu"]])
        module = Signature(document, VNNI.tvm).compile(model)
        data = np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)
        outputs.append(module.run({"x": data})["y"].tobytes())
        assert calibration.find_targets(AVX2.tvm).kernels["mcpu"] == "x86-64-v3"
    assert cpus[-1] == ["x86-64-v4", "x86-64-v3"] and cpus[0][0] == "x86-64-v4"
    assert len(set(outputs)) == 1


def test_an_error_without_a_limit_is_told_by_some_samples(
    files: dict[str, Path], tmp_path: Path
) -> None:
    """Limits, and labels, ask for all of them."""
    data = tmp_path / "data.npz"
    np.savez(data, x=RNG.normal(size=(80, 3, 8, 8)).astype(np.float32))
    plain = run(settings_of(), {**files, "data": data}, tmp_path / "plain")
    limited = run(settings_of(max_error=0.5), {**files, "data": data}, tmp_path / "limited")
    assert (plain.compared, limited.compared) == (64, 80)
    assert quantize.describe(plain, KnownFacts())[1].endswith("% (64 samples)")


def test_one_library_is_kept(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that take much memory, the next group's takes the place of the last one's, also for what follows."""
    compiled: list[Any] = []
    compile_for_weights = Signature.compile_for_weights

    def count(*arguments: Any) -> Any:
        compiled.append(arguments)
        return compile_for_weights(*arguments)

    monkeypatch.setattr(Signature, "compile_for_weights", count)
    monkeypatch.setattr(calibration, "_OBSERVED_BYTES", 16 * 8 * 8 * 4)
    signature = Signature(json.loads(files["import/signature.json"].read_text()))
    settings = parse_settings(quantize.run, settings_of())
    plain = conversion._list_candidates(settings, signature, conversion._load(files))
    batches = [{"x": RNG.normal(size=(1, 3, 8, 8)).astype(np.float32)}]
    inner = [var for var in plain.ranged if var not in [*plain.model.main.params]]
    assert {len(group) for group in plain.observer._groups} == {1}
    plain.observer.run(batches[0])
    following = plain.observer.follow({})
    for observer in (following, plain.observer):
        assert len(list(observer.iterate_values(inner[-1:], batches))) == 1
    assert len(compiled) == 2


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in read_host().flags, reason="the library is run")
def test_weights_of_7_bits_without_vnni(tmp_path: Path) -> None:
    """AVX2 adds two products of bytes as int16: the largest data and weights do not overflow it."""
    weights = np.tile(np.array([1, -1], np.float32), (8, 12))
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        [value("x", [1, 8])],
        [value("y", [1, 24])],
        {"w": weights},
    )
    files = import_files(save(made, tmp_path), tmp_path / "import")
    files["data"] = tmp_path / "data.npz"
    data = np.full((4, 8), 3, np.float32)
    np.savez(files["data"], x=data)
    facts = run(settings_of(AVX2), files, tmp_path / "out")
    assert [(layer.weight_bits, layer.data_bits) for layer in facts.layers] == [(7, 8)]
    params = read_safetensors(tmp_path / "out" / "params.safetensors")
    assert sorted({*params["product.int8"].ravel()}) == [-64, 64]
    signature = Signature(json.loads((tmp_path / "out" / "signature.json").read_text()))
    loaded = FloatModel(ir.load_module(tmp_path / "out" / "model.json"), params, ())
    lowered = lowering.lower(loaded.mod, tvm.target.Target(AVX2.tvm), LoweringOptions()).mod
    assert any("quantized_dense" in str(var.name_hint) for var in lowered.get_global_vars())
    outputs = signature.compile(loaded).run({"x": data[:1]})
    np.testing.assert_allclose(outputs["y"], data[:1] @ weights, rtol=1e-5)


@pytest.mark.parametrize("rank", [1, 3])
def test_sequences_and_volumes(rank: int, tmp_path: Path) -> None:
    """Convolutions over them multiply int8, as over images."""
    shapes = {"w0": (16, 3), "w1": (16, 1), "w2": (20, 16)}
    weights = {
        name: RNG.normal(0, 0.3, (*shape, *[3] * rank)).astype(np.float32)
        for name, shape in shapes.items()
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "first", pads=[1] * 2 * rank),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "w1"], ["c"], "depthwise", group=16, pads=[1] * 2 * rank),
        helper.make_node("Conv", ["c", "w2"], ["y"], "last", strides=[2] * rank),
    ]
    sizes = [1, 3, *[9] * rank]
    made = model(nodes, [value("x", sizes)], [value("y", [1, 20, *[4] * rank])], weights)
    files = import_files(save(made, tmp_path), tmp_path / "import")
    files["data"] = tmp_path / "data.npz"
    np.savez(files["data"], x=RNG.normal(size=(4, *sizes[1:])).astype(np.float32))
    facts = run(settings_of(), files, tmp_path / "out")
    kinds = [(layer.operator, layer.data_bits) for layer in facts.layers]
    assert kinds == [(f"conv{rank}d", 8), (f"depthwise_conv{rank}d", 8), (f"conv{rank}d", 8)]
    assert 0 < (facts.error or 0) < 0.03
    products = [name for name in list_kernels(tmp_path / "out") if "quantized_" in name]
    assert [name.rpartition(" ")[2] for name in products] == ["uint8", "uint8", "float32"]


def test_weights_alone(files: dict[str, Path], tmp_path: Path) -> None:
    """Without integers of data no data are read, and the error is that of the weights."""
    facts = run(settings_of(activations="none"), files, tmp_path / "weights")
    assert {(layer.weight_bits, layer.data_bits) for layer in facts.layers} == {(8, 32)}
    assert (facts.error or 1) < 0.02


def import_dynamic_shapes(
    nodes: list[onnx.NodeProto], weights: dict[str, Any], folder: Path, **data: Any
) -> dict[str, Path]:
    """Import a model of one input, 1 to 8 rows of 24 numbers, with samples."""
    columns = weights["w"].shape[1]
    made = model(nodes, [value("x", ["n", 24])], [value("y", ["n", columns])], weights)
    files = import_files(
        save(made, folder),
        folder / "import",
        dimensions={"n": {"min": 1, "max": 8}},
        x={"shape": ["n", 24], "dtype": "float32"},
    )
    np.savez(folder / "data.npz", **data)
    return {**files, "data": folder / "data.npz"}


def test_weights_of_a_model_with_dynamic_shapes(tmp_path: Path) -> None:
    """With integers of data, too, where these are inputs: intermediate tensors of dynamic shape are not calibrated."""
    weights = {"w": RNG.normal(0, 0.2, (24, 16)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    data = {"0/x": RNG.normal(size=(4, 24)).astype(np.float32)}
    files = import_dynamic_shapes(nodes, weights, tmp_path, **data)
    for activations, bits in (("none", 32), ("int8", 8)):
        facts = run(settings_of(activations=activations), files, tmp_path / activations)
        assert [(layer.weight_bits, layer.data_bits) for layer in facts.layers] == [(8, bits)]
        assert 0 < (facts.error or 0) < 0.02


@pytest.mark.parametrize("activations", ["int8", "none", "dynamic"])
def test_inner_tensors_of_dynamic_shapes_are_observed(activations: str, tmp_path: Path) -> None:
    """Calibration data of one size tell the ranges of all."""
    weights = {name: RNG.normal(0, 0.2, (24, 24)).astype(np.float32) for name in "vw"}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    data = {"x": RNG.normal(size=(4, 24)).astype(np.float32)}
    files = import_dynamic_shapes(nodes, weights, tmp_path, **data)
    facts = run(settings_of(activations=activations), files, tmp_path / "quantized")
    assert [layer.weight_bits for layer in facts.layers] == [8, 8]
    assert {layer.data_bits for layer in facts.layers} == {32 if activations == "none" else 8}
    assert 0 < (facts.error or 0) < 0.03


@pytest.mark.slow
def test_ranges_of_each_call(files: dict[str, Path], tmp_path: Path) -> None:
    """Matrix products read data whose range a call computes; convolutions stay float, which is said."""
    facts = run(settings_of(activations="dynamic"), files, tmp_path / "dynamic")
    assert [layer.data_bits for layer in facts.layers] == [32, 32, 32, 8]
    assert facts.layers[0].reason == "no matrix multiplication with a dynamic range"
    assert (facts.error or 1) < 0.02
    assert any("quantized_dense" in name for name in list_kernels(tmp_path / "dynamic"))


@pytest.mark.slow
def test_skipped_nodes(files: dict[str, Path], tmp_path: Path) -> None:
    """Patterns of names keep nodes float; one that matches none is a mistake."""
    facts = run(settings_of(skip=["head", "s*"]), files, tmp_path / "skipped")
    assert [layer.reason for layer in facts.layers] == ["", *["quantize.skip"] * 3]
    with pytest.raises(StageError, match=r"quantize.skip: no layer has a name like 'haed\*'"):
        run(settings_of(skip=["haed*"]), files, tmp_path / "wrong")


@pytest.mark.parametrize(
    ("arrays", "fields", "text"),
    [
        ({"x": np.full((2, 3, 8, 8), np.nan, np.float32)}, {}, "'x' has NaN or infinity in batch 0"),
        ({"x": np.zeros((2, 3, 9, 8), np.float32)}, {}, r"has shape \(2, 3, 9, 8\)"),
        ({"x": np.zeros((2, 3, 8, 8), np.uint8)}, {}, "'x' is uint8, the model takes float32"),
        ({"z": np.zeros((2, 3, 8, 8), np.float32)}, {}, "there is no array 'x'"),
        ({"x": np.zeros((2, 3, 8, 8), np.float32)}, {"samples": 9}, "has 2 samples, and quantize.samples asks for 9"),
    ],
)  # fmt: skip
def test_data_that_do_not_fit(
    files: dict[str, Path], tmp_path: Path, arrays: Any, fields: Any, text: str
) -> None:
    """Data with other names, shapes or dtypes, with NaN, or too few, are named as what the recipe calls them."""
    np.savez(tmp_path / "wrong.npz", **arrays)
    settings = settings_of(data="wrong.npz", **fields)
    with pytest.raises(StageError, match=text) as raised:
        run(settings, {**files, "calibration": tmp_path / "wrong.npz"}, tmp_path / "out")
    assert "quantize" in raised.value.message


@pytest.mark.slow
def test_constant_data(files: dict[str, Path], tmp_path: Path) -> None:
    """One sample of zeros gives scales that are numbers."""
    np.savez(tmp_path / "zeros.npz", x=np.zeros((1, 3, 8, 8), np.float32))
    own = {**files, "calibration": tmp_path / "zeros.npz"}
    assert run(settings_of(data="zeros.npz"), own, tmp_path / "out").samples == 1


def shared_network(weights: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """Two convolutions with the same weights."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "first", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "w"], ["y"], "second", pads=[1] * 4),
    ]
    made = model(nodes, [value("x", [1, 16, 8, 8])], [value("y", [1, 16, 8, 8])])
    made.graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), "w"))
    return made


def test_layers_with_the_same_weights_share_integers(tmp_path: Path) -> None:
    """Each layer has the name of its node, and integers are kept once."""
    network = shared_network(RNG.normal(0, 0.2, (16, 16, 3, 3)))
    files = import_files(save(network, tmp_path), tmp_path / "import")
    np.savez(tmp_path / "data.npz", x=RNG.normal(size=(4, 16, 8, 8)).astype(np.float32))
    files["data"] = tmp_path / "data.npz"
    facts = run(settings_of(), files, tmp_path / "out")
    assert [layer.name for layer in facts.layers] == ["first", "second"]
    assert facts.weight_bytes == 16 * 16 * 9
    assert facts.error is not None and facts.error < 0.02
    settings = settings_of(skip=["first"], activations="none")
    skipped = run(settings, files, tmp_path / "skipped")
    assert [layer.reason for layer in skipped.layers] == ["quantize.skip", ""]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_weights_that_are_no_numbers(wrong: float, tmp_path: Path) -> None:
    """A weight that is not a number has no integer: the layer is named, whose result may hide it."""
    weights = RNG.normal(0, 0.2, (16, 16, 3, 3))
    weights[3, 0, 0, 0] = wrong
    files = import_files(save(shared_network(weights), tmp_path), tmp_path / "import")
    np.savez(tmp_path / "data.npz", x=np.ones((1, 16, 8, 8), np.float32))
    with pytest.raises(StageError, match="the weights of layer 'first' have NaN or infinity"):
        run(settings_of(), {**files, "data": tmp_path / "data.npz"}, tmp_path / "out")


def test_names_that_calibration_takes(tmp_path: Path) -> None:
    """An output named as one that the stage adds would be counted in its place: it is refused."""
    network = shared_network(RNG.normal(0, 0.2, (16, 16, 3, 3)))
    network.graph.node[-1].output[0] = network.graph.output[0].name = "tvmflow.tapped.0"
    files = import_files(save(network, tmp_path), tmp_path / "import")
    with pytest.raises(StageError, match=r"an input or output named 'tvmflow\.tapped\.0'"):
        run(settings_of(), files, tmp_path / "out")


def with_integers_at_ends(output: str) -> onnx.ModelProto:
    """Two float convolutions of an image of uint8; the output is that operator's."""
    network = shared_network(RNG.normal(0, 0.2, (16, 16, 3, 3)))
    graph = network.graph
    for name, array in {"s": np.float32(0.05), "z": np.uint8(128)}.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    graph.node[0].input[0], graph.node[-1].output[0] = "real", "c"
    graph.node.insert(0, helper.make_node("DequantizeLinear", ["x", "s", "z"], ["real"]))
    del graph.input[:], graph.output[:]
    graph.input.append(value("x", [1, 16, 8, 8], "uint8"))
    if output == "ArgMax":
        graph.node.append(helper.make_node("ArgMax", ["c"], ["y"], axis=1))
        graph.output.append(value("y", [1, 1, 8, 8], "int64"))
    else:
        graph.node.append(helper.make_node("QuantizeLinear", ["c", "s", "z"], ["y"]))
        graph.output.append(value("y", [1, 16, 8, 8], "uint8"))
    return network


def test_integers_at_the_ends_of_a_float_model(tmp_path: Path) -> None:
    """Inputs and outputs that are quantized leave layers that are not; the error is that of the numbers they stand for."""
    network = with_integers_at_ends("QuantizeLinear")
    files = import_files(save(network, tmp_path), tmp_path / "import")
    images = RNG.integers(0, 256, (4, 16, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=images)
    facts = run(settings_of(), {**files, "data": tmp_path / "data.npz"}, tmp_path / "out")
    assert [layer.data_bits for layer in facts.layers] == [8, 8]
    assert facts.error is not None and 0 < facts.error < 0.05
    again = {f"import/{path.name}": path for path in (tmp_path / "out").iterdir()}
    with pytest.raises(StageError, match="the model is quantized already"):
        run(settings_of(), {**again, "data": tmp_path / "data.npz"}, tmp_path / "again")


def test_indices_have_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that only returns indices no error is told, and a limit is refused before anything is compiled."""
    files = import_files(save(with_integers_at_ends("ArgMax"), tmp_path), tmp_path / "import")
    np.savez(tmp_path / "data.npz", x=RNG.integers(0, 256, (2, 16, 8, 8), dtype=np.uint8))
    files["data"] = tmp_path / "data.npz"
    assert run(settings_of(), files, tmp_path / "out").error is None
    monkeypatch.delattr(Signature, "compile")
    with pytest.raises(StageError, match="max_error needs an output of floats"):
        run(settings_of(max_error=0.1), files, tmp_path / "limited")
    with pytest.raises(StageError, match="max_accuracy_drop needs labels"):
        run(settings_of(max_accuracy_drop=1), files, tmp_path / "unlabelled")


def test_names_of_layers_are_those_of_convolutions(files: dict[str, Path]) -> None:
    """A folded norm does not give its own name to the convolution before it."""
    nodes = json.loads(files["import/nodes.json"].read_text())
    params = read_safetensors(files["import/params.safetensors"])
    folded = fold_model(FloatModel(ir.load_module(files["import/model.json"]), params, nodes))
    assert list_layers(folded)[0].name == "first"
    assert not ir.calls_operator(folded.mod, "relax.nn.batch_norm")


def mxnet_files(folder: Path) -> dict[str, Path]:
    """The digits network as a checkpoint of MXNet."""
    return {"symbol": DIGITS / "digits-symbol.json", "params": DIGITS / "digits-0010.params"}


def tflite_files(folder: Path) -> dict[str, Path]:
    """A convolution of TFLite."""
    path = folder / "net.tflite"
    path.write_bytes(make("CONV_2D", 0).data)
    return {"model": path}


def pytorch_files(folder: Path) -> dict[str, Path]:
    """Two layers of PyTorch."""
    torch = pytest.importorskip("torch")
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    path = folder / "net.pt2"
    torch.export.save(torch.export.export(layers.eval(), (torch.ones(1, 32),)), path)
    return {"model": path}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "make_files", "count"),
    [("mxnet", mxnet_files, 3), ("tflite", tflite_files, 1), ("pytorch", pytorch_files, 2)],
)
def test_every_frontend(kind: str, make_files: Any, count: int, tmp_path: Path) -> None:
    """A model of each framework is quantized alike: what is rounded is its imported form."""
    inputs: dict[str, Any] = {"data": {"shape": [1, 1, 8, 8]}} if kind == "mxnet" else {}
    imported = import_files(make_files(tmp_path), tmp_path / "import", kind, **inputs)
    signature = json.loads(imported["import/signature.json"].read_text())
    arrays = {
        entry["name"]: RNG.normal(size=(4, *entry["shape"][1:])).astype(entry["dtype"])
        for entry in signature["inputs"]
    }
    np.savez(tmp_path / "data.npz", **arrays)
    facts = run(settings_of(), {**imported, "data": tmp_path / "data.npz"}, tmp_path / "out")
    assert [layer.data_bits for layer in facts.layers if layer.weight_bits == 8][:1] == [8]
    assert len(facts.layers) == count
    assert (facts.error or 1) < 0.05

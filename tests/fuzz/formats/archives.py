"""Mutated archives of `torch.export` and TFLite models: their facts are read, or they are refused with a message."""

from __future__ import annotations

import io
import json
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm  # noqa: F401 - loaded once, not in every child

from tests.fuzz.formats.cases import Case, expecting_refusals
from tests.support.mutations import mutate_bytes, mutate_tree
from tests.support.pytorch_archives import LEAF, container, graph
from tests.support.tflite_models import TfliteBuilder
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.pytorch._archive import copy_for_pytorch, read_archive

pytorch = FRONTENDS["pytorch"]
tflite = FRONTENDS["tflite"]

_GRAPH: Final = "net/models/model.json"
_CORPUS: Final[dict[str, bytes]] = {}


def _pytorch_document() -> dict[str, Any]:
    """Return the graph of a model with free sizes, a node and nested results."""
    inputs: dict[str, tuple[str, list[int | str]]] = {
        "x": ("float32", ["s0", 3]),
        "ids": ("int64", [1, "s1"]),
    }
    results = container(
        "builtins.dict", ["scores", "more"], LEAF, container("builtins.list", None, LEAF)
    )
    argument = {"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1}
    results_of_node = [{"as_tensor": {"name": "y"}}]
    node = {"target": "torch.ops.aten.relu.default", "name": "y", "metadata": {"stack_trace": "x"}}
    nodes = [{**node, "inputs": [argument], "outputs": results_of_node}]
    return graph(inputs, results, nodes=nodes)


def _pytorch_files() -> dict[str, bytes]:
    return {
        _GRAPH: json.dumps(_pytorch_document()).encode(),
        "net/data/weights/weight_0": bytes(64),
        "net/data/constants/tensor_0": bytes(8),
        "net/byteorder": b"little",
        "net/.data/version": b"3",
    }


def _write(files: list[tuple[str, bytes]]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive, warnings.catch_warnings():
        # of a name that is there already
        warnings.simplefilter("ignore")
        for name, content in files:
            archive.writestr(name, content)
    return made.getvalue()


def _tflite_model() -> bytes:
    """Return a model with a convolution, a softmax, a variable that begins with ones, and one of an SVDF."""
    builder = TfliteBuilder()
    data = builder.input("data", [1, 8, 8, 1])
    kernel = builder.constant([[[[0.5], [0.25]], [[1.0], [-1.0]]]] * 4, "float32")
    bias = builder.constant([0.0, 0.5, 1.0, -1.0], "float32")
    steps: dict[str, Any] = {"StrideH": 1, "StrideW": 1, "DilationHFactor": 1, "DilationWFactor": 1}
    made = builder.result("CONV_2D", [data, kernel, bias], [1, 8, 8, 4], "Conv2D", **steps)
    flat = builder.result("RESHAPE", [made, builder.integers([1, 256])], [1, 256])
    scores = builder.result("SOFTMAX", [flat], [1, 256], "Softmax", Beta=1.0)
    handle = builder.handle("sum", np.ones((1, 256), np.float32))
    total = builder.result("ADD", [scores, builder.read(handle, [1, 256])], [1, 256], "Add")
    builder.assign(handle, total)
    features = builder.constant(np.ones((2, 256), np.float32))
    times = builder.constant(np.ones((2, 3), np.float32))
    operands = [total, features, times, -1, builder.tensor([1, 6], is_variable=True)]
    return builder.build(builder.result("SVDF", operands, [1, 2], "SVDF", Rank=1))


def prepare(folder: Path) -> None:
    """Make the models that are mutated, which can be read as they are."""
    _CORPUS.update(tflite=_tflite_model(), pytorch=_write([*_pytorch_files().items()]))
    for kind, content in _CORPUS.items():
        (folder / kind).write_bytes(content)
    read_archive(folder / "pytorch")
    tflite.load({"model": folder / "tflite"}, ())


def make_case(draw: random.Random, folder: Path) -> Case:
    make = _tflite_case if draw.random() < 0.3 else _pytorch_case
    action = make(draw, folder)
    return Case(lambda: expecting_refusals(action))


def _tflite_case(draw: random.Random, folder: Path) -> Callable[[], object]:
    path = folder / "net.tflite"
    path.write_bytes(mutate_bytes(draw, _CORPUS["tflite"]))
    return lambda: tflite.load({"model": path}, ())


def _pytorch_case(draw: random.Random, folder: Path) -> Callable[[], object]:
    path = folder / "net.pt2"
    if draw.random() < 0.2:
        path.write_bytes(mutate_bytes(draw, _CORPUS["pytorch"]))
    else:
        path.write_bytes(_write(_mutate_files(draw)))

    def read() -> None:
        pytorch.read_facts({"model": path})
        copy_for_pytorch(path, folder)

    return read


def _mutate_files(draw: random.Random) -> list[tuple[str, bytes]]:
    """Change the graph, or leave out, repeat, rename or change a file of an archive."""
    files = [*_pytorch_files().items()]
    if draw.random() < 0.6:
        tree = mutate_tree(draw, _pytorch_document())
        content = json.dumps(tree, ensure_ascii=False).encode(errors="surrogatepass")
        return [(_GRAPH, content), *files[1:]]
    place = draw.randrange(len(files))
    name, content = files[place]
    names = (
        "/etc/x",
        "../x",
        "a/models/model.json",
        _GRAPH,
        f"{name}x",
        "net/data/constants/opaque_obj_0",
    )
    changed = [
        [],
        [(name, content), (name, mutate_bytes(draw, content))],
        [(draw.choice(names), content)],
        [(name, mutate_bytes(draw, content))],
    ]
    files[place : place + 1] = draw.choice(changed)
    return files

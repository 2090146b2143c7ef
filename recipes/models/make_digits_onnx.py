"""Write digits.onnx: the network of train_digits.py with its weights, for Pythons that have no MXNet.

`python recipes/models/make_digits_onnx.py`
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvmflow.frontends.mxnet._checkpoint import read_params

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Write the model beside the checkpoint."""
    weights = read_params(FOLDER / "digits-0010.params")
    params = {name: weight.array for name, weight in weights.items()}
    for name in ("bn1_gamma", "bn2_gamma"):
        # MXNet's BatchNorm ignores gamma unless fix_gamma is off.
        params[name] = np.ones_like(params[name])
    norm = ("gamma", "beta", "moving_mean", "moving_var")
    nodes = []
    value = "data"
    for index in (1, 2):
        nodes += [
            helper.make_node(
                "Conv", [value, f"conv{index}_weight"], [f"conv{index}"], pads=[1, 1, 1, 1]
            ),
            helper.make_node(
                "BatchNormalization",
                [f"conv{index}", *(f"bn{index}_{part}" for part in norm)],
                [f"bn{index}"],
                epsilon=1e-3,
            ),
            helper.make_node("Relu", [f"bn{index}"], [f"relu{index}"]),
        ]
        value = f"relu{index}"
    nodes += [
        helper.make_node("MaxPool", [value], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pool"], ["flatten"]),
        helper.make_node("Gemm", ["flatten", "dense_weight", "dense_bias"], ["dense"], transB=1),
        helper.make_node("Softmax", ["dense"], ["softmax_output"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, [1, 1, 8, 8])],
        [helper.make_tensor_value_info("softmax_output", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array(array, name) for name, array in sorted(params.items())],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, FOLDER / "digits.onnx")


if __name__ == "__main__":
    main()

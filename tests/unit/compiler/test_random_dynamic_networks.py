"""Networks of operators in any order with random axes open: one build agrees with ONNX Runtime at all sizes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    RuntimeException,
)

from tests.conftest import Count
from tests.support.kernels import LEVELS_HERE, level
from tests.support.onnx_models import frontend, save
from tests.support.random_networks import Feed, draw_network, draw_network_of_conditions
from tests.support.random_networks.dynamic import make_dynamic
from tests.support.random_networks.judging import find_differences, run_reference
from tests.support.seeds import seeds
from tvmflow.compiler import lowering
from tvmflow.compiler.c_program import load_c_library
from tvmflow.compiler.c_program.program import UnsupportedProgram
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions
from tvmflow.core.errors import ImportFailed
from tvmflow.graph.dynamic_shapes import with_dimensions
from tvmflow.targets.tvm_target import make_target

# what ONNX Runtime raises of sizes that the network does not have
NO_SIZES = (Fail, InvalidArgument, RuntimeException)
SIZES = 4
# sums are up to four times as long as in a network of fixed sizes
TOLERANCE = 4e-5


def check(made: onnx.ModelProto, feed: Feed, seed: int, folder: Path, count: Count) -> None:
    """Compare a network with dynamic shapes with ONNX Runtime; the levels of this machine take turns."""
    opened = make_dynamic(made, feed, seed)
    try:
        loaded = frontend.load(
            save(opened.model, folder), opened.specs(), dimensions=opened.dimensions
        )
    except ImportFailed as error:
        assert "cannot be imported" in error.message
        count("random networks whose dynamic shapes are refused", 1)
        return
    main = loaded.mod.get_global_var("main")
    loaded.mod.update_func(main, with_dimensions(loaded.mod[main], opened.dimensions))
    target = level(LEVELS_HERE[seed % len(LEVELS_HERE)])
    model = lowering.lower(loaded.mod, make_target(target), LoweringOptions()).schedule_untuned(
        loaded.params, target, SCHEDULES_VERSION
    )
    signature = {
        "inputs": [spec.to_json() for spec in loaded.inputs],
        "outputs": [spec.to_json() for spec in loaded.outputs],
        "dimensions": [entry.to_json() for entry in opened.dimensions],
    }
    try:
        library = load_c_library(model, signature, threads=1 + seed % 2)
    except UnsupportedProgram:
        count("random networks that need the virtual machine", 1)
        return
    for given in opened.feeds(seed, SIZES):
        try:
            expected = run_reference(opened.model, given)
        except NO_SIZES:
            continue
        actual = library.main(*(given[spec.name] for spec in loaded.inputs))
        assert [array.shape for array in actual] == [array.shape for array in expected]
        assert find_differences(opened.model, given, actual, TOLERANCE) == []
        count("sizes of random networks", 1)


@pytest.mark.parametrize("seed", seeds(2, 30, 240))
def test_random_networks_agree_at_all_sizes(seed: int, tmp_path: Path, count: Count) -> None:
    check(*draw_network(seed), seed, tmp_path, count)


@pytest.mark.parametrize("seed", seeds(1, 12, 120))
def test_random_conditions_agree_at_all_sizes(seed: int, tmp_path: Path, count: Count) -> None:
    """Masks that are inverted, combined, counted and multiplied, and arithmetic on integers."""
    check(*draw_network_of_conditions(seed), seed, tmp_path, count)

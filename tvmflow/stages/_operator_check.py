"""Each operator of a recipe by itself, where a library disagrees with the reference: which one is wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow.frontends import FRONTENDS
from tvmflow.operators._loading import calls_folder
from tvmflow.stages import _comparison, _findings
from tvmflow.stages._base import StageContext
from tvmflow.stages._tolerances import Tolerance
from tvmflow.stages._verify_settings import LOCAL, VerifySettings

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_log = logging.getLogger(__name__)


def list_operator_mismatches(
    settings: VerifySettings, context: StageContext, tolerance: Tolerance
) -> list[str]:
    """Return a sentence for every operator of the recipe whose implementation disagrees with its reference.

    Each is compiled by itself, for the tensors that its reference was called with.

    Args:
        settings: Those of `verify`.
        context: That of the stage, whose reference has recorded the calls.
        tolerance: How closely outputs must agree.
    """
    import numpy as np

    sentences = []
    for path in sorted(calls_folder(context.work / "reference").glob("*.onnx")):
        with np.load(path.with_suffix(".npz")) as archive:
            arrays = dict(archive)
        try:
            name, outputs = _compute(path, arrays, settings, context)
        except Exception as error:
            _log.debug("%s cannot be run by itself: %s", path.stem, error)
            continue
        comparisons = {
            output: _comparison.compare(array, arrays[output], tolerance)
            for output, array in outputs.items()
        }
        sentences += [
            f"the operator {name} disagrees with its reference: {mismatch}"
            for mismatch in _findings.list_mismatches(comparisons, "its reference")
        ]
    return sentences


def _compute(
    path: Path, arrays: Mapping[str, Array], settings: VerifySettings, context: StageContext
) -> tuple[str, dict[str, Array]]:
    """Return the operator of a recorded call, with its node, and the outputs of its implementation."""
    import onnx

    from tvmflow.compiler import lowering
    from tvmflow.compiler.c_library.local import load_c_library
    from tvmflow.frontends.onnx._graph import node_name
    from tvmflow.runtime.module import Module

    assert settings.run_on == LOCAL and settings.lowering and settings.schedules is not None
    [machine] = settings.machines.values()
    [node] = onnx.load(path).graph.node
    loaded = FRONTENDS["onnx"].load({**context.inputs, "model": path}, ())
    model = lowering.schedule_untuned(
        loaded.mod, loaded.params, machine.tvm, settings.lowering, settings.schedules
    )
    signature = {
        side: [spec.to_json() for spec in specs]
        for side, specs in (("inputs", loaded.inputs), ("outputs", loaded.outputs))
    }
    module = Module(load_c_library(model, signature, machine.threads), signature, {})
    outputs = module.run({spec.name: arrays[spec.name] for spec in loaded.inputs})
    return f"{node.op_type} ({node.domain}) (node {node_name(node)})", outputs

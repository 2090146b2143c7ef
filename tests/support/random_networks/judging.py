"""Compares a network's outputs with those of ONNX Runtime, as far as rounding lets them agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from tvmflow.frontends.onnx._reference_worker import EXACT_BYTES

Arrays = Sequence[np.ndarray[Any, Any]]

_STEP: Final = 1e-6
_LEAST_TOLERANCE: Final = 2e-5
_LARGEST_TOLERANCE: Final = 5e-3


def run_reference(made: onnx.ModelProto, feed: Mapping[str, Any]) -> Arrays:
    """Return the outputs of ONNX Runtime, without optimizations: they fail for some valid networks."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.add_session_config_entry(*EXACT_BYTES)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, providers=providers)
    return list(session.run(None, dict(feed)))


def find_differences(
    made: onnx.ModelProto,
    feed: Mapping[str, Any],
    actual: Arrays,
    least_tolerance: float = _LEAST_TOLERANCE,
) -> list[str]:
    """Return in what outputs differ from ONNX Runtime's.

    The error of an output is relative to its largest value: an output of zeros is always wrong. The
    tolerance follows from how much the output changes when the inputs change by a millionth: a norm of
    almost equal numbers magnifies rounding errors.
    """
    expected = run_reference(made, feed)
    random = np.random.default_rng(0)
    moved = {
        name: (v * (1 + _STEP * random.standard_normal(v.shape))).astype(v.dtype)
        for name, v in feed.items()
    }
    others = run_reference(made, moved)
    differences = []
    for output, a, b, c in zip(made.graph.output, actual, expected, others, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            differences.append(f"{output.name} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}")
            continue
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            differences.append(
                f"{output.name} is not finite where ONNX Runtime's is, or is where not"
            )
            continue
        finite = np.isfinite(b)
        a, b, c = (x[finite].astype(np.float64) for x in (a, b, c))
        largest = np.abs(b).max(initial=0.0)
        if largest == 0.0:
            if a.any():
                differences.append(f"{output.name} is zero in ONNX Runtime alone")
            continue
        error = np.abs(a - b).max() / largest
        tolerance = max(least_tolerance, 20 * np.abs(c - b).max() / largest)
        if error > min(tolerance, _LARGEST_TOLERANCE):
            differences.append(
                f"{output.name} is off by {error:.2g} of {largest:.3g} (may be {tolerance:.2g})"
            )
    return differences

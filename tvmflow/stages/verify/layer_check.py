"""Layers of a quantized model, one by one: many roundings hide a wrong weight, a single one does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core.errors import StageError
from tvmflow.core.types import Array
from tvmflow.frontends.base import LoadedModel
from tvmflow.stages.base import StageContext
from tvmflow.stages.verify import comparison
from tvmflow.stages.verify.comparison import compare_inner_batches, has_same_bits, tolerance_for
from tvmflow.stages.verify.index_inputs import no_inner_reason
from tvmflow.stages.verify.inputs import ImportedModel
from tvmflow.stages.verify.libraries import Library, LocalLibrary
from tvmflow.stages.verify.reference_run import Case, open_reference, with_inner
from tvmflow.stages.verify.verdict import (
    IsaLevelVerdict,
    LayersComparison,
    OutputComparison,
    ScaledSlice,
    Verdict,
    list_compared,
)
from tvmflow.stages.verify_settings import VerifySettings

if TYPE_CHECKING:
    import tvm


# A step of 128, and of few elements: more than some roundings that went the other way, and less than one wrong
# weight does to the outputs of a small network.
_CLOSE: Final = 1 / 2**7
_CLOSE_RMS: Final = 1 / 2**8
# Sums of two orders may fall on two sides of a half.
_STEPS: Final = 1
# Weights, and with bfloat16 data as well, are rounded once more.
_COARSE_STEPS: Final = 2
_PRECISIONS: Final = {"mixed": comparison.FLOAT16, "bfloat16": comparison.BFLOAT16}
_MAX_BATCHES: Final = 3
# A channel's scale is estimated from this many of its elements, and differs by more than roundings that went the
# other way.
_MIN_ROUNDED: Final = 64
_MAX_SCALE: Final = 0.04
_DEVIATIONS: Final = 8.0


def is_close(outputs: Iterable[OutputComparison]) -> bool:
    """Return whether the outputs of a quantized model agree so closely that its layers need no comparison."""
    return all(
        float(output["error_of_largest"]) <= _CLOSE and float(output["rms_error"]) <= _CLOSE_RMS
        for output in outputs
        if output["elements"]
    )


def add_layers(
    verdict: Verdict | IsaLevelVerdict, arithmetic: str, library: Library, case: Case
) -> None:
    """Compare the layers of a quantized model, unless its outputs agree so closely that none can be wrong."""
    compared = list_compared(verdict)
    is_passed = all(output["passed"] for output in compared)
    if (
        arithmetic == comparison.QUANTIZED
        and case.settings.verify.has_default_tolerance
        and is_passed
        and not is_close(compared)
    ):
        verdict["layers"] = compare_layers(library, case)


def compare_layers(library: Library, case: Case) -> LayersComparison:
    """Compare each rounded tensor of a quantized model, computed from the reference's tensors before it."""
    from tvmflow.graph import ir
    from tvmflow.graph.dynamic_shapes import read_dimensions
    from tvmflow.graph.index_inputs import find_quantized
    from tvmflow.stages.verify.inner_tensors import cut_at_inner

    settings, context, model, data, _ = case
    if reason := no_inner_reason(settings):
        return {"passed": True, "not_compared": reason}
    mod = ir.load_module(context.inputs["import/model.json"])
    if read_dimensions(mod["main"]):
        # the tensors of the reference would be inputs whose sizes are expressions
        return {"passed": True, "not_compared": "its sizes are open"}
    loaded = _load_rounded(mod, find_quantized(mod["main"]), model, settings, context.inputs)
    cut = cut_at_inner(loaded) if loaded else None
    if loaded is None or cut is None:
        return {"passed": True, "not_compared": "not all of its rounded tensors have a name"}
    layers = _compare(
        cut,
        with_inner(settings, model, loaded),
        library,
        data.batches[:_MAX_BATCHES],
        settings,
        context,
    )
    layers["is_reproduced"] = _is_reproduced(mod, library, data.batches[0], settings, context)
    layers["passed"] &= layers["is_reproduced"]
    return layers


def _is_reproduced(
    mod: tvm.IRModule,
    library: Library,
    feed: Mapping[str, Array],
    settings: VerifySettings,
    context: StageContext,
) -> bool:
    """Return whether the library computes the same bits as the same kernels compiled again.

    The layers are right in a library of almost the same kernels; this one must be made of them, too.
    """
    from tvmflow.runtime.weights import read_safetensors
    from tvmflow.stages.verify.inner_tensors import InnerLibrary

    assert isinstance(library, LocalLibrary)
    params = read_safetensors(context.inputs["import/params.safetensors"])
    loaded = LoadedModel(mod, params, library.inputs, library.outputs)
    module = InnerLibrary.schedule(loaded, settings, context.inputs).load(library)
    [delivered], again = library.run_all([dict(feed)]), module.run(dict(feed))
    return has_same_bits(again, delivered)


def _load_rounded(
    mod: tvm.IRModule,
    variables: Sequence[Any],
    model: ImportedModel,
    settings: VerifySettings,
    files: Mapping[str, Path],
) -> LoadedModel | None:
    """Return the model with all of its rounded tensors; None if not all of them can be named."""
    from tvmflow.graph import ir
    from tvmflow.stages.verify.inner_tensors import load_with_inner, return_inner

    dtypes = ("int8", "uint8")
    try:
        if settings.quantized:
            loaded = return_inner(mod, variables, model, files, dtypes)
        else:
            kind = settings.model["kind"]
            loaded = load_with_inner(mod, variables, model, kind, files, dtypes)
    except StageError:
        return None
    inner = set(variables) - set(ir.list_outputs(mod["main"]))
    if loaded is None or len(loaded.tensors) != len(inner):
        return None
    return loaded


def _compare(
    cut: LoadedModel,
    model: ImportedModel,
    library: Library,
    batches: Sequence[Mapping[str, Array]],
    settings: VerifySettings,
    context: StageContext,
) -> LayersComparison:
    import numpy as np

    from tvmflow.stages.verify.inner_tensors import InnerLibrary

    assert isinstance(library, LocalLibrary)
    with open_reference(settings, model, context) as reference:
        expected = [reference.run({**feed, **model.bound}) for feed in batches]
    module = InnerLibrary.schedule(cut, settings, context.inputs).load(library)
    names = [spec.name for spec in cut.tensors]
    computed = [
        module.run({**feed, **{name: results[name] for name in names}})
        for feed, results in zip(batches, expected, strict=True)
    ]
    allowed = _COARSE_STEPS if settings.precision in _PRECISIONS else _STEPS
    steps, wrong, differing, elements = 0, dict[str, dict[str, int]](), 0, 0
    scaled: dict[str, ScaledSlice] = {}
    for name in names:
        left, right = (
            np.stack([batch[name] for batch in side]).astype(np.int16)
            for side in (computed, expected)
        )
        error = np.abs(left - right)
        steps = max(steps, int(error.max(initial=0)))
        differing += int(np.count_nonzero(error))
        elements += error.size
        if slice_of_it := _find_scaled(left, right):
            scaled[name] = slice_of_it
        if count := int(np.count_nonzero(error > allowed)):
            wrong[name] = {"steps": int(error.max()), "elements": count}
    outputs = _compare_outputs(cut, computed, expected, settings)
    return {
        "passed": not (wrong or scaled) and all(output["passed"] for output in outputs.values()),
        "tensors": len(names),
        "max_steps": steps,
        "differing": differing / max(1, elements),
        "allowed_steps": allowed,
        "wrong": wrong,
        "scaled": scaled,
        "outputs": outputs,
    }


def _find_scaled(actual: Array, expected: Array) -> ScaledSlice | None:
    """Return the channel of a rounded tensor that is scaled: within a step where its values are few steps."""
    import numpy as np

    # stacked batches, then the axes of the tensor
    for axis in range(1, expected.ndim):
        length = expected.shape[axis]
        if length < 2 or expected.size // length < _MIN_ROUNDED:
            continue
        left, right = (
            np.moveaxis(side, axis, 0).reshape(length, -1).astype(np.float64)
            for side in (actual, expected)
        )
        left -= left.mean(1, keepdims=True)
        right -= right.mean(1, keepdims=True)
        squares = np.maximum(np.square(right).sum(1), 1e-9)
        factor = (left * right).sum(1) / squares
        noise = np.square(left - factor[:, None] * right).sum(1) / right.shape[1]
        deviation = np.abs(factor - 1)
        is_scaled = deviation > np.maximum(_MAX_SCALE, _DEVIATIONS * np.sqrt(noise / squares))
        is_scaled &= squares / right.shape[1] > 1
        if is_scaled.any():
            index = int(np.argmax(np.where(is_scaled, deviation, 0)))
            return {"axis": axis - 1, "index": index, "scale": float(factor[index])}
    return None


def _compare_outputs(
    cut: LoadedModel,
    computed: Sequence[Mapping[str, Array]],
    expected: Sequence[Mapping[str, Array]],
    settings: VerifySettings,
) -> dict[str, OutputComparison]:
    """Compare outputs of floats as those of an unquantized model: no rounding is left in them."""
    arithmetic = _PRECISIONS.get(settings.precision, comparison.FLOAT32)
    tolerance = tolerance_for(arithmetic, rtol=None, atol=None)
    return {
        spec.name: compare_inner_batches(
            [batch[spec.name] for batch in computed],
            [batch[spec.name] for batch in expected],
            tolerance,
        )
        for spec in cut.outputs
        if spec.dtype.startswith("float")
    }

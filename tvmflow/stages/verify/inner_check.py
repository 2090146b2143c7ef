"""Comparison of intermediate tensors with the reference's: inputs of argmax, and quantized layers.

Layers of a quantized model are compared one by one: the roundings of many layers would hide a wrong weight, the
rounding of a single layer does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import tvm

from tvmflow.compiler import LoweredModel
from tvmflow.core.errors import StageError
from tvmflow.core.types import Array
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import read_dimensions
from tvmflow.graph.index_inputs import find_quantized
from tvmflow.runtime.weights import read_safetensors
from tvmflow.stages.verify import inner_tensors
from tvmflow.stages.verify.comparison import (
    compare_inner_batches,
    has_same_bits,
    rounds_data,
    tolerance_for,
)
from tvmflow.stages.verify.inner_tensors import InnerLibrary
from tvmflow.stages.verify.libraries import Library, LocalLibrary
from tvmflow.stages.verify.reference_run import Case, open_reference, with_inner
from tvmflow.stages.verify.verdict import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    QUANTIZED,
    ZEROS,
    IsaLevelVerdict,
    LayersComparison,
    OutputComparison,
    ScaledSlice,
    Verdict,
    list_compared,
)

# Tensors of fewer bytes are not searched in memory, because they may be there by chance.
_MIN_BYTES: Final = 16


class IndexCheck:
    """Compares the inputs of argmax-like operators with the reference's.

    A second library with the same kernels returns these tensors. If the delivered library computes such a tensor
    with the same kernels, it must have the same bits in its memory. `delivered` returns its lowered model.

    Attributes:
        tensors: The comparison of each tensor, by name.
    """

    def __init__(self, library: Library, case: Case, delivered: Callable[[], LoweredModel]) -> None:
        reference = case.reference
        assert reference is not None and reference.indices is not None
        loaded, batches = reference.indices.loaded, reference.results.samples.batches
        assert loaded is not None and isinstance(library, LocalLibrary)
        inner = InnerLibrary.schedule(loaded, case.settings, case.context.inputs)
        module = inner.load(library)
        self._expected = reference.results.outputs
        self._computed = [module.run(feed) for feed in batches]
        self.tensors: dict[str, OutputComparison] = {}
        for spec in loaded.tensors:
            own, right = (
                [batch[spec.name] for batch in side] for side in (self._computed, self._expected)
            )
            compared = compare_inner_batches(own, right, reference.tolerance)
            self.tensors[spec.name] = {**compared, "seen": False}
        # only tensors that a search of the second library's own memory finds are expected in the delivered one's
        computed = {name: self._computed[0][name] for name in self.tensors}
        contents = {name: array.tobytes() for name, array in computed.items()}
        telling = {
            name: computed[name]
            for name, content in contents.items()
            if len(content) >= _MIN_BYTES and len(set(content)) > 1
        }
        seen = inner_tensors.find_in_memory(library, batches[0], telling)
        for name in seen:
            self.tensors[name]["seen"] = True
        if missing := telling.keys() - seen:
            for name in missing & inner.list_shared(delivered().mod):
                self.tensors[name] |= {"passed": False, "is_missing": True}
        self._indices = {
            spec.name: index
            for spec in library.outputs
            if (index := inner_tensors.find_index(spec.name, self.tensors, self._expected))
            is not None
        }

    def settle(self, outputs: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """Return a library's outputs; indices whose scores tie within errors are replaced by the reference's."""
        batches = [dict(batch) for batch in outputs]
        for name, index in self._indices.items():
            for batch, own, right in zip(batches, self._computed, self._expected, strict=True):
                batch[name] = inner_tensors.settle_ties(batch[name], right[name], own, right, index)
        return batches

    def describe(
        self, outputs: Sequence[Mapping[str, Array]], verdict: Mapping[str, OutputComparison]
    ) -> None:
        """Add to the verdict how many values each index can have, and how many ties were settled."""
        changed = self.settle(outputs)
        for name, index in self._indices.items():
            pairs = zip(changed, outputs, strict=True)
            ties = sum(int(np.count_nonzero(new[name] != old[name])) for new, old in pairs)
            verdict[name]["classes"] = self._expected[0][index.tensor].shape[index.axis]
            if ties:
                verdict[name]["ties"] = ties


def count_values(
    verdict: Mapping[str, OutputComparison],
    indices: Sequence[str],
    expected: Sequence[Mapping[str, Array]],
) -> None:
    """Add to the verdict how many different values each index has in the reference's outputs."""
    for name in indices:
        values = {int(n) for batch in expected for n in batch[name].flat}
        verdict[name]["reached"] = len(values)
        if values == {0}:
            verdict[name]["undetected"] = ZEROS


# ---------------------------------------------------------------- layers

# One step of 128 for the largest error, and half a step for the root mean square error. A few values rounded the
# other way stay below; one wrong weight of a small network exceeds it.
_CLOSE: Final = 1 / 2**7
_CLOSE_RMS: Final = 1 / 2**8
# The allowed error in steps: sums in different orders may be rounded to neighboring steps.
_STEPS: Final = 1
# The allowed error in `_PRECISIONS`, which round weights (`bfloat16`: also activations) once more.
_COARSE_STEPS: Final = 2
_PRECISIONS: Final = {"mixed": FLOAT16, "bfloat16": BFLOAT16}
_MAX_BATCHES: Final = 3
# A channel needs this many elements to estimate its scale. It is wrong if it differs by more than values rounded
# the other way can cause.
_MIN_ROUNDED: Final = 64
_MAX_SCALE: Final = 0.04
_DEVIATIONS: Final = 8.0


def is_close(outputs: Iterable[OutputComparison]) -> bool:
    """Return whether a quantized model's outputs agree so closely that no layer can be wrong."""
    return all(
        float(output["error_of_largest"]) <= _CLOSE and float(output["rms_error"]) <= _CLOSE_RMS
        for output in outputs
        if output["elements"]
    )


def add_layers(
    verdict: Verdict | IsaLevelVerdict, arithmetic: str, library: Library, case: Case
) -> None:
    """Compare the layers of a quantized model if its outputs pass, but agree too little to prove them."""
    compared = list_compared(verdict)
    is_passed = all(output["passed"] for output in compared)
    if (
        arithmetic == QUANTIZED
        and case.settings.verify.has_default_tolerance
        and is_passed
        and not is_close(compared)
    ):
        verdict["layers"] = compare_layers(library, case)


def compare_layers(library: Library, case: Case) -> LayersComparison:
    """Compare each rounded tensor of a quantized model; its inputs are the reference's tensors."""
    if reason := inner_tensors.no_inner_reason(case.settings):
        return {"passed": True, "not_compared": reason}
    mod = ir.load_module(case.context.inputs["import/model.json"])
    if read_dimensions(mod["main"]):
        # the reference's tensors would become inputs, whose dynamic sizes may be expressions
        return {"passed": True, "not_compared": "it has dynamic shapes"}
    if rounds_data(mod):
        return {"passed": True, "not_compared": "matrix multiplications round its data"}
    loaded = _load_rounded(mod, case)
    cut = inner_tensors.cut_at_inner(loaded) if loaded else None
    if loaded is None or cut is None:
        return {"passed": True, "not_compared": "not all of its rounded tensors have a name"}
    model = with_inner(case.settings, case.model, loaded)
    layers = _compare(cut, library, case._replace(model=model))
    layers["is_reproduced"] = _is_reproduced(mod, library, case)
    layers["passed"] &= layers["is_reproduced"]
    return layers


def _is_reproduced(mod: tvm.IRModule, library: Library, case: Case) -> bool:
    """Return whether the same kernels, compiled again, give the delivered library's bits.

    Layers are compared in a second library with almost the same kernels; this check ties the result to the delivered
    one.
    """
    assert isinstance(library, LocalLibrary)
    inputs, feed = case.context.inputs, case.data.batches[0]
    params = read_safetensors(inputs["import/params.safetensors"])
    loaded = LoadedModel(mod, params, library.inputs, library.outputs)
    module = InnerLibrary.schedule(loaded, case.settings, inputs).load(library)
    [delivered], again = library.run_all([dict(feed)]), module.run(dict(feed))
    return has_same_bits(again, delivered)


def _load_rounded(mod: tvm.IRModule, case: Case) -> LoadedModel | None:
    """Return the model with all rounded tensors as outputs; None if the reference cannot return all."""
    variables, dtypes = find_quantized(mod["main"]), ("int8", "uint8")
    files = case.context.inputs
    try:
        loaded = inner_tensors.load_inner(mod, variables, case.model, case.settings, files, dtypes)
    except StageError:
        return None
    inner = set(variables) - set(ir.list_outputs(mod["main"]))
    return loaded if loaded is not None and len(loaded.tensors) == len(inner) else None


def _compare(cut: LoadedModel, library: Library, case: Case) -> LayersComparison:
    assert isinstance(library, LocalLibrary)
    settings, context, model, data, _ = case
    batches = data.batches[:_MAX_BATCHES]
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
        if found := _find_scaled(left, right):
            scaled[name] = found
        if count := int(np.count_nonzero(error > allowed)):
            wrong[name] = {"steps": int(error.max()), "elements": count}
    # float outputs are not rounded to steps, so they have the tolerance of floats
    tolerance = tolerance_for(_PRECISIONS.get(settings.precision, FLOAT32), rtol=None, atol=None)
    outputs = {
        spec.name: compare_inner_batches(
            [batch[spec.name] for batch in computed],
            [batch[spec.name] for batch in expected],
            tolerance,
        )
        for spec in cut.outputs
        if spec.dtype.startswith("float")
    }
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
    """Return a scaled channel, whose errors may be within a step if its values are small; or None."""
    # axis 0 has the stacked batches
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

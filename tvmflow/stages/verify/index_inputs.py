"""Outputs that are indices: their inputs, agreement with the reference, and ties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.core.errors import StageError
from tvmflow.core.types import Array, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.stages.verify.comparison import ZEROS, Tolerance, compare_inner_batches
from tvmflow.stages.verify.inputs import ImportedModel, ReferenceOutputs
from tvmflow.stages.verify.libraries import Library, LocalLibrary
from tvmflow.stages.verify.verdict import OutputComparison
from tvmflow.stages.verify_settings import LOCAL, VerifySettings

if TYPE_CHECKING:
    import tvm

    from tvmflow.compiler import LoweredModel
    from tvmflow.frontends.base import LoadedModel
    from tvmflow.stages.verify.inner_tensors import InnerLibrary


# Rounding of a score that a kernel computes together with the index.
_ROUNDING: Final = 2.0**-21


class IndexInputs(NamedTuple):
    """The tensors of a model that go into an index.

    Attributes:
        outputs: The outputs that are indices.
        selects: An index selects data that the model continues with, or returns.
        loaded: The model with these tensors as further outputs; None if they cannot be compared.
        reason: Why they cannot.
    """

    outputs: tuple[str, ...]
    selects: bool
    loaded: LoadedModel | None
    reason: str = ""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors, as far as they can be compared."""
        return self.loaded.tensors if self.loaded else ()


def find_index_inputs(
    mod: tvm.IRModule, model: ImportedModel, settings: VerifySettings, files: Mapping[str, Path]
) -> IndexInputs | None:
    """Return the tensors that go into an index; None for a model without one."""
    from tvmflow.graph import index_inputs

    model_indices = index_inputs.find_indices(mod["main"])
    # behind the outputs are the counts of data-dependent outputs
    outputs = tuple(spec.name for n, spec in enumerate(model.outputs) if n in model_indices.outputs)
    if not model_indices.inputs:
        return None
    unloaded = IndexInputs(outputs, model_indices.selects, None)
    if reason := no_inner_reason(settings):
        return unloaded._replace(reason=reason)
    from tvmflow.stages.verify.inner_tensors import load_with_inner, return_inner

    kind = settings.model["kind"]
    try:
        if settings.quantized:
            loaded = return_inner(mod, model_indices.inputs, model, files)
        else:
            loaded = load_with_inner(mod, model_indices.inputs, model, kind, files)
    except StageError as error:
        return unloaded._replace(reason=f"the import cannot return it: {error}")
    if loaded is None and settings.quantized:
        return unloaded._replace(reason="a condition decides on it, or its shape is dynamic")
    if loaded is None:
        name = FRONTENDS[kind].REFERENCE.name
        return unloaded._replace(reason=f"it has no name by which {name} returns it")
    return unloaded._replace(loaded=loaded)


def no_inner_reason(settings: VerifySettings) -> str:
    """Return why inner tensors of a library cannot be compared, or an empty string."""
    if settings.run_on != LOCAL:
        return "the library runs on another machine"
    if settings.lowering is None or len(settings.machines) != 1:
        return "the model is in parts"
    [machine] = settings.machines.values()
    return "" if machine.tvm["kind"] == "llvm" else "the library runs on a GPU"


def list_clear_indices(
    indices: IndexInputs, expected: Sequence[Mapping[str, Array]], tolerance: Tolerance
) -> tuple[str, ...]:
    """Return the outputs for which more inputs may be drawn: none if a tie would look like an error."""
    names = [spec.name for spec in indices.tensors]
    if names:
        is_clear = all(find_index(output, names, expected) for output in indices.outputs)
    else:
        # scores of float32 are seldom equal
        is_clear = tolerance.of_slice > 0
    return indices.outputs if is_clear and not indices.selects else ()


class Index(NamedTuple):
    """An output that is an index.

    Attributes:
        tensor: The name of the indexed tensor.
        axis: The axis of that.
        is_largest: The first is that of the largest element.
    """

    tensor: str
    axis: int
    is_largest: bool


def find_index(
    name: str, tensors: Iterable[str], expected: Sequence[Mapping[str, Array]]
) -> Index | None:
    """Return the tensor that an output indexes, by the reference's values; None if it is not an index."""
    for tensor in tensors:
        for axis in range(expected[0][tensor].ndim):
            for is_largest in (True, False):
                index = Index(tensor, axis, is_largest)
                if all(_is_index_of(batch[name], batch[tensor], index) for batch in expected):
                    return index
    return None


def _is_index_of(indices: Array, scores: Array, index: Index) -> bool:
    import numpy as np

    positions = _read_positions(indices, scores, index.axis)
    if positions is None:
        return False
    best = _best(scores, index, positions.shape[index.axis])
    return bool(np.array_equal(np.take_along_axis(scores, positions, index.axis), best))


def _read_positions(indices: Array, scores: Array, axis: int) -> Array | None:
    """Return indices in the shape for `take_along_axis`; None if they cannot be indices along the axis."""
    import numpy as np

    length = scores.shape[axis]
    others = scores.size // length if length else 0
    if length < 2 or not others or not indices.size or indices.size % others:
        return None
    shape = (*scores.shape[:axis], indices.size // others, *scores.shape[axis + 1 :])
    if [n for n in shape if n > 1] != [n for n in indices.shape if n > 1]:
        return None
    positions: Array = np.asarray(indices).astype(np.int64).reshape(shape)
    is_within = (positions == indices.reshape(shape)) & (positions >= 0) & (positions < length)
    return positions if bool(is_within.all()) else None


def _best(scores: Array, index: Index, count: int) -> Array:
    """Return the largest or smallest elements along an axis, the first one first."""
    import numpy as np

    ordered = np.sort(scores, axis=index.axis)
    if index.is_largest:
        ordered = np.flip(ordered, axis=index.axis)
    return np.take(ordered, range(count), axis=index.axis)


def settle_ties(
    actual: Array,
    expected: Array,
    own: Mapping[str, Array],
    right: Mapping[str, Array],
    index: Index,
) -> Array:
    """Return an index with the reference's element where its own is right for the library's scores, `own`."""
    import numpy as np

    if np.array_equal(actual, expected):
        return actual
    scores = own[index.tensor]
    positions = _read_positions(actual, scores, index.axis)
    if (
        positions is None
        or not (np.diff(np.sort(positions, axis=index.axis), axis=index.axis) > 0).all()
    ):
        return actual
    best = _best(scores, index, positions.shape[index.axis]).astype(np.float64)
    chosen = np.take_along_axis(scores, positions, index.axis).astype(np.float64)
    errors = np.abs(scores.astype(np.float64) - right[index.tensor].astype(np.float64))
    allowed = 2 * errors.max() + _ROUNDING * np.abs(best).max()
    is_tie = (np.abs(chosen - best) <= allowed).reshape(actual.shape)
    return np.where(is_tie, expected, actual)


# A pattern of fewer bytes may be in memory by chance.
_MIN_BYTES: Final = 16


class IndexCheck:
    """The tensors that go into an index, compared with the reference's.

    They are computed by a library of the same kernels that returns them. Where the delivered one
    computes a tensor with the same kernels, it must have the same bits in its memory. `delivered`
    returns the lowered model that it has the kernels of.

    Attributes:
        tensors: The comparison of each.
    """

    def __init__(
        self,
        indices: IndexInputs,
        library: Library,
        results: ReferenceOutputs,
        tolerance: Tolerance,
        settings: VerifySettings,
        files: Mapping[str, Path],
        delivered: Callable[[], LoweredModel],
    ) -> None:
        from tvmflow.stages.verify.inner_tensors import InnerLibrary

        assert indices.loaded is not None and isinstance(library, LocalLibrary)
        inner = InnerLibrary.schedule(indices.loaded, settings, files)
        module = inner.load(library)
        batches = results.samples.batches
        self._expected = results.outputs
        self._computed = [module.run(feed) for feed in batches]
        self.tensors: dict[str, OutputComparison] = {}
        for spec in indices.loaded.tensors:
            own, right = (
                [batch[spec.name] for batch in side] for side in (self._computed, self._expected)
            )
            comparison = compare_inner_batches(own, right, tolerance)
            self.tensors[spec.name] = {**comparison, "seen": False}
        self._look_for_tensors(inner, library, batches[0], delivered)
        self._indices = {
            spec.name: index
            for spec in library.outputs
            if (index := find_index(spec.name, self.tensors, self._expected)) is not None
        }

    def _look_for_tensors(
        self,
        inner: InnerLibrary,
        library: LocalLibrary,
        feed: dict[str, Array],
        delivered: Callable[[], LoweredModel],
    ) -> None:
        """Look for the tensors in the delivered library's memory; with the same kernels, they must be there."""
        from tvmflow.stages.verify.inner_tensors import find_in_memory

        telling = {n: a for n in self.tensors if _is_telling(a := self._computed[0][n])}
        seen = find_in_memory(library, feed, telling)
        for name in seen:
            self.tensors[name]["seen"] = True
        missing = telling.keys() - seen
        if missing:
            for name in missing & inner.list_shared(delivered().mod):
                self.tensors[name] |= {"passed": False, "is_missing": True}

    def settle(self, outputs: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """Return a library's outputs with the reference's index where scores tie within their errors."""
        batches = [dict(batch) for batch in outputs]
        for name, index in self._indices.items():
            for batch, own, right in zip(batches, self._computed, self._expected, strict=True):
                batch[name] = settle_ties(batch[name], right[name], own, right, index)
        return batches

    def describe(
        self, outputs: Sequence[Mapping[str, Array]], verdict: Mapping[str, OutputComparison]
    ) -> None:
        """Add to the verdict how many elements an index chooses from, and how many indices were settled."""
        import numpy as np

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
    """Add to the verdict how many different values the reference gives of outputs that are indices."""
    for name in indices:
        values = {int(n) for batch in expected for n in batch[name].flat}
        verdict[name]["reached"] = len(values)
        if values == {0}:
            verdict[name]["undetected"] = ZEROS


def _is_telling(array: Array) -> bool:
    """Return whether a tensor is recognized by its bytes."""
    content = array.tobytes()
    return len(content) >= _MIN_BYTES and len(set(content)) > 1

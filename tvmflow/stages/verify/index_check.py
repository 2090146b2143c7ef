"""Comparison of what goes into an index: which of ten scores is largest says little of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tvmflow.stages.base import StageContext
from tvmflow.stages.verify.comparison import compare_inner_batches
from tvmflow.stages.verify.index_inputs import IndexInputs, find_index, settle_ties
from tvmflow.stages.verify.libraries import Library, LocalLibrary
from tvmflow.stages.verify.reference_run import ReferenceRun
from tvmflow.stages.verify.undetected import ZEROS
from tvmflow.stages.verify.verdict import OutputComparison
from tvmflow.stages.verify_settings import VerifySettings

if TYPE_CHECKING:
    import numpy as np
    import tvm

    from tvmflow.stages.verify.inner_tensors import InnerLibrary

    Array = np.ndarray[Any, Any]

# What fewer bytes look like may be in memory by chance.
_MIN_BYTES: Final = 16


class IndexCheck:
    """The tensors that go into an index, compared with the reference's.

    They are computed by a library of the same kernels that returns them. Where the delivered one
    computes a tensor with the same kernels, it must have the same bits in its memory.

    Args:
        indices: The tensors.
        library: The delivered library.
        reference: What the reference has computed of them.
        settings: Those of `verify`.
        context: That of the stage.
        delivered: Returns the lowered module that the delivered library has the kernels of.

    Attributes:
        tensors: The comparison of each.
    """

    def __init__(
        self,
        indices: IndexInputs,
        library: Library,
        reference: ReferenceRun,
        settings: VerifySettings,
        context: StageContext,
        delivered: Callable[[], tvm.IRModule],
    ) -> None:
        from tvmflow.stages.verify.inner_tensors import InnerLibrary

        assert indices.loaded is not None and isinstance(library, LocalLibrary)
        inner = InnerLibrary.schedule(indices.loaded, settings, context.inputs)
        module = inner.load(library)
        batches = reference.results.samples.batches
        self._expected = reference.results.outputs
        self._computed = [module.run(feed) for feed in batches]
        self.tensors: dict[str, OutputComparison] = {}
        for spec in indices.loaded.tensors:
            own, right = (
                [batch[spec.name] for batch in side] for side in (self._computed, self._expected)
            )
            comparison = compare_inner_batches(own, right, reference.tolerance)
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
        delivered: Callable[[], tvm.IRModule],
    ) -> None:
        """Look for the tensors in the delivered library's memory; with the same kernels, they must be there."""
        from tvmflow.stages.verify.inner_tensors import find_in_memory

        telling = {n: a for n in self.tensors if _is_telling(a := self._computed[0][n])}
        seen = find_in_memory(library, feed, telling)
        for name in seen:
            self.tensors[name]["seen"] = True
        missing = telling.keys() - seen
        if missing:
            for name in missing & inner.list_shared(delivered()):
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

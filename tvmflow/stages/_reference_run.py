"""The framework that a model came from, run before the library is loaded: what it computes, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._base import Reference
from tvmflow.runtime.samples import Samples
from tvmflow.stages._base import StageContext
from tvmflow.stages._imported_model import ImportedModel
from tvmflow.stages._index_inputs import IndexInputs, list_clear_indices
from tvmflow.stages._latency import exclusive_devices, measure
from tvmflow.stages._tolerances import Tolerance
from tvmflow.stages._verdict import Latency
from tvmflow.stages._verify_inputs import ReferenceOutputs, reach_more, run_reference_on
from tvmflow.stages._verify_settings import LOCAL, VerifySettings

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Feed = dict[str, Array]


class ReferenceRun(NamedTuple):
    """The results of a reference whose process has ended.

    Attributes:
        name: Framework and version.
        note: What a report must say of it besides its name, or nothing.
        results: What it computed, and of which samples.
        tolerance: How closely outputs must agree with its own.
        latency: That of the first batch; None where the library runs on another machine.
        model: The imported model.
        indices: The tensors that go into an index; None for a model without an index.
    """

    name: str
    note: str
    results: ReferenceOutputs
    tolerance: Tolerance
    latency: Latency | None
    model: ImportedModel
    indices: IndexInputs | None


def run_reference(
    settings: VerifySettings,
    model: ImportedModel,
    indices: IndexInputs | None,
    candidates: Iterator[tuple[str, Samples]],
    tolerance: Tolerance,
    context: StageContext,
) -> ReferenceRun:
    """Run the reference in a process of its own, which then ends.

    Args:
        settings: Those of `verify`.
        model: The imported model.
        indices: The tensors that go into an index, which it returns besides; None for a model without an index.
        candidates: The samples that it may be run on, with their distribution.
        tolerance: How closely outputs must agree.
        context: That of the stage.
    """
    names = [spec.name for spec in model.outputs]
    inner = indices.tensors if indices else ()
    if indices and inner:
        # what goes into an index tells more than the index
        names = [name for name in names if name not in indices.outputs]
        names += [spec.name for spec in inner]
    more = model._replace(tensors=(*model.tensors, *inner))
    with open_reference(settings, more, context) as reference:

        def run(feed: Feed) -> dict[str, Array]:
            return reference.run({**feed, **model.bound})

        results = run_reference_on(run, candidates, names, tolerance)
        clear = list_clear_indices(indices, results.outputs, tolerance) if indices else ()
        if clear:
            results = reach_more(run, results, clear, settings)
        name, note = reference.name, reference.note
        latency = None if inner else _measure(reference, results, model, settings, context)
    if inner:
        latency = _measure_alone(results, model, settings, context)
    return ReferenceRun(name, note, results, tolerance, latency, model, indices)


def _measure(
    reference: Reference,
    results: ReferenceOutputs,
    model: ImportedModel,
    settings: VerifySettings,
    context: StageContext,
) -> Latency | None:
    if settings.run_on != LOCAL:
        return None
    feed = {**results.samples.batches[0], **model.bound}
    with exclusive_devices(settings, context):
        return measure(reference, feed, settings.verify.repeat)


def _measure_alone(
    results: ReferenceOutputs,
    model: ImportedModel,
    settings: VerifySettings,
    context: StageContext,
) -> Latency | None:
    """Measure the reference without inner tensors, which cost time."""
    if settings.run_on != LOCAL:
        return None
    with open_reference(settings, model, context) as reference:
        return _measure(reference, results, model, settings, context)


def open_reference(
    settings: VerifySettings, model: ImportedModel, context: StageContext
) -> AbstractContextManager[Reference]:
    """Start the reference of a model, which also returns the model's `tensors`."""
    scratch = context.work / "reference"
    scratch.mkdir(exist_ok=True)
    return FRONTENDS[settings.model["kind"]].reference(
        model.files,
        model.inputs,
        model.outputs,
        tensors=model.tensors,
        threads=settings.threads,
        scratch=scratch,
    )

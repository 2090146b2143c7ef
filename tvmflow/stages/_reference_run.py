"""The framework that a model came from, run before the library is loaded: what it computes, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from tvmflow.core.types import Json
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._base import Reference
from tvmflow.runtime.samples import Samples
from tvmflow.stages._base import StageContext
from tvmflow.stages._imported_model import ImportedModel, read_imported_model
from tvmflow.stages._latency import exclusive_devices, measure
from tvmflow.stages._tolerances import Tolerance
from tvmflow.stages._verdict import Latency
from tvmflow.stages._verify_inputs import ReferenceOutputs, run_reference_on
from tvmflow.stages._verify_settings import LOCAL, VerifySettings


class ReferenceRun(NamedTuple):
    """The results of a reference whose process has ended.

    Attributes:
        name: Framework and version.
        note: What a report must say of it besides its name, or nothing.
        results: What it computed, and of which samples.
        tolerance: How closely outputs must agree with its own.
        latency: That of the first batch; None where the library runs on another machine.
    """

    name: str
    note: str
    results: ReferenceOutputs
    tolerance: Tolerance
    latency: Latency | None


def run_reference(
    settings: VerifySettings,
    signature: Mapping[str, Json],
    candidates: Iterator[tuple[str, Samples]],
    tolerance: Tolerance,
    context: StageContext,
) -> ReferenceRun:
    """Run the reference in a process of its own, which then ends.

    Args:
        settings: Those of `verify`.
        signature: The signature of the imported model.
        candidates: The samples that it may be run on, with their distribution.
        tolerance: How closely outputs must agree.
        context: That of the stage.
    """
    names = [spec["name"] for spec in signature["outputs"]]
    model = read_imported_model(signature, context.inputs)
    with open_reference(settings, model, context) as reference:
        results = run_reference_on(
            lambda feed: reference.run({**feed, **model.bound}), candidates, names, tolerance
        )
        latency = None
        if settings.run_on == LOCAL:
            feed = {**results.samples.batches[0], **model.bound}
            with exclusive_devices(settings, context):
                latency = measure(reference, feed, settings.verify.repeat)
        return ReferenceRun(reference.name, reference.note, results, tolerance, latency)


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

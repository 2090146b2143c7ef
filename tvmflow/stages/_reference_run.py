"""The framework that a model came from, run before the library is loaded: what it computes, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.core.types import Json, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._base import Reference
from tvmflow.frontends._inputs import array_of
from tvmflow.stages._base import StageContext
from tvmflow.stages._latency import exclusive_devices, measure
from tvmflow.stages._verdict import Latency
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
        outputs: Its outputs and inner tensors by name, for each batch.
        latency: That of the first batch; None where the library runs on another machine.
    """

    name: str
    note: str
    outputs: list[dict[str, Array]]
    latency: Latency | None


def run_reference(
    settings: VerifySettings,
    signature: Mapping[str, Json],
    batches: Sequence[Feed],
    context: StageContext,
) -> ReferenceRun | None:
    """Run the reference in a process of its own, which then ends; return None without a reference.

    Args:
        settings: Those of `verify`.
        signature: The signature of the imported model.
        batches: The inputs by name, for each batch.
        context: That of the stage.
    """
    if settings.verify.against == "none":
        return None
    bound = {
        entry["name"]: array_of(TensorSpec.from_json(entry), entry["value"])
        for entry in signature.get("bound", ())
    }
    feeds = [{**batch, **bound} for batch in batches]
    with _open_reference(settings, signature, context) as reference:
        outputs = [reference.run(feed) for feed in feeds]
        latency = None
        if settings.run_on == LOCAL:
            with exclusive_devices(settings, context):
                latency = measure(reference, feeds[0], settings.verify.repeat)
        return ReferenceRun(reference.name, reference.note, outputs, latency)


def _open_reference(
    settings: VerifySettings, signature: Mapping[str, Json], context: StageContext
) -> AbstractContextManager[Reference]:
    scratch = context.work / "reference"
    scratch.mkdir(exist_ok=True)
    inputs, bound, outputs, tensors = (
        tuple(map(TensorSpec.from_json, signature.get(kind, ())))
        for kind in ("inputs", "bound", "outputs", "tensors")
    )
    return FRONTENDS[settings.model["kind"]].reference(
        {role: path for role, path in context.inputs.items() if role != "data"},
        (*inputs, *bound),
        outputs,
        tensors=tensors,
        threads=max(machine.threads for machine in settings.machines.values()),
        scratch=scratch,
    )

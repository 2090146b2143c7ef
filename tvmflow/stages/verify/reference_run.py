"""The run of the reference (usually the model's framework), before the library is loaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from tvmflow.core.dimensions import sizes_text
from tvmflow.core.errors import StageError
from tvmflow.core.types import Array, Feed
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel, Reference
from tvmflow.graph import ir
from tvmflow.runtime.arrays import unpack_rows
from tvmflow.runtime.module import Module
from tvmflow.runtime.samples import Samples
from tvmflow.runtime.weights import read_safetensors
from tvmflow.stages.base import StageContext
from tvmflow.stages.quantize.calibration import Signature
from tvmflow.stages.quantize.points import FloatModel
from tvmflow.stages.verify import inputs
from tvmflow.stages.verify.comparison import Tolerance, find_undetected
from tvmflow.stages.verify.draws import MoreDraws, RandomDraws
from tvmflow.stages.verify.inner_tensors import IndexInputs, list_clear_indices
from tvmflow.stages.verify.inputs import ImportedModel, ReferenceOutputs, SizeOutputs, Sizes
from tvmflow.stages.verify.libraries import Library
from tvmflow.stages.verify.verdict import Exercise
from tvmflow.stages.verify_settings import LOCAL, VerifySettings


class ReferenceRun(NamedTuple):
    """The results of a reference.

    Attributes:
        note: A note for reports; may be empty.
        timed: The running reference, to time it interleaved with the library; None if the library runs elsewhere.
        indices: The inputs of argmax-like operators; None for a model without such operators.
        more: Additional random inputs, and the branches that all inputs reach.
        sized: The outputs at each combination of sizes; empty for a model with fixed shapes.
        swept: The outputs at the sizes of the sweep, in which only outputs are compared.
        floats: The float model's outputs, if the recipe quantizes it.
    """

    name: str
    note: str
    results: ReferenceOutputs
    tolerance: Tolerance
    timed: Reference | None
    indices: IndexInputs | None
    more: MoreDraws = MoreDraws()
    sized: tuple[SizeOutputs, ...] = ()
    swept: tuple[SizeOutputs, ...] = ()
    floats: Sequence[Mapping[str, Array]] = ()


class Case(NamedTuple):
    """The inputs and the reference that a library is verified with."""

    settings: VerifySettings
    context: StageContext
    model: ImportedModel
    data: Samples
    reference: ReferenceRun | None

    @property
    def tensors(self) -> dict[str, Array]:
        """The first batch, with the reference's outputs for it."""
        outputs = self.reference.results.outputs[0] if self.reference else {}
        return {**self.data.batches[0], **outputs}

    def read_feed(self, library: Library) -> Feed:
        """Return the first batch, restricted to the library's inputs."""
        return {spec.name: self.data.batches[0][spec.name] for spec in library.inputs}


def run_reference(
    settings: VerifySettings,
    model: ImportedModel,
    indices: IndexInputs | None,
    candidates: Iterator[tuple[str, Samples]],
    tolerance: Tolerance,
    tolerance_of_draws: Tolerance,
    combinations: Sequence[Sizes],
    context: StageContext,
    stack: contextlib.ExitStack,
    swept_sizes: Sequence[Sizes] = (),
    elements: int = 0,
) -> ReferenceRun:
    """Run the reference in its own process; `stack` keeps this process only if it will be timed.

    It runs on one or several `candidates`, pairs of distribution and samples. `tolerance_of_draws` is for inputs of
    other magnitudes. `elements` counts the elements of all tensors of a fixed-shape model. At `swept_sizes`, only
    outputs are compared.
    """
    names = [spec.name for spec in model.outputs]
    inner = indices.tensors if indices else ()
    if indices and inner:
        # the scores before an argmax detect more faults than the index
        names = [name for name in names if name not in indices.outputs]
        names += [spec.name for spec in inner]
    more = with_inner(settings, model, indices.loaded) if indices and indices.loaded else model
    is_timed = settings.run_on == LOCAL
    dimensions = settings.add_tuning_sizes(model.dimensions)
    limited = inputs.limit_draws(settings, model.operands, inputs.choose_tuning_sizes(dimensions))
    with contextlib.ExitStack() as own:
        reference = own.enter_context(open_reference(settings, more, context))

        def run(feed: Feed) -> dict[str, Array]:
            return reference.run({**feed, **model.bound})

        results = inputs.run_reference_on(run, candidates, names, tolerance)
        packed = {spec.name for spec in model.inputs if spec.row_scales}
        drawn = RandomDraws(run, results, limited, packed)
        if indices:
            if clear := list_clear_indices(indices, results.outputs, tolerance):
                drawn.reach_more(clear, can_settle_ties=bool(inner))
            drawn.vary_indices(indices.outputs, names, tolerance)
        observe = _make_observe(reference, model)
        compared = () if indices and indices.selects else tuple(names)
        if indices:
            # at other magnitudes, compare no indices: ties would look like errors
            returned = {spec.name for spec in model.outputs} - {*indices.outputs}
            compared = tuple(name for name in compared if name in returned)
        more_draws = drawn.draw_more(observe, compared, tolerance_of_draws)
        if is_timed:
            more_draws = drawn.draw_repeats(more_draws, elements, tolerance)
        results = drawn.results
        sized = tuple(run_at(run, sizes, model, settings, tolerance) for sizes in combinations)
        swept = tuple(run_at(run, sizes, model, settings, tolerance) for sizes in swept_sizes)
        name, note, timed = reference.name, reference.note, None
        floats = []
        if isinstance(reference, QuantizedReference):
            floats = [
                reference.run_float({**feed, **model.bound}) for feed in results.samples.batches
            ]
        if is_timed and not more.tensors:
            timed = reference
            stack.push(own.pop_all())
    if is_timed and timed is None:
        # time a reference without intermediate tensors, which would take time
        timed = stack.enter_context(open_reference(settings, model._replace(tensors=()), context))
    return ReferenceRun(
        name=name,
        note=note,
        results=results,
        tolerance=tolerance,
        timed=timed,
        indices=indices,
        sized=sized,
        more=more_draws,
        swept=swept,
        floats=floats,
    )


def _make_observe(
    reference: Reference, model: ImportedModel
) -> Callable[[Feed], list[Exercise]] | None:
    """Return a function that measures how much of a batch is in each branch; None if impossible."""
    if not reference.can_observe:
        return None

    def observe(feed: Feed) -> list[Exercise]:
        return [
            {"node": node, "operator": operator, "branches": dict(branches)}
            for node, operator, branches in reference.observe({**feed, **model.bound})
        ]

    return observe


class QuantizedReference:
    """The quantized model, computed in float32; timing uses the framework with the float model."""

    def __init__(self, framework: Reference, module: Module) -> None:
        self.name, self.note = framework.name, framework.note
        self.run_float, self.run_as_timed = framework.run, framework.run_as_timed
        self.latency = framework.latency
        self.can_observe, self.observe = framework.can_observe, framework.observe
        self._module = module

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of the quantized model for one batch."""
        outputs = self._module.run({spec.name: feed[spec.name] for spec in self._module.inputs})
        for spec in self._module.outputs:
            if spec.row_scales:
                outputs[spec.name] = unpack_rows(outputs[spec.name])
        return outputs


def run_at(
    run: Callable[[Feed], dict[str, Array]],
    sizes: Sizes,
    model: ImportedModel,
    settings: VerifySettings,
    tolerance: Tolerance,
) -> SizeOutputs:
    """Run the reference at some sizes on the first random inputs that detect every wrong library.

    Raises:
        StageError: if the reference cannot run the model at these sizes.
    """
    names = [spec.name for spec in model.outputs]
    specs = [spec for spec in model.inputs if spec.name not in model.bound]
    best: SizeOutputs | None = None
    for feed in inputs.draw_inputs(specs, sizes, settings, model.operands):
        try:
            outputs = run(feed)
        except StageError as error:
            raise StageError(
                f"at {sizes_text(sizes)}: {error.message}",
                fix="narrow the ranges of `dimensions` to sizes that the model can have",
            ) from error
        if best is None or inputs.is_finite([outputs], names):
            best = SizeOutputs(sizes, feed, outputs)
            if inputs.is_finite([outputs], names) and not find_undetected(
                [outputs], names, tolerance
            ):
                break
    assert best is not None
    return best


def with_inner(
    settings: VerifySettings, model: ImportedModel, loaded: LoadedModel
) -> ImportedModel:
    """Return the model, changed so that its reference also returns the intermediate tensors of `loaded`."""
    if settings.quantized:
        return model._replace(quantized=loaded)
    return model._replace(tensors=(*model.tensors, *loaded.tensors))


def open_reference(
    settings: VerifySettings, model: ImportedModel, context: StageContext
) -> AbstractContextManager[Reference]:
    """Start the reference of a model, which also returns the model's `tensors`."""
    return (
        _open_quantized(settings, model, context)
        if settings.quantized
        else _open_framework(settings, model, context)
    )


@contextlib.contextmanager
def _open_quantized(
    settings: VerifySettings, model: ImportedModel, context: StageContext
) -> Iterator[Reference]:
    document = json.loads(context.inputs["import/signature.json"].read_text())
    if model.quantized:
        computed = FloatModel(model.quantized.mod, model.quantized.params, ())
        module = Signature(document).compile(computed, outputs=model.quantized.tensors)
    else:
        mod = ir.load_module(context.inputs["import/model.json"])
        params = read_safetensors(context.inputs["import/params.safetensors"])
        module = Signature(document).compile(FloatModel(mod, params, ()))
    with _open_framework(settings, model, context) as framework:
        yield QuantizedReference(framework, module)


def _open_framework(
    settings: VerifySettings, model: ImportedModel, context: StageContext
) -> AbstractContextManager[Reference]:
    scratch = context.work / "reference"
    scratch.mkdir(exist_ok=True)
    return FRONTENDS[settings.model["kind"]].reference(
        model.files,
        model.framework_inputs,
        model.outputs,
        tensors=model.tensors,
        threads=settings.threads,
        scratch=scratch,
    )

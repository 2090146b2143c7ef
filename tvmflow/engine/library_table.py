"""The libraries of a recipe compared: all variants and targets, Pareto-optimal ones marked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from tvmflow.core.canonical_json import canonical
from tvmflow.core.types import Artifact, Plan, StageSpec, TensorSpec
from tvmflow.stages import export, import_model, verify
from tvmflow.stages.base import find_facts
from tvmflow.stages.export import ExportFacts
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.verify.verdict import Verdict, find_largest_error

_T = TypeVar("_T")


class ComparedLibrary(NamedTuple):
    """A library of a recipe, with what was measured of it; None is what was not.

    Attributes:
        recipe: The name of the recipe, or of its variant.
        variant: The name of the variant; empty for the recipe itself.
        target: The name of the target.
        inputs: The inputs of the model, as text.
        group: The number of its group: the libraries for one machine and the same inputs.
        latency_s: Median latency, as `verify` measured it.
        bytes: Size of the library; of all its parts, for a partitioned target.
        accuracy: Top-1 accuracy.
        max_abs_error: Largest absolute error of any output.
        is_pareto_optimal: Whether it is better than each other library of its group in at least one
            of these, or equal in all; false when there is none to compare it with.
    """

    recipe: str
    variant: str
    target: str
    inputs: str
    group: int
    latency_s: float | None = None
    bytes: int | None = None
    accuracy: float | None = None
    max_abs_error: float | None = None
    is_pareto_optimal: bool = False

    @property
    def costs(self) -> dict[str, float]:
        """The measurements, each so that less is better; accuracy stands in for the largest error."""
        is_accuracy = self.accuracy is not None
        costs = {
            "latency": self.latency_s,
            "bytes": self.bytes,
            "inaccuracy": None if self.accuracy is None else -self.accuracy,
            "error": None if is_accuracy else self.max_abs_error,
        }
        return {name: cost for name, cost in costs.items() if cost is not None}


def compare_libraries(plan: Plan, artifacts: Mapping[str, Artifact]) -> tuple[ComparedLibrary, ...]:
    """Return the libraries of every recipe that has several which a user may want to compare.

    That is a recipe with several variants, or with several targets for one machine.
    """
    specs = {spec.id: spec for spec in plan.stages}
    origins = {origin.recipe: origin for origin in plan.origins}
    by_path: dict[str, list[ComparedLibrary]] = {}
    groups: dict[bytes, int] = {}
    for spec in plan.stages:
        verdict = _find(Verdict, spec.id, artifacts) if spec.stage == verify.NAME else None
        if verdict is None or spec.recipe not in origins:
            continue
        origin = origins[spec.recipe]
        inputs = _read_inputs(spec, artifacts)
        latency = verdict.get("latency", {}).get("library")
        shapes = [tensor.to_json() for tensor in inputs]
        key = canonical([origin.path, spec.settings["target"], shapes])
        library = ComparedLibrary(
            recipe=spec.recipe,
            variant=origin.variant,
            target=spec.target,
            inputs=", ".join(map(_format_input, inputs)),
            group=groups.setdefault(key, len(groups)),
            latency_s=latency and latency["median"],
            bytes=_add_bytes(spec, specs, artifacts),
            accuracy=verdict.get("accuracy"),
            max_abs_error=find_largest_error(verdict),
        )
        by_path.setdefault(origin.path, []).append(library)
    return tuple(
        library
        for libraries in by_path.values()
        if _is_worth_comparing(libraries)
        for library in mark_pareto_optimal(sorted(libraries, key=lambda item: item.group))
    )


def _is_worth_comparing(libraries: Sequence[ComparedLibrary]) -> bool:
    variants = {library.variant for library in libraries}
    groups = {library.group for library in libraries}
    return len(variants) > 1 or len(groups) < len(libraries)


def mark_pareto_optimal(libraries: Sequence[ComparedLibrary]) -> list[ComparedLibrary]:
    """Return the libraries with those marked that no other one dominates.

    A library dominates another if it is at least as good in latency, size and accuracy (or largest
    error), and better in one of these. Libraries are compared within their group, and only where the
    same was measured of both, and more than one of these.
    """
    comparable: dict[tuple[int, tuple[str, ...]], list[dict[str, float]]] = {}
    for library in libraries:
        comparable.setdefault(_measured(library), []).append(library.costs)
    return [
        library._replace(
            is_pareto_optimal=_is_pareto_optimal(library.costs, comparable[_measured(library)])
        )
        for library in libraries
    ]


def _measured(library: ComparedLibrary) -> tuple[int, tuple[str, ...]]:
    """Return the group of a library, and what was measured of it."""
    return library.group, tuple(library.costs)


def _is_pareto_optimal(
    costs: Mapping[str, float], comparable: Sequence[Mapping[str, float]]
) -> bool:
    """Return whether none of the comparable libraries, of which it is one, dominates a library."""
    # The size alone says nothing of what was given up for it.
    is_known = len(costs) > 1 and len(comparable) > 1
    return is_known and not any(_dominates(other, costs) for other in comparable)


def _dominates(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one != other and all(one[name] <= other[name] for name in other)


# ---------------------------------------------------------------- what was measured


def _find(kind: type[_T], stage_id: str, artifacts: Mapping[str, Artifact]) -> _T | None:
    """Return the facts of a stage; None where it has no result."""
    return find_facts(kind, artifacts[stage_id].facts) if stage_id in artifacts else None


def _read_inputs(spec: StageSpec, artifacts: Mapping[str, Artifact]) -> tuple[TensorSpec, ...]:
    """Return the inputs of what a stage verifies."""
    for need in spec.needs:
        if need.stage == import_model.NAME:
            imported = _find(ImportFacts, need.stage_id, artifacts)
            return imported.inputs if imported else ()
    return ()


def _add_bytes(
    spec: StageSpec, specs: Mapping[str, StageSpec], artifacts: Mapping[str, Artifact]
) -> int | None:
    """Return the size of the library that a stage reads, or of those that it was joined from."""
    sizes = []
    for need in spec.needs:
        if need.stage.partition("/")[0] == export.NAME:
            exported = _find(ExportFacts, need.stage_id, artifacts)
            size = exported and exported.library_bytes
            other = specs[need.stage_id]
            sizes.append(_add_bytes(other, specs, artifacts) if size is None else size)
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _format_input(tensor: TensorSpec) -> str:
    return f"{tensor.name} {'×'.join(map(str, tensor.sizes or tensor.shape))}"

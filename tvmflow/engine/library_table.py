"""The comparison of a recipe's libraries: of all variants and targets, with the Pareto-optimal ones marked. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tvmflow.core.canonical_json import canonical
from tvmflow.core.types import Artifact, Json, Plan, StageSpec
from tvmflow.stages.base import Facts


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

    Args:
        plan: The plan of a run.
        artifacts: The results of its stages by id, of those that have one.
    """
    facts = {stage_id: artifact.facts for stage_id, artifact in artifacts.items()}
    specs = {spec.id: spec for spec in plan.stages}
    origins = {origin.recipe: origin for origin in plan.origins}
    by_path: dict[str, list[ComparedLibrary]] = {}
    groups: dict[bytes, int] = {}
    for spec in plan.stages:
        if spec.stage != "verify" or spec.id not in facts or spec.recipe not in origins:
            continue
        origin = origins[spec.recipe]
        inputs = _read_inputs(spec, facts)
        key = canonical([origin.path, spec.settings["target"], inputs])
        library = ComparedLibrary(
            recipe=spec.recipe,
            variant=origin.variant,
            target=spec.target,
            inputs=", ".join(map(_format_input, inputs)),
            group=groups.setdefault(key, len(groups)),
            latency_s=facts[spec.id].get("latency", {}).get("library", {}).get("median"),
            bytes=_add_bytes(spec, specs, facts),
            accuracy=facts[spec.id].get("accuracy"),
            max_abs_error=_find_largest_error(facts[spec.id]),
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


def _read_inputs(verify: StageSpec, facts: Mapping[str, Facts]) -> list[Json]:
    """Return name, shape and dtype of the inputs of what a stage verifies."""
    for need in verify.needs:
        if need.stage == "import":
            return list(facts.get(need.stage_id, {}).get("inputs", ()))
    return []


def _add_bytes(
    spec: StageSpec, specs: Mapping[str, StageSpec], facts: Mapping[str, Facts]
) -> int | None:
    """Return the size of the library that a stage reads, or of those that it was joined from."""
    sizes = []
    for need in spec.needs:
        if need.stage.partition("/")[0] == "export":
            size = facts.get(need.stage_id, {}).get("library_bytes")
            sizes.append(_add_bytes(specs[need.stage_id], specs, facts) if size is None else size)
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _find_largest_error(verdict: Facts) -> float | None:
    outputs = [*verdict.get("outputs", {}).values(), *verdict.get("index_inputs", {}).values()]
    # Infinities and NaN are text there.
    errors = [float(output.get("max_abs_error", math.nan)) for output in outputs]
    return max(errors) if errors and all(map(math.isfinite, errors)) else None


def _format_input(tensor: Mapping[str, Json]) -> str:
    return f"{tensor['name']} {'×'.join(map(str, tensor['shape']))}"

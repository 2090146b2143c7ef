"""`lower`: lower a model to kernels for a machine, and a function that transforms its weights.

It is planned with the first stage that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pydantic import Field

from tvmflow.compiler import VectorWidth
from tvmflow.core.codec import omits_empty
from tvmflow.core.fork_server import Emit
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Json
from tvmflow.recipe import Recipe
from tvmflow.stages import choose
from tvmflow.stages.base import (
    KnownFacts,
    Lowering,
    StageContext,
    StageSettings,
    StageTraits,
    lowering_options,
    no_files,
    parse_settings,
)
from tvmflow.targets.resolve import ResolvedTarget

if TYPE_CHECKING:
    # the planner imports this module and must not load TVM
    from tvmflow.compiler import LoweredModel
    from tvmflow.graph.ir_dump import IRDump

NAME: Final = "lower"


def dump_ir(payload: dict[str, Json], _: Emit) -> None:
    """Lower the model again and write its IR; `payload` holds `settings`, `inputs` and `folder`."""
    from tvmflow.graph.ir_dump import IRDump

    inputs = {name: Path(path) for name, path in payload["inputs"].items()}
    settings = parse_settings(run, payload["settings"])
    _lower(settings, inputs, IRDump(Path(payload["folder"])))


TRAITS: Final = StageTraits(
    version=2,
    scope="level",
    needs={"import": ("model.json",), choose.NAME: (choose.CHOICES,)},
    optional_needs=(choose.NAME,),
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
    added_with=("extract_tasks", "build"),
    dump_ir=dump_ir,
)
deliveries = no_files

LOWERED: Final = "lowered.json"
LOWERED_ROLE: Final = f"{NAME}/{LOWERED}"
"""The role of the lowered model for the stages that read it."""


class LowerSettings(StageSettings):
    """The target, the lowering options, and the tuning sizes of each dimension."""

    target: dict[str, Json]
    lowering: Lowering
    tune_at: dict[str, tuple[int, ...]] = Field(default={})


def settings(recipe: Recipe, target: ResolvedTarget) -> LowerSettings:
    """Return the target, the lowering options and the tuning sizes."""
    return LowerSettings(
        target=target.tvm,
        lowering=replace(lowering_options(recipe), shares_weights=bool(target.isa_level_target)),
        tune_at={d.name: d.tune_at for d in recipe.list_dimensions() if d.tune_at},
    )


@omits_empty("vectors")
class LowerFacts(NamedTuple):
    """The facts of a lowered model.

    Attributes:
        kernels: How many kernels the model has.
        vectors: The vector width of its kernels; None if the target has only one.
    """

    kernels: int
    vectors: VectorWidth | None = None


def run(settings: LowerSettings, context: StageContext) -> LowerFacts:
    """Lower the model, and write it for all stages that read it."""
    from tvmflow.graph import ir

    model = _lower(settings, context.inputs)
    model.write(context.out / LOWERED)
    return LowerFacts(kernels=len(ir.list_kernels(model.mod)), vectors=model.width)


def _lower(
    settings: LowerSettings, inputs: Mapping[str, Path], dump: IRDump | None = None
) -> LoweredModel:
    from tvmflow.compiler import lower
    from tvmflow.graph import ir
    from tvmflow.graph.dynamic_shapes import read_dimensions, with_dimensions
    from tvmflow.targets.tvm_target import make_target

    target = make_target(settings.target)
    mod = ir.load_module(inputs["import/model.json"])
    if dimensions := read_dimensions(mod["main"]):
        tuned = [d._replace(tune_at=settings.tune_at.get(d.name, ())) for d in dimensions]
        mod.update_func(mod.get_global_var("main"), with_dimensions(mod["main"], tuned))
    return lower(mod, target, settings.lowering, dump, choose.read_choices(inputs))


def describe(facts: LowerFacts, inputs: KnownFacts) -> list[str]:
    """Return the count of kernels, and the vector width if it is not the widest one."""
    return [count_text(facts.kernels, "kernel"), *_describe_vectors(facts.vectors, always=False)]


def explain(facts: LowerFacts) -> list[str]:
    """Return the vector width, and the estimated costs that it was chosen by."""
    return _describe_vectors(facts.vectors, always=True)


def _describe_vectors(vectors: VectorWidth | None, *, always: bool) -> list[str]:
    """Return the vector width with estimates; with `always`, even if it is the widest one."""
    if vectors is None:
        return []
    bits, costs = vectors
    if not costs:
        return [f"vectors of {bits} bits, as kernels.vector_bits says"]
    if not always and bits == max(costs):
        return []
    best = costs.get(bits) or 1.0
    others = ", ".join(
        f"{cost / best:.2f} times as many with {width}"
        for width, cost in sorted(costs.items(), reverse=True)
        if width != bits
    )
    line = f"vectors of {bits} bits by the channels of the model"
    return [f"{line}; weighted operations on vectors: {others}" if others else line]

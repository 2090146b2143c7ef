"""`build`: lowered kernels, the chosen schedules and the weights become object code."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from tvmflow.compiler.form_names import SYSTEM_LIBRARY
from tvmflow.compiler.options import lowering_options, schedules_version
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import StageError
from tvmflow.core.files import hash_file
from tvmflow.core.fork_server import Emit
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Json
from tvmflow.recipe import Recipe
from tvmflow.stages._base import (
    Facts,
    Lowering,
    StageContext,
    StageSettings,
    StageTraits,
    name_some,
    no_files,
    parse_settings,
)
from tvmflow.stages._runtime_choice import (
    FORMS,
    choose_runtime,
    describe_runtime,
    list_forms,
)
from tvmflow.targets.backends import backend_for
from tvmflow.targets.c_library import symbol_prefix
from tvmflow.targets.resolve import ResolvedTarget

if TYPE_CHECKING:
    # the planner imports this module and must not load TVM
    from tvmflow.compiler.ir_dump import IRDump
    from tvmflow.compiler.lowering import LoweredModel

TRAITS: Final = StageTraits(
    version=7,
    scope="machine",
    needs={
        "import": ("model.json", "params.safetensors"),
        "extract_tasks": ("workloads.json",),
        "pick_best": ("chosen.json",),
    },
    optional_needs=("extract_tasks", "pick_best"),
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
    compiles_kernels=True,
    dump_ir=f"{__name__}:dump_ir",
)
deliveries = no_files

KERNELS: Final = "kernels.json"

TUNED: Final = "tuned"
"""In place of a schedule rule for a kernel whose schedule was found by a search."""

UNSCHEDULED: Final = "none"
"""In place of a schedule rule for a kernel that has no schedule."""

GENERIC_LOOPS: Final = "generic_loops"
"""The rule for kernels that no other rule fits."""

WITHOUT_RULE: Final = (GENERIC_LOOPS, UNSCHEDULED)
"""In place of a rule that fits the kernel."""

# What a summary says of kernels by the rule of their schedule, in this order.
_RULE_TEXTS: Final[Mapping[str, str]] = {
    TUNED: "tuned",
    "register_tiles": "with register tiles",
    "winograd": "with Winograd transforms",
    "row_reductions": "with row reductions",
    "elementwise": "elementwise",
    GENERIC_LOOPS: "with generic loops",
    UNSCHEDULED: "without a schedule",
}


class BuildSettings(StageSettings):
    """The target, how kernels are lowered and scheduled, the runtime, and the forms that outputs need besides.

    `prefix` is that of symbols in a system library: code knows the recipe's name only there.
    """

    target: dict[str, Json]
    lowering: Lowering
    schedules: int
    runtime: str
    forms: tuple[str, ...]
    prefix: str = ""


def settings(recipe: Recipe, target: ResolvedTarget) -> BuildSettings:
    """Return what the code is for, and what shapes it besides tuning."""
    forms = list_forms(recipe)
    runtime = choose_runtime(recipe, target)
    return BuildSettings(
        target=target.tvm,
        lowering=lowering_options(recipe),
        schedules=schedules_version(recipe),
        runtime=runtime,
        forms=tuple(sorted(forms)),
        prefix=symbol_prefix(recipe.name) if SYSTEM_LIBRARY in forms else "",
    )


def run(settings: BuildSettings, context: StageContext) -> Facts:
    """Compile for the target; every chosen record must have been applied, or this fails.

    A kernel without a record is scheduled by a rule, where there is one for it.
    """
    paths = {name: str(path) for name, path in context.inputs.items()}
    builder = backend_for(settings.target).call_builder
    facts = builder(compile_files, settings.to_json(), paths, str(context.out))
    return cast(Facts, facts)


def compile_files(document: Json, inputs: Mapping[str, str], out: str) -> Facts:
    """Compile in the process that the backend chose; arguments and result are JSON."""
    from tvmflow.compiler import forms, lowering
    from tvmflow.compiler.c_library.program import find_runtime

    settings, folder = parse_settings(run, document), Path(out)
    paths = {name: Path(path) for name, path in inputs.items()}
    target = lowering.make_target(settings.target)
    model, rules = _schedule(settings, paths)
    weights = model.compute_weights(lowering.load_weights(paths["import/params.safetensors"]))
    prefix = _content_prefix(settings, paths)
    form_inputs = forms.FormInputs(model.mod, weights, target, settings.prefix, prefix)
    runtime, reason = find_runtime(model.mod, settings.runtime)
    for form in sorted({FORMS[runtime], *settings.forms}):
        (folder / form).mkdir()
        forms.FORMS[form](form_inputs, folder / form)
    kernels = lowering.list_kernels(model.mod)
    (folder / KERNELS).write_text(json.dumps(rules, indent=1, sort_keys=True))
    facts = {"kernels": len(kernels), "schedule_rules": _group_by_rule(rules), "runtime": runtime}
    return {**facts, "needs_tvm_for": reason} if reason else facts


def _content_prefix(settings: BuildSettings, paths: Mapping[str, Path]) -> str:
    """Return a prefix of symbols that only the same kernels and constants have.

    Models of any names then share one build, and two models can be linked into one program.
    """
    files = [hash_file(paths[f"import/{name}"]) for name in TRAITS.needs["import"]]
    chosen = _read_json(paths.get("pick_best/chosen.json"))
    shaped_by = settings.model_dump(mode="json", include={"target", "lowering", "schedules"})
    return f"tf_{digest_of([shaped_by, files, chosen])[:16]}_"


def dump_ir(payload: dict[str, Json], _: Emit) -> None:
    """Lower and schedule the model once more; takes `settings`, `inputs`, and the `folder` to write to."""
    from tvmflow.compiler.ir_dump import IRDump

    inputs = {name: Path(path) for name, path in payload["inputs"].items()}
    _schedule(parse_settings(run, payload["settings"]), inputs, IRDump(Path(payload["folder"])))


def _schedule(
    settings: BuildSettings, inputs: Mapping[str, Path], dump: IRDump | None = None
) -> tuple[LoweredModel, dict[str, str]]:
    """Lower the model and schedule its kernels.

    Returns:
        The model, and the schedule rule of each kernel, `TUNED` for one with a chosen record.
    """
    from tvmflow.compiler import lowering, schedules
    from tvmflow.tuning import apply

    target = lowering.make_target(settings.target)
    mod = lowering.load_ir(inputs["import/model.json"])
    model = lowering.lower(mod, target, settings.lowering, dump)
    scheduled, tuned = model.mod, list[str]()
    if chosen := _read_json(inputs.get("pick_best/chosen.json")):
        started = time.perf_counter()
        workloads = _read_json(inputs["extract_tasks/workloads.json"])
        scheduled, tuned = apply.apply_chosen(scheduled, chosen, workloads, target)
        if not tuned:
            raise StageError(
                f"no kernel of this model has the structure of the {count_text(len(chosen), 'chosen schedule')}",
                fix="this is a bug in tvmflow: the lowering of extract_tasks and build differ; please report it",
            )
        if dump is not None:
            dump.write("tuned_schedules", scheduled, time.perf_counter() - started)
    started = time.perf_counter()
    scheduled, rules = schedules.schedule_untuned(scheduled, settings.target, settings.schedules)
    if dump is not None:
        dump.write("untuned_schedules", scheduled, time.perf_counter() - started)
    return replace(model, mod=scheduled), {**rules, **dict.fromkeys(tuned, TUNED)}


def _group_by_rule(rules: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the kernels of each schedule rule, in alphabetical order."""
    kernels: dict[str, list[str]] = {}
    for name, rule in sorted(rules.items()):
        kernels.setdefault(rule, []).append(name)
    return dict(sorted(kernels.items()))


def _read_json(path: Path | None) -> dict[str, Json]:
    return dict(json.loads(path.read_text())) if path else {}


def describe(facts: Facts, inputs: Mapping[str, Facts]) -> list[str]:
    """Return how many kernels each schedule rule scheduled; those that no rule fits are named."""
    rules = facts["schedule_rules"]
    counts = [
        f"{len(rules[rule])} {text}"
        for rule, text in _RULE_TEXTS.items()
        if rule in rules and rule != UNSCHEDULED
    ]
    lines = [f"{count_text(facts['kernels'], 'kernel')}: {', '.join(counts)}"] if counts else []
    lines += describe_runtime(facts)
    if GENERIC_LOOPS in rules:
        lines.append(f"no rule fits, so with generic loops: {name_some(rules[GENERIC_LOOPS])}")
    if UNSCHEDULED in rules:
        lines.append(f"WITHOUT A SCHEDULE, so slow: {name_some(rules[UNSCHEDULED])}")
    return lines


def explain(facts: Facts) -> list[str]:
    """Return the kernels of each schedule rule."""
    lines = []
    for rule, kernels in facts["schedule_rules"].items():
        lines.append(f"kernels {_RULE_TEXTS.get(rule, rule)}")
        lines += [f"  {name}" for name in kernels]
    return lines

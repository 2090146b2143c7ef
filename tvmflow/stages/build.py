"""`build`: compile lowered kernels, with the chosen schedules, and weights into object code."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json, omits_empty, to_json
from tvmflow.core.files import hash_file
from tvmflow.core.fork_server import Emit
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Json
from tvmflow.recipe import Recipe
from tvmflow.stages.base import (
    KnownFacts,
    StageContext,
    StageSettings,
    StageTraits,
    name_some,
    no_files,
    parse_settings,
    schedules_version,
)
from tvmflow.stages.lower import LOWERED, LOWERED_ROLE
from tvmflow.stages.runtime_choice import FORMS, choose_runtime, describe_runtime, list_forms
from tvmflow.targets.backends import backend_for
from tvmflow.targets.c_runtime import symbol_prefix
from tvmflow.targets.form_names import SYSTEM_LIBRARY
from tvmflow.targets.resolve import ResolvedTarget

if TYPE_CHECKING:
    import tvm

    from tvmflow.compiler import LoweredModel
    from tvmflow.graph.ir_dump import IRDump


NAME: Final = "build"


def dump_ir(payload: dict[str, Json], _: Emit) -> None:
    """Schedule the model again and write its IR; `payload` holds `settings`, `inputs` and `folder`."""
    from tvmflow.graph.ir_dump import IRDump

    inputs = {name: Path(path) for name, path in payload["inputs"].items()}
    _schedule(parse_settings(run, payload["settings"]), inputs, IRDump(Path(payload["folder"])))


TRAITS: Final = StageTraits(
    version=17,
    scope="level",
    needs={
        "import": ("params.safetensors",),
        "lower": (LOWERED,),
        "extract_tasks": ("workloads.json",),
        "pick_best": ("chosen.json",),
    },
    optional_needs=("extract_tasks", "pick_best"),
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
    compiles_kernels=True,
    dump_ir=dump_ir,
)
deliveries = no_files

KERNELS: Final = "kernels.json"

CHOSEN_ROLE: Final = "pick_best/chosen.json"
"""The role of the chosen schedules."""
_WORKLOADS_ROLE: Final = "extract_tasks/workloads.json"

TUNED: Final = "tuned"
"""Stands for a schedule rule for a kernel with a schedule from a search."""

OWN_SCHEDULE: Final = "own"
"""Stands for a schedule rule for a hand-written kernel."""

UNSCHEDULED: Final = "none"
"""Stands for a schedule rule for a kernel without a schedule."""

GENERIC_LOOPS: Final = "generic_loops"
"""The rule for kernels that no other rule fits."""

WITHOUT_RULE: Final = (GENERIC_LOOPS, UNSCHEDULED)
"""The values for kernels that no other rule fits."""

_SHOWN_TILES: Final = 5
# Kernels with a smaller share of the time do not cause a warning.
_LARGE_SHARE: Final = 0.05

# The text of a summary about the kernels of each schedule rule, in this order.
_RULE_TEXTS: Final[Mapping[str, str]] = {
    TUNED: "tuned",
    "register_tiles": "with register tiles",
    "winograd": "with Winograd transforms",
    "row_reductions": "with row reductions",
    "elementwise": "elementwise",
    OWN_SCHEDULE: "hand-written",
    GENERIC_LOOPS: "with generic loops",
    UNSCHEDULED: "without a schedule",
}


class BuildSettings(StageSettings):
    """The target, the version of the schedule rules, the runtime, and the forms of code to compile.

    `prefix` is the prefix of symbols in a system library, the only code that has the recipe's name. `is_isa_level`
    means that the library has code for other CPUs, too.
    """

    target: dict[str, Json]
    schedules: int
    runtime: str
    forms: tuple[str, ...]
    prefix: str = ""
    is_isa_level: bool = False


def settings(recipe: Recipe, target: ResolvedTarget) -> BuildSettings:
    """Return the target of the code, and settings besides tuning."""
    forms = set() if backend_for(target.tvm).IS_BESIDE_HOST else list_forms(recipe)
    runtime = choose_runtime(recipe, target)
    return BuildSettings(
        target=target.tvm,
        schedules=schedules_version(recipe),
        runtime=runtime,
        forms=tuple(sorted(forms)),
        prefix=symbol_prefix(recipe.name) if SYSTEM_LIBRARY in forms else "",
        is_isa_level=bool(target.isa_level_target),
    )


@omits_empty("needs_tvm_for")
class BuildFacts(NamedTuple):
    """The facts of compiled code.

    Attributes:
        kernels: The number of kernels.
        schedule_rules: The kernels of each schedule rule.
        unscheduled_shares: The estimated share of the time of each kernel without a schedule; None if it depends on
            dynamic shapes or data.
        kernel_nodes: For each call of a kernel, the indices of its bindings in the imported `main`.
        needs_tvm_for: The operator that needs TVM's runtime; empty if none does.
    """

    kernels: int
    schedule_rules: Mapping[str, tuple[str, ...]]
    unscheduled_shares: Mapping[str, float | None] = MappingProxyType({})
    kernel_nodes: Mapping[str, list[list[int]]] = MappingProxyType({})
    runtime: str = ""
    needs_tvm_for: str = ""


def run(settings: BuildSettings, context: StageContext) -> BuildFacts:
    """Compile for the target; StageError if a chosen schedule cannot be applied.

    Other kernels are scheduled by a rule, if one fits.
    """
    paths = {name: str(path) for name, path in context.inputs.items()}
    builder = backend_for(settings.target).call_builder
    facts = builder(compile_files, settings.to_json(), paths, str(context.out))
    return from_json(BuildFacts, facts)


def compile_files(document: Json, inputs: Mapping[str, str], out: str) -> Json:
    """Compile in the process that the backend chose; arguments and result are JSON."""
    from tvmflow.compiler import ScheduledModel, compile_form, find_runtime
    from tvmflow.graph import ir
    from tvmflow.runtime.weights import read_safetensors
    from tvmflow.targets.tvm_target import make_target

    settings, folder = parse_settings(run, document), Path(out)
    paths = {name: Path(path) for name, path in inputs.items()}
    model, rules, shares = _schedule(settings, paths)
    weights = model.compute_weights(read_safetensors(paths["import/params.safetensors"]))
    scheduled = ScheduledModel(model.mod, weights, make_target(settings.target))
    content_prefix = _content_prefix(settings, paths)
    runtime, reason = find_runtime(model.mod, settings.runtime)
    for form in sorted({FORMS[runtime], *settings.forms}):
        (folder / form).mkdir()
        compile_form(
            form,
            scheduled,
            folder / form,
            prefix=settings.prefix,
            content_prefix=content_prefix,
            is_isa_level=settings.is_isa_level,
        )
    kernels = ir.list_kernels(model.mod)
    (folder / KERNELS).write_text(json.dumps(rules, indent=1, sort_keys=True))
    facts = BuildFacts(
        kernels=len(kernels),
        schedule_rules={
            rule: tuple(name for name in sorted(rules) if rules[name] == rule)
            for rule in sorted(set(rules.values()))
        },
        unscheduled_shares=shares,
        kernel_nodes=model.kernel_nodes,
        runtime=runtime,
        needs_tvm_for=reason,
    )
    return to_json(facts)


def _content_prefix(settings: BuildSettings, paths: Mapping[str, Path]) -> str:
    """Return a symbol prefix derived from kernels and constants, independent of the model's name."""
    files = [hash_file(paths[role]) for role in (LOWERED_ROLE, "import/params.safetensors")]
    chosen = _read_json(paths.get(CHOSEN_ROLE))
    shaped_by = settings.model_dump(mode="json", include={"target", "schedules"})
    return f"tf_{digest_of([shaped_by, files, chosen])[:16]}_"


def _schedule(
    settings: BuildSettings, inputs: Mapping[str, Path], dump: IRDump | None = None
) -> tuple[LoweredModel, dict[str, str], dict[str, float | None]]:
    """Return the scheduled model, the rule of each kernel, and the time shares of unscheduled kernels."""
    from tvmflow.compiler import LoweredModel

    model = LoweredModel.read(inputs[LOWERED_ROLE])
    scheduled, rules = schedule_kernels(model.mod, settings, inputs, dump)
    unscheduled = [name for name, rule in rules.items() if rule == UNSCHEDULED]
    return replace(model, mod=scheduled), rules, model.estimate_shares(unscheduled)


def schedule_kernels(
    lowered: tvm.IRModule,
    settings: BuildSettings,
    inputs: Mapping[str, Path],
    dump: IRDump | None = None,
    *,
    must_fit: bool = True,
) -> tuple[tvm.IRModule, dict[str, str]]:
    """Schedule the kernels of a lowered module, by the chosen schedules and by the rules.

    With `must_fit`, each chosen schedule must fit a kernel. `dump` receives the module after each step.
    """
    from tvmflow.compiler import schedule_untuned
    from tvmflow.graph import ir
    from tvmflow.targets.tvm_target import make_target
    from tvmflow.tuning import measure

    target = make_target(settings.target)
    scheduled, tuned = lowered, list[str]()
    if chosen := _read_json(inputs.get(CHOSEN_ROLE)):
        started = time.perf_counter()
        workloads = _read_json(inputs[_WORKLOADS_ROLE])
        scheduled, tuned = measure.apply_chosen(
            scheduled, chosen, workloads, target, must_fit=must_fit
        )
        if dump is not None:
            dump.write("tuned_schedules", scheduled, time.perf_counter() - started)
    started = time.perf_counter()
    scheduled, rules = schedule_untuned(scheduled, settings.target, settings.schedules)
    if dump is not None:
        dump.write("untuned_schedules", scheduled, time.perf_counter() - started)
    others = dict.fromkeys(ir.list_kernels(scheduled), OWN_SCHEDULE)
    return scheduled, {**others, **rules, **dict.fromkeys(tuned, TUNED)}


def _read_json(path: Path | None) -> dict[str, Json]:
    return dict(json.loads(path.read_text())) if path else {}


def describe(facts: BuildFacts, inputs: KnownFacts) -> list[str]:
    """Return lines with the count of kernels for each schedule rule, and the kernels without a rule."""
    rules = facts.schedule_rules
    counts = [
        f"{len(rules[rule])} {text}"
        for rule, text in _RULE_TEXTS.items()
        if rule in rules and rule != UNSCHEDULED
    ]
    lines = [f"{count_text(facts.kernels, 'kernel')}: {', '.join(counts)}"] if counts else []
    lines += describe_runtime(facts.needs_tvm_for)
    if GENERIC_LOOPS in rules:
        lines.append(f"no rule fits, so with generic loops: {name_some(rules[GENERIC_LOOPS])}")
    if UNSCHEDULED in rules:
        lines += _describe_unscheduled(rules[UNSCHEDULED], facts.unscheduled_shares)
    return lines


def _describe_unscheduled(
    kernels: Sequence[str], shares: Mapping[str, float | None]
) -> Iterator[str]:
    known = {name: share for name in kernels if (share := shares.get(name)) is not None}
    large = sorted((name for name in known if known[name] >= _LARGE_SHARE), key=known.__getitem__)
    if large:
        percent = round(100 * sum(known[name] for name in large))
        yield f"WITHOUT A SCHEDULE, and an estimated {percent} % of the time: {name_some(large[::-1])}"
    if small := [name for name in known if name not in large]:
        yield f"without a schedule, but with little work: {name_some(small)}"
    if unknown := [name for name in kernels if name not in known]:
        yield f"WITHOUT A SCHEDULE, in a time that depends on sizes or data: {name_some(unknown)}"


def explain(facts: BuildFacts) -> list[str]:
    """Return the kernels of each schedule rule."""
    lines = []
    for rule, kernels in facts.schedule_rules.items():
        lines.append(f"kernels {_RULE_TEXTS.get(rule, rule)}")
        lines += [f"  {name}" for name in kernels]
    return lines


# ---------------------------------------------------------------- nodes of the model
# The facts of `build` refer to nodes by indices of bindings in the imported `main`, and the facts of `import` have
# the nodes' names. So models that differ only in names share a build.


class KernelCall(NamedTuple):
    """A call of a kernel: the names of the nodes that it computes, in order."""

    nodes: tuple[str, ...]

    @property
    def text(self) -> str:
        """A readable list of the nodes."""
        return name_some(self.nodes)


def find_kernel_nodes(
    indices: Mapping[str, Sequence[Sequence[int]]], names: Sequence[str]
) -> dict[str, tuple[KernelCall, ...]]:
    """Return each kernel's calls with node names; `indices` are binding indices, `names` their nodes."""
    known = {index: name for index, name in enumerate(names) if name}
    return {
        kernel: tuple(
            KernelCall(tuple(dict.fromkeys(known[index] for index in call if index in known)))
            for call in calls
        )
        for kernel, calls in indices.items()
    }


def calls_text(calls: Sequence[KernelCall]) -> str:
    """Return the nodes of a kernel's first call, and the count of its other calls; empty if unknown."""
    named = [call for call in calls if call.nodes]
    if not named:
        return ""
    others = len(calls) - 1
    return f"{named[0].text} and {count_text(others, 'other call')}" if others else named[0].text


# ---------------------------------------------------------------- code of a kernel


class RankedTile(NamedTuple):
    """A register tile of a schedule rule.

    `speed` is the estimated share of the CPU's peak throughput, `trial` the id of the trial that measures it.
    """

    tile: str
    speed: float
    trial: str


class KernelCode(NamedTuple):
    """The code of a kernel.

    Attributes:
        tir: The scheduled kernel as TVMScript.
        schedule: The instructions of its schedule as Python; empty if TVM keeps none.
        assembly: Its assembly for the target; empty if it was not requested.
        candidates: The fields of the best register tiles (`RankedTile`), ranked by estimated cost; empty if the
            kernel has no register tiles, or if not requested.
    """

    tir: str
    schedule: str
    assembly: str
    candidates: Sequence[Sequence[Json]] = ()


def make_code(payload: dict[str, Json], _: Emit) -> Json:
    """Return the code of a kernel for `tvmflow show kernel`. This is the entry point of a child process.

    `payload` holds `settings` and `inputs` (paths) of `build`, `kernel`, `is_plain_c`, `with_assembly`, and
    `with_candidates`.
    """
    builder = backend_for(payload["settings"]["target"]).call_builder
    return builder(_make_code_here, payload)


def _make_code_here(payload: Json) -> Json:
    """Return the fields of a `KernelCode`, in the process that the backend chose."""
    from tvmflow.compiler import LoweredModel, make_assembly
    from tvmflow.targets.tvm_target import make_target

    settings = parse_settings(run, payload["settings"])
    inputs = {name: Path(path) for name, path in payload["inputs"].items()}
    target = make_target(settings.target)
    lowered = LoweredModel.read(inputs[LOWERED_ROLE]).mod
    scheduled, _ = schedule_kernels(lowered, settings, inputs)
    name = payload["kernel"]
    kernel = scheduled[name].with_attr("global_symbol", name)
    is_plain_c = payload["is_plain_c"]
    code = KernelCode(
        tir=str(kernel.script()),
        schedule=_describe_schedule(lowered[name], settings, inputs),
        assembly=make_assembly(kernel, target, is_plain_c=is_plain_c)
        if payload["with_assembly"]
        else "",
        candidates=_rank_tiles(lowered[name], settings) if payload["with_candidates"] else (),
    )
    return cast(Json, code._asdict())


def _describe_schedule(
    kernel: tvm.tirx.PrimFunc, settings: BuildSettings, inputs: Mapping[str, Path]
) -> str:
    """Return the instructions of the schedule that `build` uses for a kernel, tuned or by a rule."""
    import tvm

    from tvmflow.compiler import generate_schedules
    from tvmflow.graph import ir
    from tvmflow.tuning.measure import apply_trace
    from tvmflow.tuning.workloads import normalize, workload_key

    chosen = _read_json(inputs.get(CHOSEN_ROLE))
    key = workload_key(normalize(kernel)) if chosen else ""
    if key in chosen:
        workload = _read_json(inputs[_WORKLOADS_ROLE])[key]
        return _instructions(apply_trace(tvm.ir.load_json(workload), chosen[key]))
    if ir.is_scheduled(kernel):
        return ""
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    choice = next(generate_schedules(mod, settings.target, settings.schedules), None)
    return _instructions(choice.schedule) if choice else ""


def _rank_tiles(kernel: tvm.tirx.PrimFunc, settings: BuildSettings) -> list[RankedTile]:
    """Return the first register tiles of a contraction on a CPU; none for other kernels."""
    from tvmflow.compiler import generate_schedules
    from tvmflow.graph import ir
    from tvmflow.tuning.measure import trace_json
    from tvmflow.tuning.trials import trial_id
    from tvmflow.tuning.workloads import normalize

    if ir.is_scheduled(kernel):
        return []
    # normalize the kernel to a workload, so that traces have the ids of trials
    choices = generate_schedules(normalize(kernel), settings.target, settings.schedules)
    return [
        RankedTile(str(choice.tile), choice.tile.speed, trial_id(trace_json(choice.schedule.trace)))
        for choice in itertools.islice(choices, _SHOWN_TILES)
        if choice.tile is not None
    ]


def _instructions(schedule: tvm.s_tir.Schedule) -> str:
    """Return a schedule's instructions, without unused lookups of loops and blocks."""
    return str(schedule.trace.simplified(remove_postproc=False))

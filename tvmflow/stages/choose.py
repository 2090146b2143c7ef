"""`choose`: measure alternative lowerings of operators, and keep the faster ones.

It runs before `lower`, which uses the choices. The ledger keeps all times, so that the same model always gets the
same choices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.choices import (
    Choice,
    Choices,
    choice_key,
    describe_choice,
    find_problem_of_choices,
    is_within_tolerance,
)
from tvmflow.core.errors import StageError
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, latency_text
from tvmflow.core.types import RunTraits
from tvmflow.recipe import Recipe
from tvmflow.stages.base import (
    KnownFacts,
    Lowering,
    StageContext,
    StageTraits,
    lowering_options,
    no_files,
    progress_event,
)
from tvmflow.stages.runtime_choice import choose_runtime
from tvmflow.stages.tune import DeviceChildren, LibrarySettings, trial_settings
from tvmflow.targets.backends import backend_for
from tvmflow.targets.resolve import ResolvedTarget

if TYPE_CHECKING:
    from tvmflow.core.choices import Operator
    from tvmflow.core.fork_server import Outcome
    from tvmflow.tuning.libraries import LibraryTimes, LoweredChoices
    from tvmflow.tuning.trials import ChoiceTimes

    Groups = Mapping[str, Sequence[Operator]]

NAME: Final = "choose"

_LOG: Final = "choices.log"

# Larger models are not measured, because two libraries have their weights in memory at once.
_MAX_WEIGHT_BYTES: Final = 1 << 30


def _is_needed(recipe: Recipe) -> bool:
    """Return whether a recipe's budget allows this stage, and its options leave alternatives."""
    tune, kernels = recipe.tune, recipe.kernels
    has_alternatives = (
        kernels.layout == "blocked" and kernels.winograd != 0 and kernels.precision == "model"
    )
    return has_alternatives and kernels.schedules == "rules" and tune.measures_choices


TRAITS: Final = StageTraits(
    version=1,
    scope="measured",
    needs={"import": ("model.json",)},
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=4 * 3600.0,
    compiles_kernels=True,
    added_with=("extract_tasks",),
    is_needed=_is_needed,
    run=RunTraits(measures=True, searches=True, uses_ledger=True),
)
deliveries = no_files

CHOICES: Final = "choices.json"
CHOICES_ROLE: Final = f"{NAME}/{CHOICES}"
"""The role of the choices for the stages that read them."""


class ChooseSettings(LibrarySettings):
    """The lowering options, and the recipe's relative tolerance.

    `is_measurable` is False if no library can be timed here, or if it has several ISA levels. With `interim`, only
    choices from the ledger are used, and nothing is measured.
    """

    lowering: Lowering
    rtol: float | None = None
    is_measurable: bool = True
    interim: bool = False


def settings(recipe: Recipe, target: ResolvedTarget) -> ChooseSettings:
    """Return the lowering options, and the machine to measure on."""
    is_here = backend_for(target.tvm).RUNS_ON_HOST_CPU and not target.remote
    return ChooseSettings(
        **trial_settings(recipe, target),
        lowering=lowering_options(recipe),
        runtime=choose_runtime(recipe, target),
        rtol=recipe.verify.rtol,
        is_measurable=is_here and not target.isa_level_target and not target.unmeasurable_reason,
    )


def choices_text(choices: Choices) -> str:
    """Return the choices of a model as canonical JSON text."""
    plain = {text: dict(choice) for text, choice in choices.items()}
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False)


def read_choices(inputs: Mapping[str, Path]) -> dict[str, Choice]:
    """Read the choices among the inputs of a stage; empty if there are none.

    Raises:
        StageError: The file has choices that tvmflow cannot have made.
    """
    path = inputs.get(CHOICES_ROLE)
    choices: dict[str, Choice] = json.loads(path.read_text()) if path else {}
    if problem := find_problem_of_choices(choices):
        raise StageError(f"{path}: {problem}", fix="write the lock file again with `tvmflow lock`")
    return choices


class ChosenOperator(NamedTuple):
    """An operator with a faster alternative; times are µs of all its calls in a library.

    Attributes:
        is_kept: Whether the delivered library uses the alternative.
    """

    operator: str
    calls: int
    rule: str
    choice: str
    rule_us: float
    us: float
    is_kept: bool


class ChooseFacts(NamedTuple):
    """The outcome; times are µs per call.

    Attributes:
        operators: How many operators have alternatives.
        measured: How many choices this run measured.
        reused: How many measured choices the ledger had.
        chosen: The operators with a faster alternative.
        is_kept: Whether the library uses the alternatives.
        found: The speedup estimated from the operators' times; 1 if no alternative is faster.
        low: The lower confidence limit of the speedup.
        pairs: How many pairs of times were measured.
        reason: Why nothing was measured; otherwise empty.
    """

    operators: int = 0
    measured: int = 0
    reused: int = 0
    chosen: tuple[ChosenOperator, ...] = ()
    is_kept: bool = False
    found: float = 1.0
    speedup: float = 0.0
    low: float = 0.0
    high: float = 0.0
    pairs: int = 0
    us: float = 0.0
    rule_us: float = 0.0
    reason: str = ""


def run(settings: ChooseSettings, context: StageContext) -> ChooseFacts:
    """Measure choices that the ledger lacks, and write the ones that make the library faster."""
    choices, facts = _choose(settings, context)
    (context.out / CHOICES).write_text(choices_text(choices))
    return facts


def _choose(settings: ChooseSettings, context: StageContext) -> tuple[Choices, ChooseFacts]:
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.tuning import libraries, measure
    from tvmflow.tuning.ledger import WorkloadDescription

    if not settings.is_measurable:
        return {}, ChooseFacts(reason="no library for it can be timed here")

    def lower(choices: Choices, name: str) -> LoweredChoices:
        imported, path = context.inputs["import/model.json"], context.work / name
        return libraries.LoweredChoices.lower(
            imported, settings.target, settings.lowering, choices, path
        )

    rule = lower({}, "rule.json")
    groups = libraries.group_operators(rule.model.operators)
    if rule.has_dimensions or not groups:
        return {}, ChooseFacts()
    if rule.weight_bytes > _MAX_WEIGHT_BYTES:
        return {}, ChooseFacts(
            len(groups), reason="two libraries with its weights take too much memory"
        )
    ledger = settings.open_ledger(context.ledger)
    ledgers = {text: ledger.workload(choice_key(text)) for text in groups}

    def is_allowed(choice: Choice) -> bool:
        return is_within_tolerance(choice, settings.rtol)

    unknown = libraries.list_unknown(groups, ledgers, is_allowed)
    rounds = [] if settings.interim else unknown
    known = sum(len(records.choices) for records in ledgers.values())
    measure.load_compiler(settings.target)
    with ForkServer.fork() as fork_server:
        children = DeviceChildren(settings.device, context, fork_server, _LOG)

        def measure_library(choices: Choices, name: str, *, is_whole: bool) -> Outcome:
            other = lower(choices, name)
            members = libraries.find_members(choices, other.model, rule.model)
            payload = settings.library_request().make_payload(
                (other.path, {}), rule.path, members, libraries.CHOICES, is_whole=is_whole
            )
            return children.call(libraries.measure_libraries, payload, libraries.TIMEOUT_S)

        for done, tried in enumerate(rounds, 1):
            outcome = measure_library(tried, f"choices-{done}.json", is_whole=False)
            _check_measured("" if outcome.kind == "ok" else outcome.message)
            for text, own in libraries.read_times(outcome.value, groups, tried).items():
                if not ledger.description(choice_key(text)).name:
                    ledger.describe(choice_key(text), WorkloadDescription(name=text), "")
                ledgers[text].add([own])
            context.emit(progress_event("library", done, len(rounds), f"library {done}"))
        chosen = libraries.choose(groups, ledgers, is_allowed)
        texts = {choice_key(text): text for text in chosen}
        choices = {text: own.choice for text, own in chosen.items()}
        records = ledger.workload(digest_of([{}, hash_file(rule.path)]))
        digest = digest_of([choices, settings.schedules, settings.runtime])
        is_missing = bool(choices) and digest not in records.libraries
        if settings.interim and (unknown or is_missing):
            return {}, ChooseFacts(
                len(groups), reason="alternatives are measured after the first library"
            )
        times = None
        if choices:
            times = libraries.read_or_compare(
                *(records, digest, texts),
                lambda keys: measure_library(
                    {texts[key]: choices[texts[key]] for key in keys},
                    "chosen.json",
                    is_whole=True,
                ),
                keeps_undecided=False,
            )
            _check_measured(times.error)
    facts = _make_facts(groups, chosen, times)
    facts = facts._replace(measured=sum(map(len, rounds)), reused=known)
    kept = {row.operator: chosen[row.operator].choice for row in facts.chosen if row.is_kept}
    return kept, facts


def _check_measured(problem: str) -> None:
    if problem:
        raise StageError(
            f"libraries with alternatives of operators could not be measured: {problem}",
            fix="set tune.choices to false to use the rules' choices",
        )


def _make_facts(
    groups: Groups, chosen: Mapping[str, ChoiceTimes], times: LibraryTimes | None
) -> ChooseFacts:
    from tvmflow.tuning import libraries

    faster = {
        text: own for text, own in chosen.items() if times and choice_key(text) not in times.slower
    }
    is_kept = times is not None and times.keeps_tuned
    rows = [
        ChosenOperator(
            operator=text,
            calls=len(groups[text]),
            rule=describe_choice(own.rule),
            choice=describe_choice(own.choice),
            rule_us=_microseconds(own.rule_seconds) * len(groups[text]) / own.calls,
            us=_microseconds(own.seconds) * len(groups[text]) / own.calls,
            is_kept=is_kept and text in faster,
        )
        for text, own in chosen.items()
    ]
    facts = ChooseFacts(
        operators=len(groups),
        chosen=tuple(sorted(rows, key=lambda row: row.us - row.rule_us)),
        is_kept=is_kept,
    )
    if times is None or not times.tuned:
        return facts
    calls = {text: len(operators) for text, operators in groups.items()}
    return facts._replace(
        **times.describe_speedup(),
        found=round(libraries.find_gain(faster, calls, min(times.untuned)), 4),
        us=round(_microseconds(times.tuned), 3),
        rule_us=round(_microseconds(times.untuned), 3),
    )


def _microseconds(seconds: Sequence[float]) -> float:
    return min(seconds) * 1e6


def describe(facts: ChooseFacts, inputs: KnownFacts) -> list[str]:
    """Return lines with the count of operators that use an alternative, and the library's gain."""
    if facts.reason:
        return [f"the rules choose the lowerings of operators: {facts.reason}"]
    if not facts.operators:
        return ["no operator has an alternative lowering"]
    if not facts.chosen:
        outcome = "the rules were already fastest"
    elif not facts.speedup:
        outcome = "in the library none is faster"
    else:
        limits = (
            f"{facts.low:.3g} to {facts.high:.3g}, {count_text(facts.pairs, 'interleaved pair')}"
        )
        outcome = (
            f"speedup of the library {facts.speedup:.3g} ({limits}), estimated {facts.found:.3g}"
        )
        outcome += "" if facts.is_kept else ", which is not a gain"
    kept = sum(row.is_kept for row in facts.chosen)
    count = f"{kept} of {count_text(facts.operators, 'operator')}"
    trials = f"{facts.measured} alternatives measured, {facts.reused} from the ledger"
    return [f"{count} with an alternative lowering: {outcome} ({trials})"]


def explain(facts: ChooseFacts) -> list[str]:
    """List the operators with a faster alternative than the rules choose, largest gain first."""
    lines = [
        f"  {row.operator}: {row.choice} {latency_text(row.us / 1e6)}, by rule {row.rule} "
        f"{latency_text(row.rule_us / 1e6)}, in {count_text(row.calls, 'call')}"
        f"{'' if row.is_kept else '; not kept: the library is not faster with it'}"
        for row in facts.chosen
    ]
    return ["operators with a faster alternative, measured in the library", *lines] if lines else []

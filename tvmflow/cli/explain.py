"""`tvmflow explain`: why a stage must run or not, and what its result depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from tvmflow.cli.arguments import JSON_HELP, StoreOption, pipeline_option, store_option
from tvmflow.cli.download_progress import DownloadLine
from tvmflow.cli.options import argument, flag
from tvmflow.cli.output import print_result
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.types import Decision, Json, StageKey, StageSpec
from tvmflow.engine.explanation import explain_stage
from tvmflow.planning.decisions import PlanState, evaluate_plan
from tvmflow.planning.prepare import prepare_run
from tvmflow.planning.request import RunRequest
from tvmflow.store.local import LocalStore


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """The options of `tvmflow explain`."""

    store: StoreOption = store_option()
    recipe: str = argument("RECIPE")
    stage: str = argument("STAGE[/TARGET]")
    pipeline: str | None = pipeline_option()
    json: bool = flag(JSON_HELP)


class _Explanation(NamedTuple):
    """All that is known of one stage; `key` and `facts` are None as long as they are not known."""

    decision: Decision
    key: StageKey | None
    facts: dict[str, Json] | None
    origin: str

    def to_text(self, *, with_recipe: bool) -> str:
        return explain_stage(
            self.decision, self.key, self.facts, with_recipe=with_recipe, origin=self.origin
        )

    def to_json(self) -> Json:
        return {
            **self.decision._asdict(),
            "key": self.key and self.key.digest,
            "depends_on": self.key and self.key.preimage,
            "facts": self.facts,
            "origin": self.origin or None,
        }


def explain(options: ExplainOptions) -> int:
    """Show why one stage must run or not, and what its result depends on."""
    store = options.store.open()
    request = RunRequest((options.recipe,), options.pipeline)
    plan = prepare_run(request, store, DownloadLine()).plan
    plan_state = evaluate_plan(plan, store)
    several = len({spec.recipe for spec in plan.stages}) > 1
    specs = [spec for spec in plan.stages if options.stage in (spec.label, spec.stage, spec.id)]
    if not specs:
        labels = ", ".join(spec.id if several else spec.label for spec in plan.stages)
        raise UsageError(
            f"{options.recipe} has no stage '{options.stage}'", fix=f"its stages are: {labels}"
        )
    explanations = [_explain_stage(spec, plan_state, store) for spec in specs]
    value = {"stages": [stage.to_json() for stage in explanations]}
    texts = [stage.to_text(with_recipe=several) for stage in explanations]
    print_result(value, "\n".join(texts).split("\n"), as_json=options.json)
    return EXIT_OK


def _explain_stage(spec: StageSpec, plan_state: PlanState, store: LocalStore) -> _Explanation:
    key = plan_state.keys.get(spec.id)
    artifact = store.find(key.digest) if key else None
    record = store.record(key.digest) if key else None
    origin = record.origin.text if record and record.origin else ""
    return _Explanation(plan_state.decisions[spec.id], key, artifact and artifact.facts, origin)


COMMANDS: Final = {"explain": explain}

"""`tvmflow explain`: why a stage must run or not, and what its result depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.cli.arguments import JSON_HELP, StoreOption, pipeline_option, store_option
from tvmflow.cli.options import Options, argument, flag
from tvmflow.core.errors import EXIT_OK

if TYPE_CHECKING:
    from tvmflow.core.types import Decision, Json, StageKey, StageSpec
    from tvmflow.planning.decisions import PlanState
    from tvmflow.store.failures import Failure
    from tvmflow.store.local import LocalStore


class ExplainOptions(Options):
    """Show why a stage must run or not, and what its result depends on.

    Examples:
        # the stage for one target
        tvmflow explain net.yaml tune/host
        # for all targets; of `build`, also the schedule of each kernel
        tvmflow explain net.yaml build
        # all stages
        tvmflow explain net.yaml
    """

    store: StoreOption = store_option()
    recipe: str = argument("RECIPE")
    stage: str | None = argument("STAGE[/TARGET]", "the stage, also as RECIPE:STAGE/TARGET", "?")
    pipeline: str | None = pipeline_option()
    json: bool = flag(JSON_HELP)


class _Explanation(NamedTuple):
    """All that is known of one stage; `key` and `facts` are None as long as they are not known.

    `failure` is the end of its last attempt, if that had no result.
    """

    decision: Decision
    key: StageKey | None
    facts: dict[str, Json] | None
    origin: str
    failure: Failure | None

    def to_text(self, *, with_recipe: bool) -> str:
        from tvmflow.engine.plan_text import explain_stage

        return explain_stage(
            self.decision,
            self.key,
            self.facts,
            with_recipe=with_recipe,
            origin=self.origin,
            failure=self.failure,
        )

    def to_json(self) -> Json:
        return {
            **self.decision._asdict(),
            "key": self.key and self.key.digest,
            "depends_on": self.key and self.key.preimage,
            "facts": self.facts,
            "origin": self.origin or None,
            "failure": self.failure and self.failure._asdict(),
        }


def explain(options: ExplainOptions) -> int:
    from tvmflow.cli.download_progress import DownloadLine
    from tvmflow.cli.output import print_result
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.planning.plan import find_stages
    from tvmflow.planning.prepare import prepare_run
    from tvmflow.planning.request import RunRequest

    store = options.store.open_to_read()
    request = RunRequest((options.recipe,), options.pipeline)
    plan = prepare_run(request, store, DownloadLine()).plan
    plan_state = evaluate_plan(plan, store)
    several = len({spec.recipe for spec in plan.stages}) > 1
    specs = find_stages(plan, options.stage) if options.stage else plan.stages
    explanations = [_explain_stage(spec, plan_state, store) for spec in specs]
    value = {"stages": [stage.to_json() for stage in explanations]}
    texts = [stage.to_text(with_recipe=several) for stage in explanations]
    print_result(value, "\n".join(texts).split("\n"), as_json=options.json)
    return EXIT_OK


def _explain_stage(spec: StageSpec, plan_state: PlanState, store: LocalStore) -> _Explanation:
    from tvmflow.store.failures import find_failure

    key = plan_state.keys.get(spec.id)
    artifact = store.find(key.digest) if key else None
    record = store.record(key.digest) if key else None
    origin = record.origin.text if record and record.origin else ""
    failure = find_failure(store, spec.id)
    decision, facts = plan_state.decisions[spec.id], artifact and artifact.facts
    return _Explanation(decision=decision, key=key, facts=facts, origin=origin, failure=failure)


COMMANDS: Final = {"explain": explain}

"""Options and help: `tvmflow explain`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import JSON_HELP, StoreOption, pipeline_option, store_option
from tvmflow.cli.options import Options, argument, flag


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


COMMANDS: Final = {"explain": ExplainOptions}

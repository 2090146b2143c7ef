"""Options and help: `tvmflow runs`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import JSON_HELP, StoreOption, store_option
from tvmflow.cli.options import Options, argument, flag, option, positive_int

_SHOWN_RUNS: Final = 20


class RunsOptions(Options):
    """List the last runs that did something, the last one first.

    A run that was up to date leaves no record. `show run` shows all of one run.

    Examples:
        tvmflow runs
        # all that is known of the last run, and of the one before
        tvmflow show run
        tvmflow show run latest~1
    """

    limit: int = option(
        "N", f"how many to list ({_SHOWN_RUNS})", default=_SHOWN_RUNS, type=positive_int
    )
    json: bool = flag(JSON_HELP)
    store: StoreOption = store_option()


class LogsOptions(Options):
    """Show the log of a stage.

    It is that of its last execution. Without a stage, the logs that there are are listed.

    Of each stage there is one log: a later execution replaces it.

    Examples:
        tvmflow logs
        tvmflow logs tune/host
        # of one recipe, as for `explain`
        tvmflow logs net.yaml tune/host
        # while it runs, in another terminal
        tvmflow logs tune --follow
    """

    recipe: str | None = argument("RECIPE", "only stages of this recipe or pipeline", "?")
    stage: str | None = argument("STAGE[/TARGET]", "the stage, also as RECIPE:STAGE/TARGET", "?")
    run_id: str | None = option("RUN", "of this run: its id, or `latest`", name="--run")
    follow: bool = flag("go on with what is written, until no run uses the store any more")
    store: StoreOption = store_option("logs are")
    verbosity: int


COMMANDS: Final = {"runs": RunsOptions, "logs": LogsOptions}

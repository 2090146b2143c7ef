"""Options and help: `tvmflow report`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import JSON_HELP, StoreOption, store_option
from tvmflow.cli.options import Options, argument, flag, option


class ReportOptions(Options):
    """Write what a run or a release made as one HTML page.

    The page is a single file that loads nothing: it can be mailed, printed, and read without a network.

    Examples:
        # the last run, in the browser
        tvmflow report --open
        # the last run of a recipe
        tvmflow report net.yaml -o net.html
        # a release
        tvmflow report releases/release-1.2.0
        # what this run changed since a release
        tvmflow report net.yaml --against releases/release-1.2.0
    """

    store: StoreOption = store_option()
    what: str = argument(
        "RUN|RECIPE|RELEASE",
        "a run (see `tvmflow runs`), the last run of a recipe or pipeline, or the folder of a release; "
        "without it, the last run",
        "?",
    )
    against: str | None = option(
        "RUN|RELEASE|LOCK|last",
        "compare each build with that of an earlier run, the folder of a release, a lock file, or a folder "
        "in dist; `last` is the run before that measured one of them, or the release that a release was "
        "compared with (the default, where there is one)",
    )
    output: str | None = option(
        "FILE", "where the page is written (./report-NAME.html); - for stdout", name="-o --output"
    )
    open: bool = flag("then open the page in the browser")
    json: bool = flag(JSON_HELP)
    verbosity: int


COMMANDS: Final = {"report": ReportOptions}

"""Options and help: `tvmflow compare`."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Final

from tvmflow.cli.arguments import JSON_HELP, StoreOption, store_option
from tvmflow.cli.options import Options, argument, flag, option


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"'{text}' is not a percentage from 0")
    return value


class CompareOptions(Options):
    """Show what changed between two runs, releases or deliveries.

    Latency, size, error, accuracy, inputs and packages are compared.

    The latencies were measured on different occasions: a difference within their spread, or within 2 %, is noise.

    Examples:
        # the last run and the one before
        tvmflow compare latest~1 latest
        tvmflow compare releases/1.0 releases/1.1 --md
        # in CI
        tvmflow compare main.lock.yaml net.lock.yaml --fail-on-regression 5
    """

    before: str = argument(
        "A", "a run (its id, `latest~1`), the folder of a release, a lock file, or a folder in dist"
    )
    after: str = argument("B", "the same, later")
    fail_on_regression: float | None = option(
        "PERCENT",
        "end with exit code 3 if a library became slower beyond the noise, or larger, by more than this, "
        "or is no longer verified",
        type=_percent,
    )
    md: bool = flag("print Markdown")
    json: bool = flag(JSON_HELP)
    store: StoreOption = store_option()


COMMANDS: Final = {"compare": CompareOptions}

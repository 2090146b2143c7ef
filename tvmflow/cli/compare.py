"""`tvmflow compare`: what changed between two runs, releases, lock files or deliveries."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import StoreOptions
from tvmflow.cli.options import argument, flag, option
from tvmflow.cli.output import print_lines, print_result
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY, UsageError
from tvmflow.core.formatting import count_text
from tvmflow.core.generated_text import markdown_text
from tvmflow.core.text import columns

if TYPE_CHECKING:
    from tvmflow.release.comparison import Comparison, Figure


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"'{text}' is not a percentage from 0")
    return value


class CompareOptions(StoreOptions):
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
        "A",
        "a run (its id, `latest~1`), the folder of a release, a lock file, a recipe (what it delivered last), or a folder in dist",
    )
    after: str = argument("B", "the same, later")
    fail_on_regression: float | None = option(
        "PERCENT",
        "end with exit code 3 if a library became slower beyond the noise, or larger, by more than this, "
        "or is no longer verified",
        type=_percent,
    )
    md: bool = flag("print Markdown")


def compare(options: CompareOptions) -> int:
    from tvmflow.release.comparison import compare_sides, load_side, to_json

    store = options.store.locate()
    sides = [load_side(name, store) for name in (options.before, options.after)]
    comparison = compare_sides(sides[0], sides[1], store)
    limit = options.fail_on_regression
    if limit is not None and not sides[0].builds.keys() & sides[1].builds.keys():
        raise UsageError(
            "nothing can become worse: no build of A is in B",
            fix="compare two runs of the same recipes",
        )
    regressions = [] if limit is None else comparison.list_regressions(limit)
    if options.md and not options.json:
        print_lines(*_format_markdown(comparison, regressions))
    else:
        lines = _format(comparison, regressions)
        print_result(to_json(comparison, regressions), lines, options)
    return EXIT_VERIFY if regressions else EXIT_OK


def _format(comparison: Comparison, regressions: list[Figure]) -> Iterator[str]:
    yield f"{comparison.before} -> {comparison.after}"
    for build, figures in groupby(comparison.figures, key=lambda figure: figure.build):
        yield build
        yield from (f"  {line}" for line in columns([(row.what, row.text) for row in figures]))
    for place, changes in groupby(comparison.changes, key=lambda change: change.place):
        yield place
        yield from (f"  {line}" for line in columns([(row.what, row.text) for row in changes]))
    if not comparison.figures and not comparison.changes:
        yield "no build is on both sides"
    yield from _format_regressions(regressions)


def _format_markdown(comparison: Comparison, regressions: list[Figure]) -> Iterator[str]:
    yield f"### {markdown_text(comparison.before)} → {markdown_text(comparison.after)}"
    yield ""
    if comparison.figures:
        yield "| build | figure | change |"
        yield "|---|---|---|"
        for row in comparison.figures:
            yield f"| {markdown_text(row.build)} | {markdown_text(row.what)} | {markdown_text(row.text.replace('->', '→'))} |"
        yield ""
    for change in comparison.changes:
        yield f"- **{markdown_text(change.place)}** {markdown_text(change.what)}: {markdown_text(change.text.replace('->', '→'))}"
    # of its own, not a part of the list
    yield from ("", *map(markdown_text, _format_regressions(regressions))) if regressions else ()


def _format_regressions(regressions: list[Figure]) -> Iterator[str]:
    if regressions:
        names = ", ".join(f"{figure.build} {figure.what}" for figure in regressions)
        yield f"REGRESSION: {count_text(len(regressions), 'figure')}: {names}"


COMMANDS: Final = {"compare": compare}

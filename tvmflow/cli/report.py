"""`tvmflow report` and `compare`: HTML pages of runs and releases, and the changes between two."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.cli.arguments import RECIPE_SUFFIXES, StoreOptions
from tvmflow.cli.options import argument, flag, option
from tvmflow.cli.output import print_lines, print_outcome, print_result, write_file
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY, UsageError
from tvmflow.core.formatting import count_text, excerpt
from tvmflow.core.generated_text import markdown_text, shell_word
from tvmflow.core.project import shortest_path
from tvmflow.core.text import columns

if TYPE_CHECKING:
    from tvmflow.engine.run_records import RunRecord
    from tvmflow.pages.content import Page
    from tvmflow.release import Comparison, Figure, Side
    from tvmflow.store.local import LocalStore


class ReportOptions(StoreOptions):
    """Write the results of a run or a release as one HTML page.

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


_STDOUT: Final = "-"
_LAST: Final = "last"


class _Subject(NamedTuple):
    """The run or release of a page: its name in file names, its comparison side, and a release's folder."""

    name: str
    page: Page
    side: Side
    folder: Path | None = None


def report(options: ReportOptions) -> int:
    import webbrowser

    from tvmflow.engine.run_records import LATEST
    from tvmflow.pages.document import render_page
    from tvmflow.release import compare_page, load_side

    store = options.store.locate()
    subject = _find_subject(options.what or LATEST, store)
    if options.against in (None, _LAST):
        before = _find_last(subject, store)
    else:
        before = load_side(options.against, store)
    if before is None and options.against == _LAST:
        raise UsageError(
            f"--against {_LAST}: nothing before {subject.side.name} has one of its builds",
            fix="name a run (see `tvmflow runs`), the folder of a release, or a lock file",
        )
    page = compare_page(subject.page, before, subject.side, store) if before else subject.page
    html = render_page(page)
    if options.output == _STDOUT:
        sys.stdout.write(html)
        return EXIT_OK
    path = Path(options.output or f"report-{subject.name}.html")
    write_file(path, html)
    result = {"path": str(path), "bytes": len(html.encode()), "subject": subject.name}
    result |= {"against": before.name if before else None}
    print_outcome(result, [str(path)], EXIT_OK, options)
    if options.open and not webbrowser.open(path.absolute().as_uri()):
        print_lines(f"no browser was found: open {path}")
    return EXIT_OK


def _find_subject(what: str, store: LocalStore) -> _Subject:
    from tvmflow.engine.run_records import read_run
    from tvmflow.pages.collect import describe_run
    from tvmflow.release import describe_gates, load_side, make_side, read_release

    path = Path(what)
    if path.is_dir():
        return _Subject(path.resolve().name, read_release(path), load_side(what, store), path)
    is_recipe = path.suffix in RECIPE_SUFFIXES
    record = find_run_of(path, store) if is_recipe else read_run(store, what)
    page = describe_run(record, store)
    release = record.release if isinstance(record.release, dict) else {}
    page = page._replace(gates=(*page.gates, *describe_gates(release.get("gates", ()))))
    return _Subject(record.id, page, make_side(record))


def _find_last(subject: _Subject, store: LocalStore) -> Side | None:
    """Return the previous run that measured the same libraries, or the previous release."""
    from tvmflow.pages.collect import find_previous
    from tvmflow.release import LOCK, load_side, make_side

    if subject.side.run:
        run = find_previous(subject.side.run, store)
        return make_side(run) if run else None
    if subject.folder is None or not subject.page.previous:
        return None
    folder = subject.folder.resolve().parent / subject.page.previous
    if not (folder / LOCK).is_file():
        return None
    side = load_side(shortest_path(str(folder)), store)
    return side if side.builds.keys() & subject.side.builds.keys() else None


def find_run_of(path: Path, store: LocalStore) -> RunRecord:
    """Return the last run of a recipe or a pipeline."""
    from tvmflow.engine.run_records import list_runs, recorded_path

    for record in list_runs(store).runs:
        if str(recorded_path(path)) in (source.path for source in record.sources):
            return record
    raise UsageError(
        f"there is no record of a run of {excerpt(str(path))} in {shortest_path(store.root)}",
        fix=f"`tvmflow run {shell_word(str(path))}` leaves one when it does something; `--store DIR` names another store",
    )


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"'{text}' is not a percentage from 0")
    return value


class CompareOptions(StoreOptions):
    """Show the changes between two runs, releases or deliveries.

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
    from tvmflow.release import compare_sides, comparison_json, load_side

    store = options.store.locate()
    sides = [load_side(name, store) for name in (options.before, options.after)]
    comparison = compare_sides(sides[0], sides[1], store)
    limit = options.fail_on_regression
    if limit is not None and not sides[0].builds.keys() & sides[1].builds.keys():
        fix = "compare two runs of the same recipes"
        raise UsageError("nothing can become worse: no build of A is in B", fix=fix)
    regressions = [] if limit is None else comparison.list_regressions(limit)
    if options.md and not options.json:
        print_lines(*_format_markdown(comparison, regressions))
    else:
        lines = _format(comparison, regressions)
        print_result(comparison_json(comparison, regressions), lines, options)
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
    # The empty line ends the Markdown list.
    yield from ("", *map(markdown_text, _format_regressions(regressions))) if regressions else ()


def _format_regressions(regressions: list[Figure]) -> Iterator[str]:
    if regressions:
        names = ", ".join(f"{figure.build} {figure.what}" for figure in regressions)
        yield f"REGRESSION: {count_text(len(regressions), 'figure')}: {names}"


COMMANDS: Final = {"report": report, "compare": compare}

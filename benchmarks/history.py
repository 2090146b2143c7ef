"""History of benchmark results from commit to commit, and a page with charts.

    python benchmarks/history.py [--html FILE] [--check]

Benchmarks that compare with a peer append to `benchmarks/history.jsonl` with `record`: a line for each run, with its
commit, day and machine, and the ratio of each case to the fastest peer (below 1: tvmflow is faster). The page has a
table of all cases, and a chart for each benchmark with a line for each machine. A line starts at the geometric mean of
its first run and changes by the geometric mean over cases in both runs, so that other cases do not look like a change.
`--check` prints the cases that became slower since the previous run on the same machine, and exits with 1 if there are
any.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tvmflow.core.generated_text import Markup, element  # noqa: E402
from tvmflow.pages import plot  # noqa: E402
from tvmflow.pages.document import render_document  # noqa: E402
from tvmflow.pages.plot import Cell, Row, table  # noqa: E402
from tvmflow.targets.host import read_host  # noqa: E402

FILE: Final = ROOT / "benchmarks" / "history.jsonl"

# Runs on a quiet machine differ by less than this.
_NOISE: Final = 0.05


class Run(NamedTuple):
    """A run of a benchmark.

    Attributes:
        benchmark: Name, with the measured configuration if there are several: `zoo, tuned`.
        day: Date, such as `2026-11-26`.
        commit: Short hash, with `+` for uncommitted changes.
        machine: CPU, and number of usable cores.
        load: Load average of the last minute at the end of the run.
        ratios: Case -> ratio to the fastest peer.
        peers: Case -> fastest peer.
    """

    benchmark: str
    day: str
    commit: str
    machine: str
    load: float
    ratios: Mapping[str, float]
    peers: Mapping[str, str] = {}

    @property
    def is_quiet(self) -> bool:
        """False if other load competed for cores; the benchmark itself has two processes."""
        cores = int(self.machine.rpartition(" × ")[2])
        return self.load <= cores + 1


def record(
    benchmark: str,
    ratios: Mapping[str, float],
    peers: Mapping[str, str] | None = None,
    counted_for: str = "",
    gpu: str = "",
) -> None:
    """Append the results of a benchmark to the history, unless they are empty.

    Args:
        benchmark: Name, with the measured configuration if there are several.
        ratios: Case -> ratio of tvmflow's latency, cycles or time to the fastest peer's.
        peers: Case -> fastest peer, if there are several peers.
        counted_for: The CPU for which instructions or cycles were counted; counts do not depend on load.
        gpu: The GPU of the benchmark, if any.
    """
    if not ratios:
        return
    host = read_host()
    run = Run(
        benchmark=benchmark,
        day=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        commit=_ask_git("rev-parse", "--short", "HEAD") + ("+" if _has_changes() else ""),
        machine=f"{counted_for or gpu or host.model} × {1 if counted_for or gpu else host.cores}",
        load=0.0 if counted_for else round(os.getloadavg()[0], 1),
        ratios={case: round(ratio, 4) for case, ratio in ratios.items()},
        peers=peers or {},
    )
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run._asdict(), ensure_ascii=False) + "\n")


def _has_changes() -> bool:
    """Return whether the package has uncommitted changes."""
    return bool(_ask_git("status", "--porcelain", "--", "tvmflow"))


def _ask_git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "?" if not done.returncode else "?"


def read_runs(file: Path = FILE) -> list[Run]:
    """Return the runs, oldest first."""
    if not file.exists():
        return []
    return [Run(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------- changes


class Change(NamedTuple):
    """A case that became slower since the previous run on the same machine."""

    run: Run
    previous: Run
    case: str

    def __str__(self) -> str:
        before, after = self.previous.ratios[self.case], self.run.ratios[self.case]
        return (
            f"{self.run.benchmark}: {self.case} {before:.2f} → {after:.2f} of the fastest peer "
            f"({after / before - 1:+.0%}), {self.previous.commit} → {self.run.commit}, {self.run.machine}"
        )


def find_losses(runs: Sequence[Run]) -> list[Change]:
    """Return the cases that became slower, beyond the noise, in the last quiet runs."""
    losses = []
    for series in _group((run for run in runs if run.is_quiet), "benchmark", "machine").values():
        *before, last = series
        for case, ratio in last.ratios.items():
            previous = next((run for run in reversed(before) if case in run.ratios), None)
            if previous and ratio > previous.ratios[case] * (1 + _NOISE):
                losses.append(Change(last, previous, case))
    return losses


def _group(runs: Iterable[Run], *fields: str) -> dict[tuple[str, ...], list[Run]]:
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(getattr(run, field) for field in fields)].append(run)
    return groups


def chain(runs: Sequence[Run]) -> list[float]:
    """Return the chart value of each run (see the module's docstring)."""
    heights = [statistics.geometric_mean(runs[0].ratios.values())]
    for before, after in pairwise(runs):
        shared = before.ratios.keys() & after.ratios.keys()
        factor = (
            statistics.geometric_mean(after.ratios[case] / before.ratios[case] for case in shared)
            if shared
            else 0
        )
        heights.append(heights[-1] * factor or statistics.geometric_mean(after.ratios.values()))
    return heights


# ---------------------------------------------------------------- the page


def render(runs: Sequence[Run]) -> str:
    """Return the HTML page of the history."""
    losses = find_losses(runs)
    if not runs:
        lead = "No benchmark has been recorded."
    elif losses:
        lead = f"{len(losses)} case{'s' * (len(losses) > 1)} became slower with the last quiet run."
    else:
        lead = "No case became slower with the last quiet run on the same machine."
    sections = [
        ("losses", "What became slower", _list_losses(losses)),
        *(
            (f"benchmark-{number}", benchmark, list(_draw_benchmark(benchmark, group)))
            for number, ((benchmark,), group) in enumerate(_group(runs, "benchmark").items())
        ),
    ]
    return render_document("Speed from commit to commit", "history", lead, sections)


def _list_losses(losses: Sequence[Change]) -> Markup | None:
    return element("ul", (element("li", str(loss)) for loss in losses)) if losses else None


def _draw_benchmark(benchmark: str, runs: Sequence[Run]) -> Iterator[Markup]:
    """Yield the chart of a benchmark, and the table of its cases."""
    commits = {commit: x for x, commit in enumerate(dict.fromkeys(run.commit for run in runs))}
    lines = {machine: series for (machine,), series in _group(runs, "machine").items()}
    heights = {machine: chain(series) for machine, series in lines.items()}
    names = list(commits)
    x = plot.Axis(
        "commit",
        tuple(map(float, commits.values())),
        lambda value: names[int(value)] if value.is_integer() and 0 <= value < len(names) else "",
    )
    values = tuple(height for series in heights.values() for height in series)
    y = plot.Axis("of the fastest peer", (*values, 1.0), "{:.2f}".format)
    frame = plot.make_frame(x, y)
    drawn = []
    for number, (machine, series) in enumerate(lines.items()):
        points = [
            (float(commits[run.commit]), height)
            for run, height in zip(series, heights[machine], strict=True)
        ]
        marks = [
            plot.Mark(*point, text=_describe(run), series=number, is_hollow=not run.is_quiet)
            for run, point in zip(series, points, strict=True)
        ]
        drawn += [plot.draw_line(points, frame, number), plot.draw_marks(marks, frame)]
    samples = (
        element("p", plot.swatch(number), f" {machine}") for number, machine in enumerate(lines)
    )
    caption = element(
        "figcaption",
        element("p", "Lower is better; hollow marks are runs beside other work."),
        samples,
    )
    yield element("figure", caption, plot.plot(benchmark, x, y, drawn))
    yield table(f"{benchmark}: the cases", _list_cases(runs))


def _describe(run: Run) -> str:
    mean, worst = (
        statistics.geometric_mean(run.ratios.values()),
        max(run.ratios, key=lambda case: run.ratios[case]),
    )
    return (
        f"{run.day}, {run.commit}: {mean:.2f} over {len(run.ratios)}, "
        f"at most {run.ratios[worst]:.2f} ({worst}), load {run.load:g}"
    )


def _list_cases(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield a row for each case and machine."""
    for (machine,), series in _group(runs, "machine").items():
        for case in dict.fromkeys(case for run in series for case in run.ratios):
            found = [run for run in series if case in run.ratios]
            ratios = [run.ratios[case] for run in found]
            changed = ratios[-1] / ratios[-2] - 1 if len(ratios) > 1 else None
            style = (
                "faint"
                if changed is None or abs(changed) <= _NOISE
                else "bad"
                if changed > 0
                else "good"
            )
            yield {
                "case": Cell(case, case, machine),
                "last": Cell(f"{ratios[-1]:.2f}", ratios[-1]),
                "change": Cell(
                    "–" if changed is None else element("span", f"{changed:+.0%}", class_=style),
                    changed,
                ),
                "best": Cell(f"{min(ratios):.2f}", min(ratios)),
                "runs": Cell(str(len(ratios)), len(ratios)),
                "fastest peer": Cell(found[-1].peers.get(case, "–")),
                "last run": Cell(f"{found[-1].day}, {found[-1].commit}", found[-1].day),
            }


def main() -> int:
    """Write the page, or print cases that became slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page here")
    parser.add_argument("--check", action="store_true", help="print what became slower")
    args = parser.parse_args()
    runs = read_runs()
    if args.html:
        args.html.write_text(render(runs), encoding="utf-8")
    losses: list[Any] = find_losses(runs)
    if args.check or not args.html:
        print(*(losses or ["no case became slower in the last quiet runs"]), sep="\n")
    return 1 if args.check and losses else 0


if __name__ == "__main__":
    sys.exit(main())

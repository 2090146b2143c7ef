"""Generates benchmarks/RESULTS.md from results.yaml and history.jsonl beside it: `make docs-reference`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import yaml  # noqa: TID251 - cells stay as they are written, as 9.90, which recipes would read as numbers

from benchmarks.history import read_runs

_NUMBER: Final = re.compile(r"−?\d|–$")
"""How a cell with a value begins; a dash is one that was not measured."""
_FOLDER: Final = Path(__file__).resolve().parent.parent / "benchmarks"
_INTRODUCTION: Final = """\
# Benchmark results

Latency, size, accuracy and build time of tvmflow against other runtimes and tools: a table for each question, with command, peers, machine and date.

A column `/ X` is the time of tvmflow relative to X, so tvmflow is faster below 1; *faster* is the faster peer. Measurements are interleaved and vary by a few percent. An error is the largest difference from the reference, relative to the largest output. [README.md](README.md) describes the programs, [results.yaml](results.yaml) has the values.

| machine | |
|---|---|
"""


class Table(NamedTuple):
    """Measured values that answer a question."""

    question: str
    command: str
    peer: str
    machine: str
    date: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


class Results(NamedTuple):
    """Machines by name, and tables by the title of their section."""

    machines: Mapping[str, str]
    sections: Mapping[str, list[Table]]


def read_results() -> Results:
    """Return the content of results.yaml."""
    text = (_FOLDER / "results.yaml").read_text(encoding="utf-8")
    document = yaml.load(text, Loader=yaml.BaseLoader)
    sections = {s["title"]: [Table(**t) for t in s["tables"]] for s in document["sections"]}
    return Results(document["machines"], sections)


def results_page() -> str:
    """Return the content of benchmarks/RESULTS.md."""
    results = read_results()
    parts = [_INTRODUCTION, *(f"| {name} | {text} |\n" for name, text in results.machines.items())]
    for title, tables in results.sections.items():
        parts += [f"\n## {title}\n", *map(_render, tables)]
    return "".join([*parts, _render_history()])


def _render(table: Table) -> str:
    source = f"`{table.command}`; peers: {table.peer}; {table.machine}, {table.date}."
    note = f" {table.note}" if table.note else ""
    return f"\n### {table.question}\n\n{source}{note}\n\n{_markdown(table.columns, table.rows)}"


def _render_history() -> str:
    latest: dict[tuple[str, str], dict[str, float]] = {}
    days = {}
    for run in read_runs():
        latest.setdefault((run.benchmark, run.machine), {}).update(run.ratios)
        days[run.benchmark, run.machine] = run.day
    rows = []
    for names, ratios in latest.items():
        mean, largest = statistics.geometric_mean(ratios.values()), max(ratios.values())
        rows.append([*names, days[names], str(len(ratios)), f"{mean:.2f}", f"{largest:.2f}"])
    columns = ["benchmark", "machine", "date", "cases", "/ fastest peer", "largest"]
    return (
        "\n## Recorded runs\n\nThe latest ratio of each case in `history.jsonl`: geometric mean and largest. "
        "`python benchmarks/history.py` draws all runs.\n\n" + _markdown(columns, rows)
    )


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table; columns of numbers are aligned to the right."""
    alignment = "|".join(
        "---:" if all(_NUMBER.match(row[i]) for row in rows) else "---" for i in range(len(columns))
    )
    lines = [columns, *([_with_separators(cell) for cell in row] for row in rows)]
    head, *body = (f"{' | '.join(line)}\n" for line in lines)
    return "".join([head, f"{alignment}\n", *body])


def _with_separators(cell: str) -> str:
    """Return a number with commas between thousands; another cell as it is."""
    return re.sub(r"^\d{4,}(?=(\.\d+)?$)", lambda match: f"{int(match[0]):,}", cell)


def main() -> None:
    """Write the page."""
    (_FOLDER / "RESULTS.md").write_text(results_page(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The page of measured figures: made from data, with a command and a machine for each table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.benchmark_results import Table, read_results, results_page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = read_results()
TABLES = [table for tables in RESULTS.sections.values() for table in tables]


def test_the_page_is_current() -> None:
    """RESULTS.md has what results.yaml and history.jsonl have."""
    written = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    assert written == results_page(), "run `make docs-reference`"
    assert len(written.split()) <= 6000, "leave out what no user asks"


@pytest.mark.parametrize("table", TABLES, ids=[table.question for table in TABLES])
def test_a_table_can_be_measured_again(table: Table) -> None:
    """Its program exists, its machines are described, rows are complete and notes are short."""
    script = re.match(r"python (benchmarks/\S+)", table.command)
    assert (ROOT / script[1]).is_file() if script else table.command.startswith("tvmflow ")
    assert set(table.machine.split(" and ")) <= set(RESULTS.machines)
    assert re.fullmatch(r"\d{4}-\d\d(-\d\d)?", table.date)
    assert table.rows
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert len(re.findall(r"[.!?](?: |$)", table.note)) <= 2

"""Random small ONNX graphs of every operator agree with ONNX Runtime and the ONNX reference, or are refused."""

from __future__ import annotations

import os
import time
from typing import Final

import pytest

from tests.conftest import Count
from tests.fuzz.random_graphs import campaign, judging
from tests.fuzz.random_graphs.operators import RULES
from tvmflow.frontends.onnx.operators import OPERATORS, supported_operators

NOT_DRAWN: Final = {
    "If": "is drawn around others",
    "GroupedWeights": "is written by the import, for MatMulNBits",
    "AllClassNMS": "is an operator of TVM's own that ONNX Runtime lacks",
    "MatMulInteger16": "has no kernel in ONNX Runtime",
    "Scatter": "is the old name of ScatterElements",
    "GroupQueryAttention": "has sizes that its other operands repeat; test_onnx_attention.py has its cases",
}
NIGHTLY: Final = 2_000
CHUNK: Final = 250


def test_every_imported_operator_is_drawn() -> None:
    """An operator that is added to the import gets a rule."""
    rewritten = (n for n, entry in OPERATORS.items() if entry.rewrite)
    # test_onnx_classical.py has the cases of classical operators
    classical = {n for n, entry in OPERATORS.items() if entry.format == "classical"}
    imported = {*supported_operators(), *rewritten} - classical
    drawn = {name.removeprefix("ms.") for name in RULES}
    assert sorted(imported - drawn - NOT_DRAWN.keys()) == []


@pytest.mark.slow
def test_every_attribute_is_drawn() -> None:
    """Attributes, bodies and dynamic shapes of all operators occur in some thousand graphs."""
    seen: dict[str, set[str]] = {}
    features: set[str] = set()
    for seed in range(len(RULES) * 80):
        case, _ = judging.make_case(seed)
        seen.setdefault(case.operator, set()).update(case.attributes)
        features.update(case.features)
    assert {"If", "Loop", "Scan", "function", "dynamic", "computed input"} <= features
    missing = {
        f"{name}.{attribute}"
        for name in sorted({n for n in RULES if not n.startswith("ms.")} & seen.keys())
        if name in judging.SCHEMAS
        for attribute in judging.SCHEMAS[name].attributes
        if attribute not in seen[name]
    }
    assert sorted(missing - judging.UNDRAWN_ATTRIBUTES) == []


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (1, 2, 3))]
)
def test_graphs_agree_or_are_refused(first: int, count: Count) -> None:
    """Always the same graphs: one of every fourth operator."""
    check(range(first, len(RULES), 4), count)


@pytest.mark.fuzz
@pytest.mark.parametrize("chunk", range(0, NIGHTLY, CHUNK))
def test_many_graphs_agree_or_are_refused(chunk: int, count: Count) -> None:
    """Other graphs each night, from the number of the day; the seeds are printed."""
    first = int(os.environ.get("TVMFLOW_FUZZ_SEED", int(time.time()) // 86400 * NIGHTLY)) + chunk
    print(f"seeds {first} to {first + CHUNK - 1}")
    check(range(first, first + CHUNK), count)


def check(seeds: range, count: Count) -> None:
    """Judge graphs; none may fail, and hardly any may be left unjudged."""
    report = campaign.run(seeds)
    for outcome, number in report.outcomes.items():
        count(f"random graphs: {outcome}", number)
    assert not report.findings, f"{seeds}\n{report}"
    assert report.outcomes["right"] > len(seeds) / 2

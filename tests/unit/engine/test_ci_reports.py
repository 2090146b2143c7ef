"""What CI services read of a run: JUnit XML and Markdown."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from tvmflow.cli.ci_messages import junit_xml, markdown_summary
from tvmflow.core.types import Json
from tvmflow.engine.report import RunReport, StageReport


def stage(label: str, outcome: str = "ran", **more: Any) -> StageReport:
    return StageReport(f"net:{label}", outcome, "never ran", 1.5, {}, **more)


STAGES = (
    stage("import", "hit"),
    stage("build/host"),
    stage("build/edge", "crashed", message="out of <memory>\nmore", fix="buy some", log="a.log"),
    stage("verify/host", "rejected", message="wrong: \x1b[31m\x00"),
    stage("verify/edge", "skipped"),
)
REPORT = RunReport(STAGES, (), (), 61.0)
RELEASE: Json = {
    "failed_gates": [{"label": "net/host", "gate": "max_latency", "message": "5 ms, not 3 ms"}],
    "comparisons": [{"recipe": "net", "target": name} for name in ("host", "edge")],
}


def test_every_stage_is_a_test_case() -> None:
    """The counts of suites and of the whole agree with the cases; text is valid XML whatever it holds."""
    root = ElementTree.fromstring(junit_xml(REPORT))
    (suite,) = root
    counts = {"tests": "5", "failures": "1", "errors": "1", "skipped": "1", "time": "7.500"}
    assert root.attrib == {"name": "tvmflow", **counts}
    assert suite.attrib == {"name": "net", **counts}
    names = [(case.attrib["classname"], case.attrib["name"]) for case in suite]
    assert names[:2] == [("net", "import"), ("net.host", "build")]
    crashed = suite[2].find("error")
    assert crashed is not None
    assert crashed.attrib == {"type": "crashed", "message": "out of <memory>"}
    assert crashed.text == "out of <memory>\nmore\nfix: buy some\nlog: a.log"
    rejected = suite[3].find("failure")
    assert rejected is not None and rejected.attrib["message"] == "wrong: \ufffd[31m\ufffd"
    assert suite[4].find("skipped") is not None


def test_gates_of_a_release_are_test_cases() -> None:
    """One for each that failed, and one for each library that passed all of them."""
    suite = ElementTree.fromstring(junit_xml(REPORT, RELEASE))[1]
    assert suite.attrib["name"] == "release" and suite.attrib["failures"] == "1"
    cases = {(case.attrib["classname"], case.attrib["name"]): len(case) for case in suite}
    assert cases == {("release.net/host", "max_latency"): 1, ("release.net/edge", "gates"): 0}


def test_a_reader_of_junit_files_agrees() -> None:
    """As CI services read them."""
    reader = pytest.importorskip("junitparser", reason="pip install 'tvmflow[test]'")
    read = reader.JUnitXml.fromstring(junit_xml(REPORT, RELEASE))
    results = {
        case.name: [type(result).__name__ for result in case.result] for case in next(iter(read))
    }
    assert results == {"import": [], "build": ["Error"], "verify": ["Skipped"]}
    assert (read.tests, read.failures, read.errors, read.skipped) == (7, 2, 1, 1)


def test_markdown_says_what_failed() -> None:
    """A heading with the result, and the problems as they are, whatever characters they have."""
    text = markdown_summary(REPORT)
    assert text.startswith("### ❌ tvmflow: net\n")
    assert "2 ran" not in text and "1 ran, 1 up to date, 1 crashed, 1 rejected, 1 skipped" in text
    assert "<pre>out of &lt;memory&gt;\nmore\nfix: buy some</pre>" in text
    assert "\x1b" not in text
    done = markdown_summary(RunReport(STAGES[:2], (), (), 1.0))
    assert done.startswith("### ✅ tvmflow: net\n") and "<pre>" not in done


def test_markdown_escapes_names() -> None:
    """A name is never taken for markup."""
    report = RunReport((StageReport("a_b|<i>:import", "hit", "", 0.0, {}),), (), (), 0.0)
    assert markdown_summary(report).startswith("### ✅ tvmflow: a\\_b\\|&lt;i&gt;\n")

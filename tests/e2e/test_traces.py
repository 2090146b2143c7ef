"""Traces of real runs: what ran where, down to each trial."""

from __future__ import annotations

import gzip
import json

from tests.support.project import Project
from tests.support.trace_checks import check_trace


def test_the_trace_of_a_run_has_its_trials(finished_project: Project) -> None:
    """On the threads that built them, within the stage; each is measured on the device."""
    written = finished_project.call("trace", "latest", "-o", "t.json")
    assert written.code == 0, written.err
    trace = check_trace(json.loads((finished_project.folder / "t.json").read_text()))
    assert ("tiny:import", "tiny:lower/host") in trace.flows
    stages = {item["name"]: item for item in trace.slices["worker 1/stages"]}
    assert [name.partition(":")[2].partition("/")[0] for name in stages] == [
        *("import", "lower", "extract_tasks", "tune", "pick_best", "build", "export", "verify"),
    ]
    threads = [name for name in trace.slices if name.startswith("worker 1/builder_")]
    items = [item for name in threads for item in trace.slices[name]]
    trials = [item for item in items if item["name"].startswith("trial of ")]
    assert len([item for item in trials if "untuned" not in item["name"]]) == 4
    assert {item["args"]["stage"] for item in trials} == {"tiny:tune/host"}
    tune = stages["tiny:tune/host"]
    assert all(
        tune["ts"] <= item["ts"] and item["ts"] + item["dur"] <= tune["ts"] + tune["dur"]
        for item in trials
    )
    (device,) = (items for name, items in trace.slices.items() if name.endswith("/cpu"))
    assert {"tiny:tune/host", "tiny:pick_best/host", "tiny:verify/host"} == {
        item["name"] for item in device
    }


def test_the_trace_of_an_inference_has_the_nodes_of_each_kernel(finished_project: Project) -> None:
    """As the store knows them that built the library; another one has no nodes."""
    bundle = "dist/tiny/host/tiny.tvmflow"
    words = ("run-model", bundle, "--trace", "t.json.gz", "--repeat", "2", "--json")
    written = finished_project.call(*words)
    assert written.code == 0, written.err
    assert json.loads(written.out)["trace"] == {
        "path": "t.json.gz", "calls": 2, "names_nodes": True,
    }  # fmt: skip
    content = gzip.decompress((finished_project.folder / "t.json.gz").read_bytes())
    (items,) = check_trace(json.loads(content)).slices.values()
    kernels = [item["args"]["nodes"] for item in items if not item["name"].startswith("call ")]
    assert "Conv (c), Relu (r)" in kernels
    assert len(kernels) == 2 * len(set(kernels))
    (finished_project.folder / "empty").mkdir()
    other = json.loads(finished_project.call(*words, "--store", "empty").out)
    assert not other["trace"]["names_nodes"]

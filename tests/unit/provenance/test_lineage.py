"""Lineage of locked runs, of releases, and of runs without verification or tuning."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.support.provenance import TRIAL, WORKLOAD, World, contents
from tvmflow.core.types import InputFile, StageSpec
from tvmflow.provenance import delivered, write
from tvmflow.provenance.check import check_delivered
from tvmflow.runtime.statements import Statement, parse_statement
from tvmflow.store.local import DamagedBlob

MEASURED = ("measurements.json", "net.measurements.intoto.jsonl")


def read(path: Path) -> Statement:
    return parse_statement(base64.b64decode(json.loads(path.read_bytes())["payload"]))


def without(world: World, *stages: str, **files: InputFile) -> None:
    """Return the plan without some stages, with `files` (by stage) as inputs instead, and new results."""

    def kept(spec: StageSpec) -> StageSpec:
        needs = tuple(need for need in spec.needs if need.maker not in stages)
        more = (files[spec.stage],) if spec.stage in files else ()
        return spec._replace(needs=needs, files=(*spec.files, *more))

    specs = tuple(kept(spec) for spec in world.plan.stages if spec.stage not in stages)
    ids = {spec.id for spec in specs}
    deliveries = tuple(
        entry if entry.verified_by in ids else entry._replace(verified_by="")
        for entry in world.plan.deliveries
        if entry.stage_id in ids
    )
    world.plan = world.plan._replace(stages=specs, deliveries=deliveries)
    world.artifacts = {}
    world.make(contents())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "here")


def locked(world: World, folder: Path) -> Path:
    """As in a locked run: nothing is searched, the choice is a file."""
    chosen = folder / "chosen"
    chosen.write_text(json.dumps({WORKLOAD: TRIAL.trace}))
    digest = hashlib.sha256(chosen.read_bytes()).hexdigest()
    file = InputFile("pick_best/chosen.json", str(chosen), "net.lock.yaml:1:1", sha256=digest)
    without(world, "tune", "pick_best", build=file)
    return chosen


def test_schedules_of_a_lock_file_are_known_by_their_traces(world: World, tmp_path: Path) -> None:
    chosen = locked(world, tmp_path)
    world.deliver()
    read_back = read(world.statement)
    assert [entry.get("record") for entry in read_back.kernels] == [{"trial": TRIAL.id}] * 2 + [
        None
    ]
    sources = {str(entry["name"]): entry["digest"] for entry in read_back.dependencies("source")}
    digest = hashlib.sha256(chosen.read_bytes()).hexdigest()
    assert sources["pick_best/chosen.json"] == {"sha256": digest}


def test_a_choice_that_changed_after_the_build_is_not_named(world: World, tmp_path: Path) -> None:
    chosen = locked(world, tmp_path)
    chosen.write_text("{}")
    with pytest.raises(DamagedBlob):
        world.deliver()


def test_without_verification_there_is_no_verdict(world: World) -> None:
    """A pipeline may end at `export`."""
    without(world, "verify")
    world.deliver()
    read_back = read(world.statement)
    assert (dict(read_back.verdict), "verify.json" in read_back.subjects) == ({}, False)
    assert "quantitativeAnalysis" not in world.bom.read_text()


def test_without_tuning_there_are_no_trials(world: World) -> None:
    without(world, "extract_tasks", "tune", "pick_best")
    world.deliver()
    assert not [entry for entry in read(world.statement).kernels if "record" in entry]


def test_a_release_has_a_statement_about_all_its_files(world: World, tmp_path: Path) -> None:
    """Every target and all other files; an edited report is found."""
    world.deliver()
    release = tmp_path / "all-1.0"
    shutil.copytree(world.dist, release)
    (release / "report.html").write_text("<p>good</p>")
    groups = delivered.list_delivered_targets(world.plan, world.artifacts)
    for name in MEASURED:
        (release / "net/host" / name).unlink()
    write.write_release_targets(release, groups, world.store)
    (release / "measurements.json").write_text("{}")
    write.write_release_statements(release, "all", "1.0", ["measurements.json"])
    read_back = read(release / "release.intoto.jsonl")
    assert read_back.about == "all 1.0"
    assert {"report.html", "net/host/net.so", "net/host/net.cdx.json"} <= read_back.subjects.keys()
    assert read_back.measured_files == ["measurements.json"]
    assert "measurements.json" not in read_back.subjects
    measured = read(release / "measurements.intoto.jsonl")
    assert measured.is_of_measurements and list(measured.subjects) == ["measurements.json"]
    (target,) = read_back.dependencies("statement")
    text = base64.b64decode(json.loads(world.statement.read_bytes())["payload"])
    assert target["digest"] == {"sha256": hashlib.sha256(text).hexdigest()}
    assert all(entry.good for entry in check_delivered(release, ()))
    (release / "report.html").write_text("<p>better</p>")
    (bad,) = [entry for entry in check_delivered(release, ()) if not entry.good]
    assert bad.path.name == "report.html"

"""What is behind files that did not come the usual way: out of a lock, into a release, without checks."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.support.provenance import TRIAL, WORKLOAD, World, contents
from tvmflow.provenance import beside, statement, writing
from tvmflow.provenance.checking import check
from tvmflow.provenance.statement import Statement
from tvmflow.stores.local import Damaged
from tvmflow.values import InputFile, StageSpec


def read(path: Path) -> Statement:
    return statement.read(base64.b64decode(json.loads(path.read_bytes())["payload"]))


def without(world: World, *stages: str, **files: InputFile) -> None:
    """The same plan without some stages, others reading `files` (by stage) instead; its results made anew."""

    def kept(spec: StageSpec) -> StageSpec:
        needs = tuple(need for need in spec.needs if need.maker not in stages)
        more = (files[spec.stage],) if spec.stage in files else ()
        return spec._replace(needs=needs, files=(*spec.files, *more))

    specs = tuple(kept(spec) for spec in world.plan.stages if spec.stage not in stages)
    ids = {spec.id for spec in specs}
    deliveries = tuple(
        each if each.verified_by in ids else each._replace(verified_by="")
        for each in world.plan.deliveries
        if each.stage_id in ids
    )
    world.plan = world.plan._replace(stages=specs, deliveries=deliveries)
    world.artifacts = {}
    world.make(contents())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "here")


def locked(world: World, folder: Path) -> Path:
    """As in a run that keeps to a lock: nothing is searched, the choice is a file."""
    chosen = folder / "chosen"
    chosen.write_text(json.dumps({WORKLOAD: TRIAL.trace}))
    digest = hashlib.sha256(chosen.read_bytes()).hexdigest()
    file = InputFile("pick_best/chosen.json", str(chosen), "net.lock.yaml:1:1", sha256=digest)
    without(world, "tune", "pick_best", build=file)
    return chosen


def test_schedules_out_of_a_lock_are_known_by_their_traces(world: World, tmp_path: Path) -> None:
    chosen = locked(world, tmp_path)
    world.deliver()
    said = read(world.statement)
    assert [each.get("record") for each in said.kernels] == [{"trial": TRIAL.id}] * 2 + [None]
    sources = {str(each["name"]): each["digest"] for each in said.dependencies("source")}
    digest = hashlib.sha256(chosen.read_bytes()).hexdigest()
    assert sources["pick_best/chosen.json"] == {"sha256": digest}


def test_other_schedules_than_were_built_with_are_not_named(world: World, tmp_path: Path) -> None:
    chosen = locked(world, tmp_path)
    chosen.write_text("{}")
    with pytest.raises(Damaged):
        world.deliver()


def test_what_was_never_verified_says_nothing_of_it(world: World) -> None:
    """A pipeline may end at `export`."""
    without(world, "verify")
    world.deliver()
    said = read(world.statement)
    assert (dict(said.verdict), "verify.json" in said.subjects) == ({}, False)
    assert "quantitativeAnalysis" not in world.bom.read_text()


def test_what_was_never_tuned_has_no_records(world: World) -> None:
    without(world, "extract_tasks", "tune", "pick_best")
    world.deliver()
    assert not [each for each in read(world.statement).kernels if "record" in each]


def test_a_release_is_described_as_a_whole(world: World, tmp_path: Path) -> None:
    """Its targets each, and all that lies beside them; one edited report is found."""
    world.deliver()
    release = tmp_path / "all-1.0"
    shutil.copytree(world.dist, release)
    (release / "report.html").write_text("<p>good</p>")
    groups = beside.groups(world.plan, world.artifacts)
    writing.write_release(release, "all", "1.0", groups, world.store)
    said = read(release / "release.intoto.jsonl")
    assert said.about == "all 1.0"
    assert {"report.html", "net/host/net.so", "net/host/net.cdx.json"} <= said.subjects.keys()
    (target,) = said.dependencies("statement")
    text = base64.b64decode(json.loads(world.statement.read_bytes())["payload"])
    assert target["digest"] == {"sha256": hashlib.sha256(text).hexdigest()}
    assert all(each.good for each in check(release, ()))
    (release / "report.html").write_text("<p>better</p>")
    (bad,) = [each for each in check(release, ()) if not each.good]
    assert bad.path.name == "report.html"

"""Delivery: complete files, and only those of verified libraries."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.support.engine import artifact, plan_of, planned, recipe
from tests.support.file_edits import write_with_old_times
from tests.support.small_runs import RunHost
from tests.support.small_runs import plan_of as plan_of_small_run
from tests.support.umask import modes_below, umask
from tvmflow.core.errors import EXIT_OK, StoreError
from tvmflow.core.types import Artifact, Plan, StageKey
from tvmflow.engine import delivery
from tvmflow.store.local import LocalStore

CONTENTS = {
    "net.tvmflow": b"bundle",
    "module.tvmflow": b"bundle",
    "verdict.json": b"{}",
    "measurements.json": b"{}",
}


class FinishedPlan:
    """A store with the results of a plan, and a `dist` folder."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(str(folder / "store"))
        self.store.create()
        self.dist = str(folder / "dist")
        self.plan: Plan = plan_of(planned(recipe()))
        digests = {}
        for name, content in CONTENTS.items():
            path = folder / name
            path.write_bytes(content)
            digests[name] = self.store.blobs.add(str(path))
        self.artifacts: dict[str, Artifact] = {
            "net:export/host": artifact(
                StageKey("k", {}), **{n: digests[n] for n in ("net.tvmflow", "module.tvmflow")}
            ),
            "net:verify/host": artifact(
                StageKey("v", {}),
                **{name: digests[name] for name in ("verdict.json", "measurements.json")},
            ),
        }

    def deliver(self) -> list[str]:
        paths = delivery.deliver(self.plan, self.artifacts, self.store, self.dist)
        return [str(Path(path).relative_to(self.dist)) for path in paths]

    def is_pending(self) -> bool:
        return delivery.delivered_paths(self.plan, self.artifacts, self.store, self.dist) is None


@pytest.fixture
def finished(tmp_path: Path) -> FinishedPlan:
    return FinishedPlan(tmp_path)


def test_files_are_delivered_to_the_folder_of_recipe_and_target(finished: FinishedPlan) -> None:
    """The library and its verdict; other files of the results stay in the store."""
    assert finished.is_pending()
    assert finished.deliver() == [
        "net/host/net.tvmflow",
        "net/host/verify.json",
        "net/host/measurements.json",
    ]
    assert Path(finished.dist, "net/host/net.tvmflow").read_bytes() == b"bundle"
    assert not finished.is_pending()
    assert sorted(path.name for path in Path(finished.dist).rglob("*")) == [
        "host",
        "measurements.json",
        "net",
        "net.tvmflow",
        "verify.json",
    ]


def test_nothing_is_delivered_that_was_not_verified(finished: FinishedPlan) -> None:
    """Without the result of verify, no file of the target is copied."""
    del finished.artifacts["net:verify/host"]
    assert finished.deliver() == []
    assert not Path(finished.dist).exists()


def test_a_changed_or_removed_file_is_delivered_again(finished: FinishedPlan) -> None:
    """Also after an edit that keeps size and modification time."""
    finished.deliver()
    path = Path(finished.dist, "net/host/net.tvmflow")
    write_with_old_times(path, b"BUNDLE")
    assert finished.is_pending()
    finished.deliver()
    assert path.read_bytes() == b"bundle"
    path.unlink()
    finished.deliver()
    assert path.read_bytes() == b"bundle"


def test_a_link_is_replaced_and_not_followed(finished: FinishedPlan, tmp_path: Path) -> None:
    """The file that it points to keeps its content."""
    target_file = tmp_path / "target_file"
    target_file.write_bytes(b"precious")
    place = Path(finished.dist, "net/host/net.tvmflow")
    place.parent.mkdir(parents=True)
    place.symlink_to(target_file)
    finished.deliver()
    assert target_file.read_bytes() == b"precious"
    assert place.read_bytes() == b"bundle" and not place.is_symlink()


def test_a_folder_in_the_place_of_a_file_is_reported(finished: FinishedPlan) -> None:
    """The message has its path."""
    Path(finished.dist, "net/host/net.tvmflow/inner").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"net\.tvmflow"):
        finished.deliver()
    assert [path.name for path in Path(finished.dist, "net/host").iterdir()] == ["net.tvmflow"]


def test_a_file_in_the_place_of_dist_is_reported(finished: FinishedPlan) -> None:
    """The message has its path."""
    Path(finished.dist).write_text("a file")
    with pytest.raises(StoreError, match="dist"):
        finished.deliver()


def test_a_run_that_could_not_deliver_runs_no_stage(tmp_path: Path) -> None:
    """It ends before the work, not after it; a plan without deliveries needs no `dist`."""
    host, plan = RunHost(tmp_path), plan_of_small_run()
    host.dist.mkdir()
    (host.dist / "net").touch()
    with pytest.raises(StoreError, match=f"{host.dist / 'net'}: Not a directory"):
        host.run(plan)
    assert not host.executor.calls
    host.run(plan._replace(deliveries=()))
    assert host.executor.calls
    (host.dist / "net").unlink()
    assert host.run(plan).exit_code == EXIT_OK


def test_the_verdict_on_a_rejected_library_is_delivered_without_it(
    finished: FinishedPlan, tmp_path: Path
) -> None:
    """Users see what is wrong; the library itself is not delivered."""
    path = tmp_path / "verdict"
    path.write_text("no")
    spec = finished.plan.stages[-1]
    verdicts = {spec.id: finished.store.blobs.add(str(path))}
    delivery.deliver_verdicts(finished.plan, verdicts, finished.store, finished.dist)
    assert [p.name for p in Path(finished.dist, "net/host").iterdir()] == ["verify.json"]
    assert hashlib.sha256(b"no").hexdigest() in verdicts.values()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_decides_who_may_read_what_is_delivered(tmp_path: Path, mask: int) -> None:
    """Libraries, verdicts, statements and bills of materials alike, whatever the permissions in the store are."""
    host = RunHost(tmp_path)
    with umask(mask) as mode:
        delivered = host.run(plan_of_small_run()).delivered
    assert len(delivered) > 2
    assert modes_below(host.dist) == {mode}

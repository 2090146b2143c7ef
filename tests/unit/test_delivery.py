"""What arrives in `dist`: complete files, and only what was verified."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.support.engine import artifact, plan_of, planned, recipe
from tvmflow import delivery
from tvmflow.errors import StoreError
from tvmflow.stores.local import LocalStore
from tvmflow.values import Artifact, Plan, StageKey

CONTENTS = {"net.tvmflow": b"bundle", "module.tvmflow": b"bundle", "verdict.json": b"{}"}


class World:
    """A store with the results of a plan, and a place for its files."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(str(folder / "store"))
        self.store.create()
        self.dist = str(folder / "dist")
        self.plan: Plan = plan_of(planned(recipe()))
        digests = {}
        for name, content in CONTENTS.items():
            path = folder / name
            path.write_bytes(content)
            digests[name] = self.store.add_file(str(path))
        self.artifacts: dict[str, Artifact] = {
            "net:export/host": artifact(
                StageKey("k", {}), **{n: digests[n] for n in ("net.tvmflow", "module.tvmflow")}
            ),
            "net:verify/host": artifact(
                StageKey("v", {}), **{"verdict.json": digests["verdict.json"]}
            ),
        }

    def deliver(self) -> list[str]:
        paths = delivery.deliver(self.plan, self.artifacts, self.store, self.dist)
        return [str(Path(path).relative_to(self.dist)) for path in paths]

    def pending(self) -> bool:
        return delivery.delivered(self.plan, self.artifacts, self.store, self.dist) is None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_files_arrive_under_recipe_and_target(world: World) -> None:
    """The library and its verdict; what the recipe did not ask for stays in the store."""
    assert world.pending()
    assert world.deliver() == ["net/host/net.tvmflow", "net/host/verify.json"]
    assert Path(world.dist, "net/host/net.tvmflow").read_bytes() == b"bundle"
    assert not world.pending()
    assert sorted(path.name for path in Path(world.dist).rglob("*")) == [
        "host",
        "net",
        "net.tvmflow",
        "verify.json",
    ]


def test_nothing_arrives_that_was_not_verified(world: World) -> None:
    """Without verify's result, no file of the target is copied."""
    del world.artifacts["net:verify/host"]
    assert world.deliver() == []
    assert not Path(world.dist).exists()


def test_what_was_changed_or_removed_comes_back(world: World) -> None:
    """An edit of the same size too, even with its old time."""
    world.deliver()
    path = Path(world.dist, "net/host/net.tvmflow")
    before = path.stat()
    path.write_bytes(b"BUNDLE")
    import os

    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert world.pending()
    world.deliver()
    assert path.read_bytes() == b"bundle"
    path.unlink()
    world.deliver()
    assert path.read_bytes() == b"bundle"


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(
    world: World, tmp_path: Path
) -> None:
    """A file elsewhere that somebody linked to keeps its content."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    place = Path(world.dist, "net/host/net.tvmflow")
    place.parent.mkdir(parents=True)
    place.symlink_to(elsewhere)
    world.deliver()
    assert elsewhere.read_bytes() == b"precious"
    assert place.read_bytes() == b"bundle" and not place.is_symlink()


def test_what_stands_in_the_way_is_named(world: World) -> None:
    """A folder where the file should be, a file where a folder should be: a sentence with the place."""
    Path(world.dist, "net/host/net.tvmflow/inner").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"net\.tvmflow"):
        world.deliver()
    assert [path.name for path in Path(world.dist, "net/host").iterdir()] == ["net.tvmflow"]


def test_a_file_in_the_place_of_dist_is_named(world: World) -> None:
    """`dist` itself may be something else."""
    Path(world.dist).write_text("a file")
    with pytest.raises(StoreError, match="dist"):
        world.deliver()


def test_the_verdict_against_a_library_arrives_without_it(world: World, tmp_path: Path) -> None:
    """People see what is wrong; the library stays out."""
    path = tmp_path / "verdict"
    path.write_text("no")
    spec = world.plan.stages[-1]
    verdicts = {spec.id: world.store.add_file(str(path))}
    delivery.deliver_verdicts([spec], verdicts, world.store, world.dist)
    assert [p.name for p in Path(world.dist, "net/host").iterdir()] == ["verify.json"]
    assert hashlib.sha256(b"no").hexdigest() in verdicts.values()

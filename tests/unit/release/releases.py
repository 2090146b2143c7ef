"""Releases, made in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.provenance import World, contents
from tvmflow.planning.recipes import Pipeline
from tvmflow.recipe import Gates, Release
from tvmflow.recipe.lock_file import (
    LockedRecipe,
    LockedStage,
    LockedTarget,
    LockFile,
    Measurements,
)
from tvmflow.release.folder import (
    ReleaseResult,
    check_before_build,
    find_folder,
    make_release,
)
from tvmflow.release.gates import list_results

SIZES = {"net.so": 20, "net.tvmflow": 900}


def lock_of(measured: Measurements) -> LockFile:
    """Return a lock file of one recipe and target."""
    target = LockedTarget(tvm={"kind": "llvm"}, cores=2, measured=measured)
    settings = {"outputs": ["bundle", "shared-library"], "verify": {"against": "reference"}}
    stages = {
        f"{stage}/host": LockedStage(version=1, settings=settings) for stage in ("export", "verify")
    }
    recipe = LockedRecipe(recipe="net.yaml", version="0", stages=stages, targets={"host": target})
    return LockFile(lock=1, machine="linux-x86_64", tools={"tvm": "1"}, recipes={"net": recipe})


class Releases:
    """A pipeline `all` with the results of `World`, and its releases in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = World(folder / "world")

    def make(
        self,
        version: str,
        measured: Measurements = Measurements(bytes=SIZES),  # noqa: B008 - it is frozen
        *,
        against: str = "last",
        gates: Gates = Gates(),  # noqa: B008 - it is frozen
    ) -> ReleaseResult:
        release = Release(version=version, folder="releases", against=against, gates=gates)
        pipeline = self.pipeline(release)
        assert find_folder(pipeline, release) == self.folder / f"releases/all-{version}"
        world = self.world
        return make_release(
            pipeline,
            release,
            lock_of(measured),
            world.plan,
            world.artifacts,
            world.store,
            self.folder,
            list_results(world.plan, world.artifacts),
        )

    def pipeline(self, release: Release) -> Pipeline:
        return Pipeline("all", ("build",), self.folder / "all.yaml", release=release)

    def check(self, *requested: str, **fields: Any) -> None:
        """Check a release 2.0 before anything is built; `requested` is what the pipeline asks for."""
        release = Release(version="2.0", folder="releases", **fields)
        check_before_build(
            self.pipeline(release), release, self.world.plan, requested or ("net", "net/host")
        )

    def change_library(self) -> None:
        files = contents()
        files["export"]["net.so"] = b"\x7fELF another library"
        self.world.make(files)

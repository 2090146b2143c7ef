"""Builds what a lock names twice more, each time by itself and in other circumstances, and finds what differs.

Both builds begin with nothing: a store of their own, in folders of different depth, with other hash
seeds, time zones, locales, thread counts and numbers of jobs. Only downloads are shared, which are
known by their digests. Schedules come out of the lock, since a search is no function of its inputs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.decide import Survey, surveyed
from tvmflow.differing import first_difference
from tvmflow.errors import EXIT_OK, StageError
from tvmflow.locks import FOR_CHECKS, MEASURING, SEARCHING
from tvmflow.stores.local import LocalStore
from tvmflow.values import Plan, StageSpec


class Circumstances(NamedTuple):
    """What must not matter to a build."""

    folder: str
    jobs: int
    environment: dict[str, str]


TWICE: Final = (
    Circumstances(
        "one",
        1,
        {"PYTHONHASHSEED": "1", "TZ": "Pacific/Kiritimati", "LC_ALL": "C", "OMP_NUM_THREADS": "1"},
    ),
    Circumstances(
        "two/in a deeper folder/with a longer name than the other",
        2,
        {
            "PYTHONHASHSEED": "4242",
            "TZ": "America/Caracas",
            "LC_ALL": "C.UTF-8",
            "OMP_NUM_THREADS": "2",
        },
    ),
)

_DONE: Final = ("ran", "hit")

# What is no function of its inputs, and what is only made to look at the rest.
_NOT_COMPARED: Final = SEARCHING | MEASURING | FOR_CHECKS


class Part(NamedTuple):
    """The first place in which a build is another one: a stage, a file of it, and where in that."""

    stage_id: str
    file: str
    where: str
    build: str


class Again(NamedTuple):
    """What two more builds gave. `parted` is None when all of their files are those of the lock."""

    seconds: tuple[float, ...]
    stages: int
    files: int
    parted: Part | None


def build_again(
    words: Sequence[str],
    lock: Path,
    plan: Plan,
    store: LocalStore,
    folder: Path,
    on_build: Callable[[int], None],
) -> Again:
    """Build the plan, which is up to date in `store`, in the circumstances of `TWICE`, below `folder`.

    `words` are those of `run` that say what is built. Raises StageError when a build ends before its
    files can be compared.
    """
    survey = surveyed(plan, store)
    pinned = [spec for spec in plan.stages if spec.stage not in _NOT_COMPARED]
    seconds = []
    for number, how in enumerate(TWICE, 1):
        on_build(number)
        own = LocalStore(str(folder / how.folder / "cache"))
        finished = _build(words, lock, store, own, folder / how.folder, how)
        seconds.append(float(finished["seconds"]))
        failed = [each for each in finished["stages"] if each["outcome"] not in (*_DONE, "skipped")]
        for report in failed:
            spec = next((each for each in pinned if each.id == report["stage_id"]), None)
            part = spec and _part(spec, survey, store, own, f"build {number} of {len(TWICE)}")
            if part is None:
                raise StageError(
                    f"build {number} of {len(TWICE)} failed: {report['stage_id']}: {report['message']}",
                    fix=report["fix"],
                )
            return Again(tuple(seconds), len(pinned), 0, part)
    files = sum(len(survey.artifacts[spec.id].files) for spec in pinned)
    return Again(tuple(seconds), len(pinned), files, None)


def _build(
    words: Sequence[str],
    lock: Path,
    store: LocalStore,
    own: LocalStore,
    folder: Path,
    how: Circumstances,
) -> dict[str, Any]:
    """The last event of a run by itself."""
    folder.mkdir(parents=True)
    own.create()
    if Path(store.downloads).is_dir():
        Path(own.downloads).symlink_to(Path(store.downloads).absolute(), target_is_directory=True)
    command = [sys.executable, "-m", "tvmflow", "run", *words]
    command += ["--locked", "--lock", str(lock), "--json", "--jobs", str(how.jobs)]
    command += ["--store", own.root, "--dist", str(folder / "dist")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TVMFLOW_")}
    run = subprocess.run(
        command,
        env={**kept, **how.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    last = run.stdout.strip().rpartition("\n")[2]
    finished = json.loads(last) if last.startswith("{") else {}
    if finished.get("event") != "run_finished":
        raise StageError(
            f"{folder.name}: the build ended with {run.returncode} before it could be compared: "
            f"{run.stderr.strip() or 'it said nothing'}"
        )
    if run.returncode == EXIT_OK or any(each["message"] for each in finished["stages"]):
        return dict(finished)
    raise StageError(f"{folder.name}: the build ended with {run.returncode}: {run.stderr.strip()}")


def _part(
    spec: StageSpec, survey: Survey, store: LocalStore, own: LocalStore, build: str
) -> Part | None:
    """Where a stage's result differs from ours; None when it has none, or the same."""
    ours = survey.artifacts[spec.id]
    theirs = own.find(ours.key)
    if theirs is None:
        return None
    digests = theirs.digests(())
    for file in ours.files:
        if file.name not in digests:
            return Part(spec.id, file.name, "it was not made", build)
        if digests[file.name] != file.digest:
            contents = (
                Path(store.checked_blob(file.digest)).read_bytes(),
                Path(own.checked_blob(digests[file.name])).read_bytes(),
            )
            return Part(spec.id, file.name, str(first_difference(*contents)), build)
    return None

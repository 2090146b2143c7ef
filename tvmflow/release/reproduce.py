"""The reproducibility check: what a lock file names is built twice more, in different environments, and compared.

Both builds start from an empty store, in folders of different depth, with different hash seeds, time
zones, locales, thread counts and numbers of jobs. They share only downloads, which are known by their
digests. Schedules come from the lock file, because a search is not a function of its inputs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import EXIT_OK, StageError
from tvmflow.core.python_process import module_command
from tvmflow.core.types import Json, Plan, StageSpec
from tvmflow.planning.decisions import PlanState, evaluate_plan
from tvmflow.release.binary_diff import find_difference
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import copy_snapshots

_log = logging.getLogger(__name__)


class BuildEnvironment(NamedTuple):
    """Conditions of a build that must not change its results."""

    folder: str
    jobs: int
    variables: dict[str, str]


ENVIRONMENTS: Final = (
    BuildEnvironment(
        "one",
        1,
        {"PYTHONHASHSEED": "1", "TZ": "Pacific/Kiritimati", "LC_ALL": "C", "OMP_NUM_THREADS": "1"},
    ),
    BuildEnvironment(
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

_NOT_FAILED: Final = ("ran", "hit", "skipped")


class FirstDifference(NamedTuple):
    """The first difference of a build: the stage, its file, the place in the file, and which build."""

    stage_id: str
    file: str
    where: str
    build: str


class ReproducibilityReport(NamedTuple):
    """The result of the check; `difference` is None when all files of both builds are the locked ones."""

    seconds: tuple[float, ...]
    stages: int
    files: int
    difference: FirstDifference | None


class _FailedStage(NamedTuple):
    stage_id: str
    message: str
    fix: str


def build_again(
    arguments: Sequence[str],
    lock: Path,
    plan: Plan,
    store: LocalStore,
    folder: Path,
    on_build: Callable[[int], None],
) -> ReproducibilityReport:
    """Build a plan in each of `ENVIRONMENTS` and compare the files of its stages.

    Args:
        arguments: The arguments of `run` that select what is built.
        lock: The lock file that the builds enforce.
        plan: The plan; it is up to date in `store`.
        store: The store with the reference results.
        folder: An existing folder for the builds.
        on_build: Called with the number of each build before it starts.

    Raises:
        StageError: when a build ends before its files can be compared.
    """
    plan_state = evaluate_plan(plan, store)
    compared = [spec for spec in plan.stages if spec.traits.is_locked and not spec.traits.searches]
    specs = {spec.id: spec for spec in compared}
    seconds: list[float] = []
    for number, environment in enumerate(ENVIRONMENTS, 1):
        on_build(number)
        name = f"build {number} of {len(ENVIRONMENTS)}"
        built_store = LocalStore(str(folder / environment.folder / "cache"))
        duration, failures = _run_build(arguments, lock, store, built_store, folder, environment)
        seconds.append(duration)
        for failed in failures:
            spec = specs.get(failed.stage_id)
            difference = spec and _find_difference(spec, plan_state, store, built_store, name)
            if difference is None:
                raise StageError(
                    f"{name} failed: {failed.stage_id}: {failed.message}", fix=failed.fix
                )
            return ReproducibilityReport(tuple(seconds), len(compared), 0, difference)
    files = sum(len(plan_state.artifacts[spec.id].files) for spec in compared)
    return ReproducibilityReport(tuple(seconds), len(compared), files, None)


def _run_build(
    arguments: Sequence[str],
    lock: Path,
    store: LocalStore,
    built_store: LocalStore,
    folder: Path,
    environment: BuildEnvironment,
) -> tuple[float, list[_FailedStage]]:
    """Return how many seconds a build took, and its stages that failed.

    Raises:
        StageError: when it ended without a report, or failed without a message.
    """
    work = folder / environment.folder
    work.mkdir(parents=True)
    built_store.create()
    if Path(store.downloads).is_dir():
        downloads = Path(store.downloads).absolute()
        Path(built_store.downloads).symlink_to(downloads, target_is_directory=True)
    copy_snapshots(store, built_store)
    command = module_command("tvmflow", "run", *arguments)
    command += ["--locked", "--lock", str(lock), "--json", "--jobs", str(environment.jobs)]
    command += ["--store", built_store.root, "--dist", str(work / "dist")]
    inherited = {k: value for k, value in os.environ.items() if not k.startswith("TVMFLOW_")}
    _log.debug("building in %s: %s", work, command)
    variables = {**inherited, **environment.variables}
    process = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return _read_build(work.name, process)


def _read_build(
    name: str, process: subprocess.CompletedProcess[str]
) -> tuple[float, list[_FailedStage]]:
    """Return how a build ended, from the last event of its process."""
    last_line = process.stdout.strip().rpartition("\n")[2]
    event: Json = json.loads(last_line) if last_line.startswith("{") else {}
    errors = process.stderr.strip()
    if event.get("event") != "run_finished":
        raise StageError(
            f"{name}: the build ended with exit code {process.returncode} and without a report: "
            f"{errors or 'no message'}"
        )
    if process.returncode != EXIT_OK and not any(stage["message"] for stage in event["stages"]):
        raise StageError(f"{name}: the build ended with exit code {process.returncode}: {errors}")
    return float(event["seconds"]), [
        _FailedStage(stage["stage_id"], stage["message"], stage["fix"])
        for stage in event["stages"]
        if stage["outcome"] not in _NOT_FAILED
    ]


def _find_difference(
    spec: StageSpec, plan_state: PlanState, store: LocalStore, built_store: LocalStore, build: str
) -> FirstDifference | None:
    """Return where the built result of a stage differs; None when it has no result, or the same one."""
    reference = plan_state.artifacts[spec.id]
    built = built_store.find(reference.key)
    if built is None:
        return None
    digests = built.digests(())
    for file in reference.files:
        if file.name not in digests:
            return FirstDifference(spec.id, file.name, "the build has no such file", build)
        if digests[file.name] != file.digest:
            difference = find_difference(
                Path(store.blobs.verified_path(file.digest)).read_bytes(),
                Path(built_store.blobs.verified_path(digests[file.name])).read_bytes(),
            )
            return FirstDifference(spec.id, file.name, str(difference), build)
    return None

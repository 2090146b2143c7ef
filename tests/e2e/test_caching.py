"""Caching: what a change makes necessary runs again, and nothing else."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.project import STAGES, Project, Ran

HEAVY = ("tvm", "numpy", "onnx", "mxnet", "doit")


def test_the_first_run_runs_all_stages_and_the_second_none(
    first_run: tuple[Path, Ran], finished_project: Project
) -> None:
    """The second run reports that nothing was to run, and the same delivered files."""
    project, (_, first) = finished_project, first_run
    assert [label.partition("/")[0] for label in first.ran] == list(STAGES)
    delivered = sorted(Path(path).name for path in first.events[-1]["delivered"])
    assert delivered == [
        "README.md", "measurements.json", "roofline.svg", "tiny.cdx.json", "tiny.intoto.jsonl",
        "tiny.measurements.intoto.jsonl", "tiny.so", "tiny.tvmflow", "verify.json",
    ]  # fmt: skip
    assert all((project.folder / path).is_file() for path in first.events[-1]["delivered"])
    verdict = json.loads((project.folder / "dist/tiny/host/measurements.json").read_text())
    assert verdict["passed"]
    assert set(verdict["latency"]) >= {"library", "reference"}
    again = project.run()
    assert (again.code, again.ran) == (0, [])
    assert "nothing to run" in project.call("run", "tiny.yaml").out
    assert project.debris() == []
    assert_provenance(project)


def assert_provenance(project: Project) -> None:
    """Check the provenance: the files are of that model, and each tuned kernel has a measured trial."""
    folder = project.folder / "dist/tiny/host"
    assert project.call("verify", str(folder)).code == 0
    (shown,) = project.call("inspect", str(folder / "tiny.tvmflow"), "--json").events
    provenance = shown["provenance"]
    model = hashlib.sha256((project.folder / "tiny.onnx").read_bytes()).hexdigest()
    sources = {source["name"]: source["sha256"] for source in provenance["sources"]}
    assert sources.keys() == {"model", "pick_best/chosen.json"} and sources["model"] == model
    built = project.run_here().stages["build/host"]["facts"]["schedule_rules"]
    tuned = {
        kernel["name"]: kernel for kernel in provenance["kernels"] if kernel["schedule"] == "tuned"
    }
    assert sorted(tuned) == built.get("tuned", [])
    trials = {f"{kernel['workload']}/{kernel['record']['trial']}" for kernel in tuned.values()}
    assert trials <= set(project.trials())
    assert all(kernel["record"]["when"] for kernel in tuned.values())


def find_heavy_imports(project: Project, *words: str) -> list[str]:
    """Return the heavy modules that a command imports."""
    code = (
        "import sys; sys.argv = ['tvmflow', *sys.argv[1:]]; from tvmflow.__main__ import main; "
        f"code = main(); print([n for n in {HEAVY!r} if n in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=project.folder, env=project.environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names: list[str] = json.loads(done.stderr.splitlines()[-1].replace("'", '"'))
    return names


def test_planning_and_an_up_to_date_run_import_no_framework(finished_project: Project) -> None:
    """Also not after a cosmetic edit of the recipe."""
    project = finished_project
    assert find_heavy_imports(project, "plan", "tiny.yaml", "--store", "empty") == []
    assert find_heavy_imports(project, "run", "tiny.yaml") == []
    project.edit_recipe("# a small", "# an edited, small")
    assert find_heavy_imports(project, "run", "tiny.yaml") == []


@pytest.mark.slow
def test_an_up_to_date_run_starts_no_process(finished_project: Project) -> None:
    """Planning reads the model in one, and what is up to date is not planned."""
    project = finished_project
    code = (
        "import sys; sys.argv = ['tvmflow', *sys.argv[1:]]; started = []; sys.addaudithook(lambda event, _: "
        "started.append(event) if event in ('os.fork', 'os.posix_spawn', 'subprocess.Popen') else None); "
        "from tvmflow.__main__ import main; code = main(); print(started); sys.exit(code)"
    )

    def list_started(*words: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=project.folder, env=project.environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        started: list[str] = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
        return started

    assert "os.fork" in list_started("plan", "tiny.yaml")
    assert "os.fork" in list_started("run", "tiny.yaml")
    # what was written in the last two seconds is planned again
    time.sleep(2)
    list_started("run", "tiny.yaml")
    assert list_started("run", "tiny.yaml") == []


def test_cosmetic_edits_run_nothing(finished_project: Project) -> None:
    """A comment, the order of keys and an unused file are not reasons."""
    project = finished_project
    project.edit_recipe("# a small convolutional net", "# another comment")
    project.edit_recipe("name: tiny\n", "")
    project.edit_recipe("recipe: 1\n", "name: tiny\nrecipe: 1\n")
    project.edit_recipe("repeat: 2, samples: 2", "samples: 2, repeat: 2")
    (project.folder / "unused.onnx").write_bytes(b"x")
    assert project.run_here().ran == []


def test_a_model_saved_again_runs_import_and_nothing_after_it(finished_project: Project) -> None:
    """Early cutoff: the same graph from another producer is imported again, with the same output."""
    project = finished_project
    project.write_model(producer="somebody else")
    again = project.run_here()
    assert again.ran == ["import"]
    assert again.stages["import"]["reason"].startswith("the content of file 'model' changed")


@pytest.mark.slow
def test_new_weights_build_again_and_measure_nothing(finished_project: Project) -> None:
    """A retrained model of the same architecture keeps its tuning."""
    project = finished_project
    measured = project.trials()
    project.write_model(seed=1)
    again = project.run()
    assert again.ran == ["import", "build/host", "export/host", "verify/host"]
    assert again.stages["build/host"]["reason"] == "params.safetensors of import changed"
    assert project.trials() == measured


@pytest.mark.slow
def test_a_lowering_that_gives_the_same_kernels_builds_nothing(finished_project: Project) -> None:
    """Also not where the pipeline of passes has a new version: later stages read what `lower` wrote."""
    project = finished_project
    project.edit_recipe("recipe: 1\n", "recipe: 1\nkernels: {plain: [conv3d]}\n")
    again = project.run()
    assert again.ran == ["lower/host", "verify/host"]
    assert again.stages["lower/host"]["reason"].startswith("lower.lowering.plain ")


@pytest.mark.slow
def test_more_trials_measure_only_the_difference(finished_project: Project) -> None:
    """4 trials and then 7 are 7 measured trials."""
    project = finished_project
    project.spend_whole_budget()
    before = project.trials()
    assert len(before) == 4
    project.write_recipe(trials=7)
    again = project.run()
    after = project.trials()
    assert again.outcome("import") == "hit"
    assert again.stages["tune/host"]["reason"] == "tune: 4 trials -> 7 trials"
    assert len(after) == len(set(after)) == 7
    assert set(before) <= set(after)


@pytest.mark.slow
def test_a_reverted_change_finds_the_old_results(finished_project: Project) -> None:
    """A, then B, then A again: the third run finds everything."""
    project = finished_project
    project.edit_recipe("rtol: 1.0e-3", "rtol: 2.0e-3")
    assert project.run().ran == ["verify/host"]
    project.edit_recipe("rtol: 2.0e-3", "rtol: 1.0e-3")
    assert project.run().ran == []


@pytest.mark.slow
def test_another_output_exports_again_and_builds_nothing(finished_project: Project) -> None:
    """The delivered files change, and each is verified; the compiled library does not change."""
    project = finished_project
    project.edit_recipe("[shared-library, bundle]", "[shared-library, wheel]")
    assert project.run().ran == ["export/host", "verify/host"]


@pytest.mark.slow
def test_removed_files_in_dist_come_back_without_running_anything(
    finished_project: Project,
) -> None:
    """`dist` is a copy: deleting or editing it costs a copy."""
    project = finished_project
    library = project.folder / "dist/tiny/host/tiny.so"
    content = library.read_bytes()
    library.unlink()
    (project.folder / "dist/tiny/host/tiny.tvmflow").write_bytes(b"edited")
    assert project.run().ran == []
    assert library.read_bytes() == content
    assert (project.folder / "dist/tiny/host/tiny.tvmflow").stat().st_size > 100


def test_plan_and_explain_give_the_reason(finished_project: Project) -> None:
    """The reasons of `plan` and `explain` are the differences in the recipe's words."""
    project = finished_project
    project.edit_recipe("samples: 2", "samples: 3")
    plan = project.call("plan", "tiny.yaml").out.splitlines()
    assert plan[0].split()[:4] == ["tiny:import", "up", "to", "date"]
    (changed,) = (line for line in plan if line.startswith("tiny:verify/host "))
    assert changed.split()[1] == "run" and changed.endswith("  verify.samples 2 -> 3")
    explained = project.call("explain", "tiny.yaml", "verify/host").out
    assert explained.startswith("verify/host: must run\n  because verify.samples 2 -> 3\n")
    assert "setting  verify.samples" in explained
    explanation = json.loads(project.call("explain", "tiny.yaml", "verify", "--json").out)[
        "stages"
    ][0]
    assert explanation["depends_on"]["settings"]["verify"]["samples"] == 3
    unknown = project.call("explain", "tiny.yaml", "verify/mars")
    assert (unknown.code, "there is no stage 'verify/mars'" in unknown.err) == (2, True)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_targets_share_what_they_can(project: Project) -> None:
    """One import for all targets; adding a target runs its own stages and no others."""
    project.write_recipe(targets=["host"])
    project.run()
    project.write_recipe(targets=["host", "x86-64-v2"])
    again = project.run()
    assert {label.partition("/")[2] for label in again.ran} == {"x86-64-v2"}
    only = project.run("--target", "host")
    assert {label.partition("/")[2] for label in only.stages} == {"", "host"}


@pytest.mark.nightly
@pytest.mark.slow
def test_until_stops_early_and_a_later_run_continues(project: Project) -> None:
    """The later run finds the stages up to `--until` up to date."""
    first = project.run("--until", "extract_tasks")
    assert first.ran == ["import", "lower/host", "extract_tasks/host"]
    assert project.run().outcome("extract_tasks/host") == "hit"


@pytest.mark.nightly
@pytest.mark.slow
def test_deleting_the_database_of_doit_runs_nothing(project: Project) -> None:
    """With plain `doit`, too, the store decides what is up to date."""
    dodo = Path(__file__).resolve().parents[2] / "pipelines" / "dodo.py"
    environment = {**project.environment, "TVMFLOW_RECIPES": "tiny.yaml"}

    def doit(*words: str) -> str:
        command = [sys.executable, "-m", "doit", "-f", str(dodo), "--dir", ".", *words]
        done = subprocess.run(
            command,
            cwd=project.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "tiny:verify/host" in doit("list", "--all")
    assert doit("run").count("done") == len(STAGES)
    for database in project.folder.glob("cache/doit.db*"):
        database.unlink()
    assert doit("run").count("-- tiny:") == len(STAGES) + 1
    assert project.run().ran == []

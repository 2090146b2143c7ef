"""The files for CI services: their steps run here, with caches and artifacts from one run to the next."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # noqa: TID251 - of other tools, with values that recipes refuse

from tests.e2e.ci_services import ROOT, GithubActions, GitlabCi
from tests.support.project import Project

TRIALS = 4
SERVICES = pytest.mark.parametrize("kind", [GithubActions, GitlabCi])
NAMES = {GithubActions: "github", GitlabCi: "gitlab"}


def workflow(project: Project, kind: type[GithubActions | GitlabCi]) -> str:
    written = project.call("ci", NAMES[kind], "tiny.yaml", "--stdout")
    assert written.code == 0, written.err
    return written.out


@pytest.mark.slow
@SERVICES
def test_what_one_run_has_made_the_next_one_keeps(
    project: Project, tmp_path_factory: pytest.TempPathFactory, kind: type[GithubActions | GitlabCi]
) -> None:
    """A second run does nothing, new weights tune nothing, a request is compared, and trials survive lost caches."""
    project.spend_whole_budget()
    project.write_recipe(trials=TRIALS)
    (project.folder / "tvmflow.toml").write_text("")
    service = kind(tmp_path_factory.mktemp("service"), project.folder, project.environment)
    text = workflow(project, kind)

    code, out = service.run(text)
    assert code == 0, out
    assert "verified" in out
    assert service.comment == ""
    assert "install" in service.installed

    code, out = service.run(text)
    assert code == 0, out
    assert "0 ran" in out or "up to date" in out
    assert "never ran" not in out

    project.write_model(seed=1)
    code, out = service.run(text, branch="retrained", target="main")
    assert code == 0, out
    assert "build/host" in out
    assert "tune/host" not in [line.split()[0] for line in out.splitlines() if " done " in line]
    assert "tiny" in service.comment
    assert "|" in service.comment

    service.evict_caches()
    code, out = service.run(text)
    assert code == 0, out
    assert " trials taken, 0 known already, 0 records refused" in out
    assert "0 trials taken" not in out


@pytest.mark.slow
def test_a_run_that_fails_keeps_its_caches(
    project: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The job fails, and what was built before the failure is there the next time."""
    project.edit_recipe("atol: 1.0e-4", "atol: 0.0")
    project.edit_recipe("rtol: 1.0e-3", "rtol: 0.0")
    service = GithubActions(tmp_path_factory.mktemp("service"), project.folder, project.environment)
    text = workflow(project, GithubActions)
    code, out = service.run(text)
    assert code == 3, out
    code, out = service.run(text)
    assert code == 3, out
    assert "build/host" not in [line.split()[0] for line in out.splitlines() if " done " in line]


# A tvmflow that prints its arguments; best-effort commands fail as the variables and files say.
FAKE = """
case "$1 $2" in
    "records import") echo "import $(cat "$3")"; exit "$(sed -n 's/^exit //p' "$3")" ;;
    "records export") [ -z "$NO_TRIALS" ] || exit 2; echo "exit 0" > "$3" ;;
    "cache gc") exit 4 ;;
esac
printf '<%s>' "$@"; echo
case "$1" in
    run) mkdir -p dist; touch dist/lib ;;
    compare) [ -z "$NO_COMPARISON" ] || exit "$NO_COMPARISON"; echo "### a -> b" ;;
esac
"""
CALL = """
jobs:
  models:
    steps:
      - uses: tvmflow/tvmflow@v1
        with:
          recipes: |
            a b.yaml  \t

              c.yaml
          options: |
            --keep-going

            --locked   --offline
          fail-on-regression: "{limit}"
"""


def start_github(folder: Path, **variables: str) -> GithubActions:
    """Return the service with a project that needs nothing, and a tvmflow that does nothing."""
    (folder / "project").mkdir()
    service = GithubActions(
        folder / "service", folder / "project", {"PATH": os.environ["PATH"], **variables}
    )
    service.replace_program("tvmflow", FAKE)
    return service


@pytest.mark.parametrize(
    ("artifacts", "taken"),
    [
        ({}, None),
        ({3: "exit 1", 2: "exit 0"}, 3),
        ({4: "exit 2", 3: "exit 70", 2: "exit 0"}, 2),
        ({4: "exit 2"}, None),
    ],
)
def test_trials_are_searched_back_over_runs(
    tmp_path: Path, artifacts: dict[int, str], taken: int | None
) -> None:
    """Runs without an artifact, and trials that are damaged or of another CPU; those of pull requests are not read."""
    service = start_github(tmp_path)
    for run, text in {**artifacts, 9: "exit 0"}.items():
        pack = service.folder / "artifacts" / str(run) / "tvmflow-trials-models" / "trials.jsonl.gz"
        pack.parent.mkdir(parents=True)
        pack.write_text(text)
    (service.folder / "listed").mkdir()
    for event, runs in {"push": "2\n4\n", "schedule": "3\n", "pull_request": "9\n"}.items():
        (service.folder / "listed" / event).write_text(runs)
    code, out = service.run(CALL)
    assert code == 0, out
    assert "<run><a b.yaml><c.yaml><--keep-going><--locked><--offline><--dist><dist>" in out
    assert ("::notice::no trials of earlier runs were taken" in out) is (taken is None)
    assert (f"the trials of run {taken} were taken" in out) is (taken is not None)
    newer = [run for run in artifacts if taken is None or run > taken]
    assert [f"the trials of run {run} cannot be used here" in out for run in newer] == [True] * len(
        newer
    )
    assert out.count("import exit") == len(newer) + (taken is not None)


def test_what_is_done_as_far_as_possible_fails_no_job(tmp_path: Path) -> None:
    """A service without gh, nothing to export, a store that cannot be made smaller, a comparison, a comment."""
    service = start_github(tmp_path, NO_TRIALS="1")
    service.replace_program("gh", "echo 'HTTP 403: Resource not accessible' >&2; exit 1")
    code, out = service.run(CALL)
    assert code == 0, out
    assert (
        "::notice::no trials are kept" in out and "::warning::the store was not made smaller" in out
    )
    code, out = service.run(CALL, branch="change", target="main")
    assert code == 0, out
    assert "not a comment: HTTP 403: Resource not accessible" in out
    for status, limit, ends in (("2", "", 0), ("2", "5", 2), ("3", "5", 3)):
        (tmp_path / f"{status}{limit}").mkdir()
        service = start_github(tmp_path / f"{status}{limit}", NO_COMPARISON=status)
        call = CALL.replace("{limit}", limit)
        code, out = service.run(call, branch="change", target="main")
        assert code == 0 and "no run of the target branch is in the cache" in out
        assert service.run(call)[0] == 0
        code, out = service.run(call, branch="change", target="main")
        assert code == ends, out
        assert ("::warning::this run was not compared" in out) is (ends == 0)


def test_a_job_of_gitlab_says_what_it_could_not_do(project: Project, tmp_path: Path) -> None:
    """Trials of another CPU, a cache that the target branch does not share, a comment that is refused."""
    (tmp_path / "other").mkdir()
    service = GitlabCi(
        tmp_path / "service", tmp_path / "other", {"PATH": os.environ["PATH"], "NO_TRIALS": "1"}
    )
    service.replace_program("tvmflow", FAKE)
    service.replace_program(
        "curl", 'case "$*" in *note*) exit 22 ;; esac; echo "exit 2" > earlier.jsonl.gz'
    )
    text = workflow(project, GitlabCi)
    code, out = service.run(text, branch="change", target="main")
    assert code == 0, out
    assert "the trials of the last run cannot be used here (exit code 2)" in out
    assert 'see "Use separate caches for protected branches"' in out
    assert "no trials are kept" in out and "the store was not made smaller" in out
    assert service.run(text)[0] == 0
    code, out = service.run(text, branch="change", target="main")
    assert code == 0, out
    assert "not a note on the merge request" in out and "### a -> b" in out
    service.replace_program(
        "tvmflow", FAKE.replace("exit 4", "exit 0").replace("compare) ", "compare) exit 4;")
    )
    code, out = service.run(text, branch="change", target="main")
    assert code == 0 and "not compared with the target branch: see above" in out
    service.replace_program("curl", "exit 22")
    service.evict_caches()
    assert "no trials of earlier runs" in service.run(text)[1]


@pytest.mark.parametrize("where", [".", "..", "../.."])
@SERVICES
def test_a_project_below_the_root_of_git_has_its_file_there(
    project: Project, tmp_path: Path, kind: type[GithubActions | GitlabCi], where: str
) -> None:
    """Services read no other place; the job works in the project's folder, from wherever the file was written."""
    top = tmp_path / "top"
    nets = top / "ml" / "nets" / "deep"
    nets.mkdir(parents=True)
    (top / ".git").mkdir()
    (top / "ml" / "tvmflow.toml").write_text('dist = "../out"\n')
    for name in ("tiny.yaml", "tiny.onnx"):
        (project.folder / name).rename(nets / name)
    cwd = (nets / where).resolve()
    written = project.call("ci", NAMES[kind], str((nets / "tiny.yaml").relative_to(cwd)), cwd=cwd)
    assert written.code == 0, written.err
    place = top / (".github/workflows/models.yml" if kind is GithubActions else ".gitlab-ci.yml")
    assert place.is_file() and f"commit it, and {NAMES[kind]} runs" in written.out
    service = kind(tmp_path / "service", top, {"PATH": os.environ["PATH"]})
    service.replace_program("tvmflow", 'echo "$PWD $*"; touch trials.jsonl.gz; mkdir -p ../out')
    code, out = service.run(place.read_text())
    assert code == 0, out
    assert "/ml run nets/deep/tiny.yaml --keep-going --dist ../out" in out
    assert list((service.folder / "caches").rglob("ml/.tvmflow-base"))
    assert list((service.folder / "artifacts").rglob("trials.jsonl.gz"))
    other = project.call(
        "ci", NAMES[kind], "nets/deep/tiny.yaml", "--output", "x.txt", cwd=top / "ml"
    )
    assert f"{NAMES[kind]} reads only {place}" in other.out


def test_files_ask_for_the_extras_that_recipes_need(project: Project) -> None:
    """Images to calibrate with, also of a variant; images of one target; a compiler for GPUs."""
    (project.folder / "photos").mkdir()
    (project.folder / "photos" / "a.png").touch()
    text = (project.folder / "tiny.yaml").read_text()
    image = text.replace("dtype: float32}", "dtype: float32, image: {}}")

    def find_extras(content: str) -> str:
        (project.folder / "tiny.yaml").write_text(content)
        return "".join(re.findall("extras: (.*)", workflow(project, GithubActions)))

    assert find_extras(text) == ""
    assert find_extras(image + "quantize: {data: photos}\n") == "images"
    assert find_extras(image + "variants: {a: {quantize: {data: photos}}}\n") == "images"
    target = "  - {name: a, preset: host, verify: {data: photos}}\n  - jetson-orin"
    assert find_extras(image.replace("  - host", target)) == "cuda,images"


@SERVICES
def test_files_name_what_the_project_has(
    project: Project, kind: type[GithubActions | GitlabCi]
) -> None:
    """They have the recipe's path from the project's root, and are written where the service looks for them."""
    folder = project.folder / "nets"
    folder.mkdir()
    for name in ("tiny.yaml", "tiny.onnx"):
        (project.folder / name).rename(folder / name)
    (project.folder / "tvmflow.toml").write_text('dist = "out"\n')
    name = NAMES[kind]
    written = project.call("ci", name, "tiny.yaml", cwd=folder)
    assert written.code == 0, written.err
    path = project.folder / {"github": ".github/workflows/models.yml"}.get(name, ".gitlab-ci.yml")
    text = path.read_text()
    assert yaml.safe_load(text)
    assert "nets/tiny.yaml" in text
    assert "out" in text
    assert "inputs." not in text
    assert "--locked" not in text
    (folder / "tiny.lock.yaml").write_text("")
    again = project.call("ci", name, "tiny.yaml", cwd=folder)
    assert again.code == 2
    assert "exists" in again.err
    assert "--force" in again.err
    assert project.call("ci", name, "tiny.yaml", "--force", cwd=folder).code == 0
    assert "--locked" in path.read_text()


@pytest.mark.slow
def test_paths_that_a_service_would_read_otherwise_are_refused(project: Project) -> None:
    """A space, an expression, an option, and a file outside the project."""
    (project.folder / "tvmflow.toml").write_text("")
    text = (project.folder / "tiny.yaml").read_text()
    for name in ("a b.yaml", "${{ x }}.yaml", "$HOME.yaml", "../other.yaml", "./--store=x.yaml"):
        path = project.folder / name
        path.write_text(text.replace("tiny.onnx", str(project.folder / "tiny.onnx")))
        refused = project.call("ci", "github", name, "--stdout")
        assert refused.code == 2, refused.err
        assert Path(name).name in refused.err
        path.unlink()


@SERVICES
@pytest.mark.parametrize("dist", ["${{ secrets.TOKEN }}", "$TOKEN", "out $[[ inputs.x ]]", "a*"])
def test_a_folder_of_deliveries_is_no_expression_of_a_service(
    project: Project, kind: type[GithubActions | GitlabCi], dist: str
) -> None:
    """A service would replace it by a secret, a variable, or the files that match."""
    (project.folder / "tvmflow.toml").write_text(f"dist = '{dist}'\n")
    refused = project.call("ci", NAMES[kind], "tiny.yaml", "--stdout")
    assert refused.code == 2, refused.out
    assert dist in refused.err and "tvmflow.toml" in refused.err


@pytest.mark.slow
def test_hooks_of_pre_commit_run(project: Project, tmp_path: Path) -> None:
    """A valid recipe passes; a wrong one fails with its place, and so does a lock file of another model."""
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    hooks = {hook["id"]: hook for hook in yaml.safe_load(text)}
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "tvmflow").write_text(f'#!/bin/sh\nexec {shlex.join(project.command())} "$@"\n')
    (programs / "tvmflow").chmod(0o755)
    environment = {**project.environment, "PATH": f"{programs}:{project.environment['PATH']}"}

    def run(name: str, *files: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*shlex.split(hooks[name]["entry"]), *files],
            cwd=project.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("tvmflow-plan", "tiny.yaml").returncode == 0
    assert project.tvmflow("lock", "tiny.yaml").code == 0
    # a name that git quotes, the other suffix, and files of other tools
    for name in ("dé", 'a "b"\\'):
        for suffix in (".yaml", ".lock.yaml"):
            shutil.copy(project.folder / f"tiny{suffix}", project.folder / f"{name}{suffix}")
    (project.folder / "dé.yaml").rename(project.folder / "dé.yml")
    for name in ("conda.lock.yaml", "azure.yml"):
        (project.folder / name).write_text("version: 1\nstages: []\n")
    assert run("tvmflow-plan", "azure.yml", "dé.yml").returncode == 0
    subprocess.run(["git", "init", "-q"], cwd=project.folder, check=True)
    subprocess.run(["git", "add", "."], cwd=project.folder, check=True)
    current = run("tvmflow-lock")
    assert current.returncode == 0, current.stderr
    project.write_model(seed=1)
    stale = run("tvmflow-lock")
    assert stale.returncode == 1
    assert stale.stderr.count("the content of file 'model' changed") == 3
    project.edit_recipe("outputs", "output")
    wrong = run("tvmflow-plan", "tiny.yaml")
    assert wrong.returncode == 1
    assert "tiny.yaml:" in wrong.stderr

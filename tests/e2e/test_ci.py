"""The files for CI services: their steps run here, with caches and artifacts from one run to the next."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml  # noqa: TID251 - of other tools, with values that recipes refuse

from tests.support.ci_services import ROOT, GithubActions, GitlabCi
from tests.support.project import Project

TRIALS = 4
SERVICES = pytest.mark.parametrize("kind", [GithubActions, GitlabCi])
NAMES = {GithubActions: "github", GitlabCi: "gitlab"}


def workflow(project: Project, kind: type[GithubActions | GitlabCi]) -> str:
    written = project.tvmflow("ci", NAMES[kind], "tiny.yaml", "--stdout")
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
    written = project.tvmflow("ci", name, "tiny.yaml", cwd=folder)
    assert written.code == 0, written.err
    path = project.folder / {"github": ".github/workflows/models.yml"}.get(name, ".gitlab-ci.yml")
    text = path.read_text()
    assert yaml.safe_load(text)
    assert "nets/tiny.yaml" in text
    assert "out" in text
    assert "inputs." not in text
    assert "--locked" not in text
    (folder / "tiny.lock.yaml").write_text("")
    again = project.tvmflow("ci", name, "tiny.yaml", cwd=folder)
    assert again.code == 2
    assert "exists" in again.err
    assert "--force" in again.err
    assert project.tvmflow("ci", name, "tiny.yaml", "--force", cwd=folder).code == 0
    assert "--locked" in path.read_text()


@pytest.mark.slow
def test_paths_that_a_service_would_read_otherwise_are_refused(project: Project) -> None:
    """A space, an expression, an option, and a file outside the project."""
    (project.folder / "tvmflow.toml").write_text("")
    text = (project.folder / "tiny.yaml").read_text()
    for name in ("a b.yaml", "${{ x }}.yaml", "$HOME.yaml", "../other.yaml", "./--store=x.yaml"):
        path = project.folder / name
        path.write_text(text.replace("tiny.onnx", str(project.folder / "tiny.onnx")))
        refused = project.tvmflow("ci", "github", name, "--stdout")
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
    refused = project.tvmflow("ci", NAMES[kind], "tiny.yaml", "--stdout")
    assert refused.code == 2, refused.out
    assert dist in refused.err and "tvmflow.toml" in refused.err


@pytest.mark.slow
def test_hooks_of_pre_commit_run(project: Project, tmp_path: Path) -> None:
    """A valid recipe passes; a wrong one fails with its place, and so does a lock file of another model."""
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    hooks = {hook["id"]: hook for hook in yaml.safe_load(text)}
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "tvmflow").write_text(f'#!/bin/sh\nexec {" ".join(project.command())} "$@"\n')
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
    subprocess.run(["git", "init", "-q"], cwd=project.folder, check=True)
    subprocess.run(["git", "add", "tiny.lock.yaml"], cwd=project.folder, check=True)
    current = run("tvmflow-lock")
    assert current.returncode == 0, current.stderr
    project.write_model(seed=1)
    stale = run("tvmflow-lock")
    assert stale.returncode == 1
    assert "the content of file 'model' changed" in stale.stderr
    project.edit_recipe("outputs", "output")
    wrong = run("tvmflow-plan", "tiny.yaml")
    assert wrong.returncode == 1
    assert "tiny.yaml:" in wrong.stderr
